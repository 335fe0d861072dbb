"""What a simulated run would achieve: throughput, lag, idle shares, the first bottleneck, and settings that are better."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollbook.contracts.freshness import BatchPolicy, FreshnessRule, default_quorum
from rollbook.simulation.durations import Durations, Episode, RequestTime, TaskDurations, TrainingTime
from rollbook.simulation.fit import Fit
from rollbook.simulation.processors import UNLIMITED, Processors
from rollbook.simulation.setting import ConfiguredRun, Setting
from rollbook.simulation.simulator import SimulatedRun, Simulation

MAX_EPISODES = 60_000
"""Simulated episodes of one prediction: a few seconds."""
MIN_STEPS, MAX_STEPS = 12, 40
LARGE_STEP = 256
"""Groups of a step from which a comparison of settings simulates a part of the run only."""
PART_OF_STEP = 64
"""Groups of a step in such a part."""
WARM_UP_SHARE = 0.25
"""The first steps fill the pipeline and are not measured."""
SAME = 0.02
"""Predictions that differ by less are equal."""
POLICY_GAIN = 0.05
"""Another batch policy changes what is trained, so it is recommended only for more than this."""
RECOMMENDED_POLICIES = (BatchPolicy.WAIT, BatchPolicy.TRIM, BatchPolicy.PARTS)
"""`drop` trains slow tasks less, which a throughput does not show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    setting: Setting
    steps_per_s: float
    samples_per_s: float
    tokens_per_s: float
    """Trained tokens: masked and dropped ones do not count."""
    lag_mean: float
    lag_shares: dict[int, float]
    """Share of the trained groups, or parts, by lag."""
    trainer_idle: float
    engine_idle: float
    masked: float
    """Share of the tokens of the batches."""
    dropped: dict[str, float]
    """Share of the opened groups, or samples with policy `parts`, by kind."""
    max_load: int

    def row(self) -> dict[str, Any]:
        """Plain JSON values."""
        rule = self.setting.rule
        return {
            "groups_per_step": rule.groups_per_step,
            "max_groups_in_flight": rule.max_in_flight,
            "max_head_offpolicy_versions": rule.max_head_offpolicy_versions,
            "batch_policy": str(rule.policy),
            "workers": self.setting.workers,
            "replicas": self.setting.replicas,
            "steps_per_s": round(self.steps_per_s, 5),
            "samples_per_s": round(self.samples_per_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "lag_mean": round(self.lag_mean, 3),
            "lag_shares": {str(lag): round(share, 4) for lag, share in self.lag_shares.items()},
            "trainer_idle": round(self.trainer_idle, 4),
            "engine_idle": round(self.engine_idle, 4),
            "masked": round(self.masked, 4),
            "dropped": {kind: round(share, 4) for kind, share in self.dropped.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The same run with one thing changed."""

    name: str
    text: str
    gain: float
    """Relative change of the trained tokens per second."""


def on_machine(fit: Fit, run: ConfiguredRun, *, cores: float | None = None) -> Fit:
    """With another number of cores. A run that may have several machines is not limited by those of the trace."""
    processors = fit.durations.processors
    if processors is UNLIMITED or (cores is None and run.has_members):
        return replace(fit, durations=replace(fit.durations, processors=UNLIMITED))
    return replace(
        fit, durations=replace(fit.durations, processors=replace(processors, cores=cores or processors.cores))
    )


def steps_for(setting: Setting) -> int:
    """Steps to simulate: as many as a few seconds allow."""
    per_step = setting.rule.groups_per_step * setting.samples_per_group
    return max(MIN_STEPS, min(MAX_STEPS, MAX_EPISODES // per_step))


def predict(setting: Setting, durations: Durations, *, seed: int = 0, steps: int | None = None) -> Prediction:
    return measure(Simulation(setting, durations, seed=seed).run(steps or steps_for(setting)))


def is_large(setting: Setting) -> bool:
    return setting.rule.groups_per_step >= LARGE_STEP


def predict_part(setting: Setting, durations: Durations, *, seed: int = 0, steps: int | None = None) -> Prediction:
    """Like `predict`, but simulates only a part of a large run, with engines and a trainer that are slower by the same factor.

    So the search for better settings of a run with 10,000 workers takes seconds. Parts of large runs behave alike.
    """
    rule = setting.rule
    if not is_large(setting):
        return predict(setting, durations, seed=seed, steps=steps)
    factor = rule.groups_per_step / PART_OF_STEP
    small = replace(
        setting,
        rule=replace(rule, groups_per_step=PART_OF_STEP, max_in_flight=max(1, round(rule.max_in_flight / factor))),
        slots=max(1, round(setting.slots / factor)),
    )
    slow = replace(
        durations,
        request=_slower_by_load(durations.request, factor),
        training=_smaller(durations.training, factor),
        processors=_for_more_requests(durations.processors, factor),
    )
    part = predict(small, slow, seed=seed, steps=steps or (MIN_STEPS + MAX_STEPS) // 2)
    return replace(
        part,
        setting=setting,
        samples_per_s=part.samples_per_s * factor,
        tokens_per_s=part.tokens_per_s * factor,
        max_load=round(part.max_load * factor),
    )


def _slower_by_load(request: RequestTime, factor: float) -> RequestTime:
    """Each concurrent request represents `factor` of them."""
    return replace(
        request,
        per_request_s=request.per_request_s * factor,
        per_total_s=request.per_total_s * factor,
        per_worker_s=request.per_worker_s * factor,
    )


def _smaller(training: TrainingTime, factor: float) -> TrainingTime:
    """Each trained sample and token represents `factor` of them."""
    return replace(training, per_sample_s=training.per_sample_s * factor, per_token_s=training.per_token_s * factor)


def _for_more_requests(processors: Processors, factor: float) -> Processors:
    """Each request represents `factor` of them."""
    return replace(processors, request_s=processors.request_s * factor, worker_s=processors.worker_s * factor)


def measure(run: SimulatedRun) -> Prediction:
    left_out = max(1, int(len(run.steps) * WARM_UP_SHARE))
    first, steps = run.steps[left_out - 1], run.steps[left_out:]
    seconds = max(1e-9, steps[-1].ended_at - first.ended_at)
    tokens = sum(step.tokens for step in steps)
    masked = sum(step.masked_tokens for step in steps)
    lags = Counter(lag for step in steps for lag in step.lags)
    return Prediction(
        setting=run.setting,
        steps_per_s=len(steps) / seconds,
        samples_per_s=sum(step.samples for step in steps) / seconds,
        tokens_per_s=(tokens - masked) / seconds,
        lag_mean=sum(lag * count for lag, count in lags.items()) / lags.total(),
        lag_shares={lag: lags[lag] / lags.total() for lag in sorted(lags)},
        trainer_idle=max(0.0, 1.0 - sum(step.trained_s for step in steps) / seconds),
        engine_idle=run.idle_engine_share,
        masked=masked / max(1, tokens),
        dropped={kind: units / max(1, run.opened) for kind, units in sorted(run.dropped.items())},
        max_load=run.max_load,
    )


def ideal_samples_per_s(setting: Setting, durations: Durations) -> float:
    """An upper bound: the trainer never waits, or every slot plays, or every replica, worker or core works, all the time.

    Samples that are masked as a whole are not left out.
    """
    groups = [group for task in durations.tasks for group in task.groups]
    episodes = [episode for group in groups for episode in group]
    turns = [turn for episode in episodes for turn in episode.turns]
    works = sum(turn.work for turn in turns) / len(episodes)
    other_s = (sum(turn.act_s for turn in turns) + sum(episode.other_s for episode in episodes)) / len(episodes)
    request, training = durations.request, durations.training
    slope = request.slope(replicas=setting.replicas, per_device=setting.replicas_per_device, workers=setting.workers)
    samples = setting.rule.groups_per_step * setting.samples_per_group
    tokens = round(samples * sum(episode.tokens for episode in episodes) / len(episodes))
    train_s = training.seconds(samples=samples, tokens=tokens) * sum(training.spread) / len(training.spread)
    slots = min(setting.slots, setting.rule.max_in_flight) * setting.samples_per_group
    processors, requests = durations.processors, len(turns) / len(episodes)
    cpu_s = processors.trainer * train_s / samples + processors.request_s * requests
    return min(
        samples / max(train_s, 1e-9),
        slots / max(works * request.base_s + other_s, 1e-9),
        setting.replicas / max(slope * works, 1e-9),
        setting.workers / max(processors.worker_s * requests, 1e-9),
        processors.cores / max(cpu_s, 1e-9),
    )


def what_ifs(base: Prediction, durations: Durations, *, seed: int = 0, steps: int | None = None) -> list[WhatIf]:
    """The gain of doubling each resource alone, largest first. The first one is the bottleneck."""
    setting, rule = base.setting, base.setting.rule
    if is_large(setting):
        base = predict_part(setting, durations, seed=seed, steps=steps)
    found = []
    for name, text, other_setting, other_durations in _changes(setting, rule, durations):
        changed = predict_part(other_setting, other_durations, seed=seed, steps=steps)
        found.append(WhatIf(name=name, text=text, gain=changed.tokens_per_s / max(base.tokens_per_s, 1e-9) - 1.0))
    return sorted(found, key=lambda one: -one.gain)


def _changes(
    setting: Setting, rule: FreshnessRule, durations: Durations
) -> Iterator[tuple[str, str, Setting, Durations]]:
    yield "trainer", "training twice as fast", setting, replace(durations, training=_faster(durations.training))
    yield "engines", "policy requests twice as fast", setting, replace(durations, request=_quicker(durations.request))
    tasks = tuple(_with_quick_environment(task) for task in durations.tasks)
    yield "environment", "environments twice as fast", setting, replace(durations, tasks=tasks)
    settle = tuple(seconds / 2 for seconds in durations.settle_s)
    yield "publication", "publications twice as fast", setting, replace(durations, settle_s=settle)
    more = replace(
        setting,
        rule=replace(rule, max_in_flight=2 * rule.max_in_flight),
        slots=max(setting.slots, 2 * min(setting.slots, rule.max_in_flight)),
    )
    yield "groups in flight", ", ".join(changed_sizes(setting, more)), more, durations
    if (processors := durations.processors) is not UNLIMITED:
        cores = replace(processors, cores=2 * processors.cores)
        yield (
            "cores",
            f"{cores.cores:g} cores instead of {processors.cores:g}",
            setting,
            replace(durations, processors=cores),
        )
        workers = 2 * setting.workers
        yield "workers", f"rollout.workers = {workers}", replace(setting, workers=workers), durations
    bound = rule.max_head_offpolicy_versions + 1
    older = replace(setting, rule=replace(rule, max_head_offpolicy_versions=bound))
    yield "staleness bound", f"gate.max_head_offpolicy_versions = {bound}", older, durations
    if rule.policy is not BatchPolicy.PARTS and setting.samples_per_group > 1:
        yield (
            "slow episodes",
            'gate.batch_policy = "parts"',
            replace(setting, rule=with_policy(setting, BatchPolicy.PARTS)),
            durations,
        )


def _faster(training: TrainingTime) -> TrainingTime:
    return replace(
        training,
        base_s=training.base_s / 2,
        per_sample_s=training.per_sample_s / 2,
        per_token_s=training.per_token_s / 2,
    )


def _quicker(request: RequestTime) -> RequestTime:
    return replace(
        request,
        base_s=request.base_s / 2,
        per_request_s=request.per_request_s / 2,
        per_total_s=request.per_total_s / 2,
        per_worker_s=request.per_worker_s / 2,
    )


def _with_quick_environment(task: TaskDurations) -> TaskDurations:
    def quick(episode: Episode) -> Episode:
        turns = tuple(replace(turn, act_s=turn.act_s / 2) for turn in episode.turns)
        return replace(episode, turns=turns, other_s=episode.other_s / 2)

    return replace(task, groups=tuple(tuple(map(quick, group)) for group in task.groups))


def changed_sizes(old: Setting, new: Setting) -> list[str]:
    """The settings that change the number of groups in flight from `old` to `new`."""
    changes = []
    if new.rule.max_in_flight != old.rule.max_in_flight:
        changes.append(f"gate.max_groups_in_flight = {new.rule.max_in_flight}")
    if new.slots != old.slots:
        changes.append(f"rollout.groups_per_worker = {math.ceil(new.slots / new.workers)}")
    return changes


def with_policy(setting: Setting, policy: BatchPolicy) -> FreshnessRule:
    is_in_parts = policy is BatchPolicy.PARTS
    size = setting.samples_per_group
    return replace(
        setting.rule,
        policy=policy,
        samples_per_group=size if is_in_parts else 1,
        quorum=default_quorum(size) if is_in_parts else None,
    )


def recommend(base: Prediction, durations: Durations, *, seed: int = 0, steps: int | None = None) -> Prediction:
    """The best groups in flight and batch policy for the same bound and the same machines. `base` if nothing is better."""
    setting = base.setting
    given = base
    if is_large(setting):
        base = predict_part(setting, durations, seed=seed, steps=steps)
    bound, per_step = setting.rule.max_head_offpolicy_versions, setting.rule.groups_per_step
    sizes = sorted({max(1, per_step // 2), *(per_step * k for k in range(1, bound + 2))})
    policies = [policy for policy in RECOMMENDED_POLICIES if policy is not setting.rule.policy]
    if setting.samples_per_group < 2:
        policies = [policy for policy in policies if policy is not BatchPolicy.PARTS]
    found = [base]
    for policy in (setting.rule.policy, *policies):
        rule = setting.rule if policy is setting.rule.policy else with_policy(setting, policy)
        for size in sizes:
            other = replace(setting, rule=replace(rule, max_in_flight=size), slots=max(size, setting.slots))
            if other != setting:
                found.append(predict_part(other, durations, seed=seed, steps=steps))
    kept = [one for one in found if one.setting.rule.policy is setting.rule.policy]
    best_kept, best = max(one.tokens_per_s for one in kept), max(one.tokens_per_s for one in found)
    if best_kept * (1.0 + POLICY_GAIN) >= best:
        found, best = kept, best_kept
    good = [one for one in found if one.tokens_per_s >= best * (1.0 - SAME)]
    if base in good:
        # What it has now is as fast: change it only for less lag.
        good = [base, *(one for one in good if one.lag_mean < base.lag_mean - 0.1)]
    chosen = min(good, key=lambda one: (round(one.lag_mean, 1), one.setting.rule.max_in_flight))
    return given if chosen is base else chosen


def frontier(points: Sequence[Prediction]) -> list[Prediction]:
    """Those for which no other one has at most the same lag and more trained tokens per second, by lag."""
    best: list[Prediction] = []
    for point in sorted(points, key=lambda one: (one.lag_mean, -one.tokens_per_s)):
        if not best or point.tokens_per_s > best[-1].tokens_per_s:
            best.append(point)
    return best


def extrapolations(fit: Fit, run: ConfiguredRun, prediction: Prediction) -> list[str]:
    """Where the prediction leaves what the traces cover, in sentences."""
    covered, setting = fit.covered, prediction.setting
    found = []
    if prediction.max_load > 1.2 * covered.max_load:
        found.append(
            f"a replica has up to {prediction.max_load} concurrent requests; the trace has at most {covered.max_load:.0f}, so the "
            "duration of a request is extrapolated in a straight line"
        )
    found += _processes_beyond(fit, run, setting)
    samples = setting.rule.groups_per_step * setting.samples_per_group
    least, most = covered.samples_per_step
    if not 0.8 * least <= samples <= 1.2 * most:
        seen = str(least) if least == most else f"{least} to {most}"
        found.append(f"a step has {samples} samples; the trace has {seen}, so its training time is extrapolated")
    low, high = covered.overlap
    is_synchronous = setting.rule.max_head_offpolicy_versions == 0
    if is_synchronous and low > 0.5:
        found.append("training without concurrent generation was not traced: it may be faster than predicted")
    if not is_synchronous and high < 0.5:
        found.append("training with concurrent generation was not traced: both may be slower than predicted")
    found += _unknown_changes(fit, run)
    return found


def _processes_beyond(fit: Fit, run: ConfiguredRun, setting: Setting) -> Iterator[str]:
    covered, processors = fit.covered, fit.durations.processors
    device = "each replica is assumed to have a separate device"
    worker = "workers are assumed to have cores of their own, and no effect"
    if processors is not UNLIMITED:
        shared = f"all processes are assumed to share {processors.cores:.3g} cores"
        worker = f"{shared}, and a worker to use at most one"
        device = shared if run.values.get("inference.device") == "cpu" else device
    if setting.replicas_per_device > 1:
        device = "replicas are assumed to share one GPU"
    for name, number, known, assumed in (
        ("inference.replicas", setting.replicas, covered.replicas, device),
        ("rollout.workers", setting.workers, covered.workers, worker),
    ):
        if number not in known and len(known) == 1:
            yield f"{name} is {number}, the trace has {min(known)}: {assumed}. A second trace would show it"
        elif number not in known:
            yield f"{name} is {number}; the traces have {', '.join(map(str, sorted(known)))}: {assumed}"
    if processors is not UNLIMITED:
        traced = sorted(trace.cpu.cores for trace in fit.traces if trace.cpu is not None)
        if not any(0.8 <= processors.cores / cores <= 1.25 for cores in traced):
            yield f"the run has {processors.cores:.3g} cores; the trace has {', '.join(f'{cores:.3g}' for cores in traced)}"


def _unknown_changes(fit: Fit, run: ConfiguredRun) -> Iterator[str]:
    if names := sorted(set.intersection(*(run.unsimulated_changes(trace.run) for trace in fit.traces))):
        yield f"these settings differ from the trace, and their effect is not simulated: {', '.join(names)}"
    if run.values.get("rollout.oversample"):
        yield "rollout.oversample is not simulated: a group has exactly completions_per_prompt episodes"
    if run.values.get("rollout.adaptive.enabled"):
        yield "rollout.adaptive is not simulated: the limit of groups in flight is fixed"
