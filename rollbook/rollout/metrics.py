"""The metrics of this room, and how a finished group is recorded."""

from collections.abc import Mapping, Sequence

from rollbook.contracts.group import DropKind, DropReason, GroupOutcome, PromptGroup
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.settings import ANSWER_KEY, SECONDS_KEY, THOUGHT_KEY, judge_key, score_key
from rollbook.telemetry.metrics import Metric, MetricRecorder, Reduction

ROLLOUT_METRICS: tuple[Metric, ...] = (
    Metric("rollout/raw_reward", "reward", "mean reward of all scorable samples, trained or not", Reduction.MEAN),
    Metric("rollout/raw_reward_max", "reward", "highest reward of a sample, trained or not", Reduction.MAX),
    Metric(
        "rollout/raw_accuracy", "share", "solved samples, if the environment reports it, trained or not", Reduction.MEAN
    ),
    Metric("rollout/response_len", "tokens", "sampled tokens of an episode", Reduction.MEAN),
    Metric("rollout/truncated_ratio", "share", "episodes that a limit ended", Reduction.MEAN),
    Metric("rollout/turns", "turns", "turns of an episode", Reduction.MEAN),
    Metric("rollout/group_seconds", "s", "from the grant to the last sample", Reduction.MEAN),
    Metric("rollout/group_seconds_max", "s", "the slowest group of the tick", Reduction.MAX),
    Metric("rollout/groups_finished", "groups", "finished groups", Reduction.SUM),
    Metric("rollout/parts_per_group", "parts", "parts in which a group was submitted", Reduction.MEAN),
    Metric("rollout/episodes", "episodes", "finished episodes, including unscorable and retried ones", Reduction.SUM),
    Metric("rollout/groups_failed", "groups", "groups without enough scorable samples", Reduction.SUM),
    Metric("rollout/groups_released", "groups", "groups returned for another attempt", Reduction.SUM),
    Metric("rollout/samples_retried", "samples", "unscorable samples that were played again", Reduction.SUM),
    Metric(
        "rollout/samples_declined", "samples", "samples for which the rollout function returned None", Reduction.SUM
    ),
    Metric("rollout/samples_surplus", "samples", "extra episodes of over-sampling that were not needed", Reduction.SUM),
    Metric("rollout/thought_len", "tokens", "tokens of thought of a sample", Reduction.MEAN),
    Metric("rollout/answer_len", "tokens", "sampled tokens of a sample that are no thought", Reduction.MEAN),
    Metric(
        "rollout/continued_requests", "requests", "aborted policy requests continued from their partial tokens, so far"
    ),
    Metric("rollout/worker_deaths", "processes", "worker processes that died", Reduction.SUM),
    Metric("rollout/worker_loop_lag", "s", "event loop lag of the slowest worker", Reduction.MAX),
    Metric("rollout/accepted_groups", "groups", "groups stored by this process so far"),
    Metric("rollout/rejected_groups", "groups", "groups dropped by this process so far"),
    Metric("rollout/concurrency_limit", "groups", "maximum number of groups that this process plays concurrently"),
    Metric("fairness/ks_tokens", "distance", "trained against dispatched groups: sampled tokens"),
    Metric("fairness/ks_seconds", "distance", "trained against dispatched groups: seconds to play"),
    Metric("fairness/ks_reward", "distance", "trained against dispatched groups: mean reward"),
    Metric("fairness/left_out_share", "share", "dispatched groups that were not trained, except filtered ones"),
    Metric("fairness/biased_measures", "measures", "measures in which trained groups differ from dispatched ones"),
    Metric("async/in_flight", "groups", "groups being played"),
    Metric("async/staleness_capacity", "groups", "groups that the gate would admit now"),
    Metric(
        "async/invalid_samples",
        "samples",
        "unscorable episodes, including retried ones",
        Reduction.SUM,
    ),
    Metric("async/filter_drops", "groups", "groups dropped by a filter", Reduction.SUM),
)


JUDGE_METRICS = tuple(
    Metric(judge_key(name), unit, meaning, Reduction.SUM)
    for name, unit, meaning in (
        ("requests", "requests", "requests to judges"),
        ("failed", "requests", "requests to judges without a usable answer"),
        ("cached", "answers", "scores of judges that were known, and cost nothing"),
        ("tokens", "tokens", "tokens of prompts and answers of judges"),
        ("cost", "price", "cost of judges, in the unit of price_in and price_out"),
    )
)


def rollout_metrics(config: RolloutConfig) -> tuple[Metric, ...]:
    """`ROLLOUT_METRICS` and the metrics of the run's reward functions."""
    found = list(ROLLOUT_METRICS)
    for name in reward_names(config):
        found.append(Metric(score_key(name), "reward", f"mean value of {name}", Reduction.MEAN))
        spread = f"standard deviation of {name} over the samples"
        found.append(Metric(f"{score_key(name)}_std", "reward", spread, Reduction.STD))
        unscored = f"samples that {name} could not score: None, NaN, exception or timeout"
        found.append(Metric(f"{score_key(name)}_unscored", "samples", unscored, Reduction.SUM))
    if config.rewards.functions:
        found.append(Metric("reward/seconds", "s", "slowest reward function of a sample", Reduction.MEAN))
        found.append(Metric("reward/seconds_max", "s", "slowest call of a reward function", Reduction.MAX))
    if any(function.judge for function in config.rewards.functions.values()):
        found += JUDGE_METRICS
    return tuple(found)


def reward_names(config: RolloutConfig) -> list[str]:
    return [*config.rewards.functions, *(["environment"] if config.rewards.functions else [])]


def reported_scores(group: PromptGroup) -> tuple[dict[str, float], ...]:
    """The metrics that the reward functions added to each sample they scored, and the lengths of its thoughts and answers."""
    plain = (SECONDS_KEY, THOUGHT_KEY, ANSWER_KEY)
    scored = [sample.metrics for sample in group.samples if any(key in sample.metrics for key in plain)]
    prefix = score_key("")
    return tuple(
        {key: float(value) for key, value in metrics.items() if key in plain or key.startswith((prefix, judge_key("")))}
        for metrics in scored
    )


def record_rewards(metrics: MetricRecorder, scores: Sequence[Mapping[str, float]], names: Sequence[str]) -> None:
    """Record `reported_scores` of a group."""
    for sample in scores:
        if THOUGHT_KEY in sample and ANSWER_KEY in sample:
            metrics.add("rollout/thought_len", sample[THOUGHT_KEY])
            metrics.add("rollout/answer_len", sample[ANSWER_KEY])
        if SECONDS_KEY not in sample:
            continue
        for name in names:
            value = sample.get(score_key(name))
            metrics.add(score_key(name), value)
            metrics.add(f"{score_key(name)}_std", value)
            metrics.add(f"{score_key(name)}_unscored", value is None)
        for metric in JUDGE_METRICS:
            if metric.name in sample:
                metrics.add(metric.name, sample[metric.name])
        metrics.add("reward/seconds", sample[SECONDS_KEY])
        metrics.add("reward/seconds_max", sample[SECONDS_KEY])


def record_group(metrics: MetricRecorder, outcome: GroupOutcome) -> None:
    """Record a finished group, all its parts included."""
    metrics.add("rollout/group_seconds", outcome.seconds)
    metrics.add("rollout/group_seconds_max", outcome.seconds)
    metrics.add("rollout/groups_finished", 1)


def record_samples(metrics: MetricRecorder, outcome: GroupOutcome, drop: DropReason | None) -> None:
    """Record the samples of a finished group or part. Means are weighted by the number of samples."""
    metrics.add("rollout/raw_reward", outcome.reward_mean, weight=outcome.num_scorable)
    metrics.add("rollout/raw_reward_max", _highest_reward(outcome))
    metrics.add("rollout/raw_accuracy", outcome.solved_rate, weight=outcome.num_scorable)
    for name, value in (
        ("rollout/response_len", outcome.mean_response_tokens),
        ("rollout/truncated_ratio", outcome.truncated_rate),
        ("rollout/turns", outcome.mean_turns),
    ):
        metrics.add(name, value, weight=outcome.num_samples)
    metrics.add("rollout/samples_retried", outcome.retried_samples)
    metrics.add("rollout/samples_declined", outcome.declined_samples)
    metrics.add("rollout/samples_surplus", outcome.surplus_samples)
    unscorable = sum(outcome.invalid_causes.values())
    metrics.add("async/invalid_samples", unscorable)
    metrics.add("rollout/episodes", outcome.num_scorable + unscorable + outcome.declined_samples)
    if drop is not None:
        metrics.add("rollout/groups_failed", drop.kind is DropKind.INVALID)
        metrics.add("async/filter_drops", drop.kind is DropKind.FILTERED)


def _highest_reward(outcome: GroupOutcome) -> float | None:
    known = [sample.reward for sample in outcome.samples if sample.reward is not None]
    return max(known, default=outcome.reward_mean)
