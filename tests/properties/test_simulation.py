"""The simulated run: its ledger decides like the real one, nothing is lost, the bound holds, and a seed gives one result."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.admission import Grant
from rollbook.contracts.freshness import BatchPolicy, FreshnessRule
from rollbook.contracts.group import DropKind, DropReason
from rollbook.simulation.durations import (
    Durations,
    Episode,
    RequestTime,
    TaskDurations,
    TrainingTime,
    Turn,
)
from rollbook.simulation.ledger import SimulatedLedger
from rollbook.simulation.prediction import ideal_samples_per_s, predict, predict_part
from rollbook.simulation.processors import Processors
from rollbook.simulation.setting import Setting
from rollbook.simulation.simulator import SimulatedRun, Simulation
from tests.parts.ledger.groups import draws, part_of
from tests.parts.ledger.groups import settings as run_settings
from tests.parts.ledger.run_driver import RunDriver

GROUP_SIZE, QUORUM = 3, 2


def rules(*, max_bound: int = 4) -> st.SearchStrategy[FreshnessRule]:
    return st.builds(
        lambda policy, **sizes: FreshnessRule(
            policy=policy,
            samples_per_group=GROUP_SIZE if policy is BatchPolicy.PARTS else 1,
            quorum=QUORUM if policy is BatchPolicy.PARTS else None,
            **sizes,
        ),
        policy=st.sampled_from(BatchPolicy),
        groups_per_step=st.integers(1, 4),
        max_in_flight=st.integers(1, 12),
        max_head_offpolicy_versions=st.integers(0, max_bound),
    )


# The rules -------------------------------------------------------------------------------------------------------------------


@dataclass
class _TwoLedgers:
    """The real ledger and the simulated one, fed with the same history."""

    rule: FreshnessRule
    rng: random.Random
    playing: list[tuple[Grant, int]] = field(default_factory=list)
    """Each grant with the sequence number of the simulated group."""

    def __post_init__(self) -> None:
        rule = self.rule
        self.real = RunDriver().create(
            run_settings(
                per_step=rule.groups_per_step,
                in_flight=rule.max_in_flight,
                staleness_bound=rule.max_head_offpolicy_versions,
                policy=rule.policy,
                group_size=rule.samples_per_group,
                quorum=rule.quorum,
                max_attempts=1_000,
                deadline_s=1e9,
                ttl_s=1e9,
            )
        )
        self.real.take_role()
        self.publications = [int(self.real.publish(0).id)]
        self.owner = self.real.join()
        self.simulated = SimulatedLedger(rule)
        self.drawn = 0

    def open(self) -> None:
        limit = self.rng.randint(1, 6)
        reply = self.real.open(self.owner, draws(self.drawn, limit), limit=limit)
        self.drawn += reply.taken
        sequences = self.simulated.open(limit)
        assert [grant.sequence for grant in reply.grants] == sequences
        assert reply.capacity == self.simulated.capacity
        self.playing += zip(reply.grants, sequences, strict=True)

    def finish(self) -> None:
        """One group ends, or with policy `parts` some of its samples do."""
        if not self.playing:
            return
        grant, sequence = self.playing.pop(self.rng.randrange(len(self.playing)))
        drop = DropReason(DropKind.FILTERED) if self.rng.random() < 0.1 else None
        newest = self.rng.randint(grant.admission_version, self.simulated.version)
        oldest = self.rng.randint(grant.admission_version, newest)
        stamps = (self.publications[oldest], self.publications[newest])
        if grant.part.num_samples is None:
            samples = 2
            self.real.submit(grant.task_id, stamps, attempt=grant.attempt, drop=drop, samples=samples)
        else:
            samples = self.rng.randint(1, grant.part.num_samples)
            part = part_of(grant.task_id, grant.part, [stamps] * samples, quorum=QUORUM)
            following = self.real.send(part, attempt=grant.attempt, drop=drop).next_part
            if following is not None:
                self.playing.append((replace(grant, group_id=following.group_id, part=following), sequence))
        self.simulated.submit(
            sequence,
            samples=samples,
            oldest_version=oldest,
            newest_version=newest,
            drop=None if drop is None else drop.kind.value,
        )

    def decide(self) -> None:
        step = self.simulated.decided + 1
        if step - 1 > self.simulated.version + 1:
            return
        manifest = self.real.decide(step).manifest
        batch = self.simulated.decide(step)
        assert (manifest is None) == (batch is None)
        if manifest is not None and batch is not None:
            assert [entry.sequence for entry in manifest.entries] == [taken.sequence for taken in batch.taken]
            assert manifest.cut == batch.cut

    def train(self) -> None:
        step = self.simulated.version + 1
        if step <= self.simulated.decided:
            self.real.acknowledge(step)
            self.publications.append(int(self.real.publish(step).id))
            self.simulated.publish(step)

    def compare(self) -> None:
        status = self.real.status()
        assert status.capacity == self.simulated.capacity
        assert (status.counts.leased, status.counts.queued) == (self.simulated.leased, self.simulated.queued)
        if self.rule.policy is not BatchPolicy.PARTS:
            assert dict(status.dropped) == {kind: count for kind, count in self.simulated.dropped.items() if count}


@pytest.mark.parametrize("policy", list(BatchPolicy))
@settings(max_examples=8)
@given(seed=st.integers(0, 10**9))
def test_the_simulated_ledger_decides_like_the_real_one(policy: BatchPolicy, seed: int) -> None:
    # The sizes come from the seed: chosen by hypothesis, most would be so small that nothing is ever stale or overtaken.
    rng = random.Random(seed)
    rule = FreshnessRule(
        policy=policy,
        groups_per_step=rng.randint(1, 4),
        max_in_flight=rng.randint(2, 12),
        max_head_offpolicy_versions=rng.randint(0, 4),
        samples_per_group=GROUP_SIZE if policy is BatchPolicy.PARTS else 1,
        quorum=QUORUM if policy is BatchPolicy.PARTS else None,
    )
    both = _TwoLedgers(rule, rng)
    moves = (both.open, both.finish, both.finish, both.finish, both.decide, both.decide, both.train)
    for _ in range(120):
        rng.choice(moves)()
        both.compare()


# The loop --------------------------------------------------------------------------------------------------------------------


def durations(seed: int, *, drop_share: float = 0.0) -> Durations:
    """Episodes of very different lengths, and training steps of about one second."""
    rng = random.Random(seed)
    groups = tuple(
        tuple(
            Episode(
                turns=tuple(Turn(work=rng.uniform(0.2, 3.0), act_s=rng.lognormvariate(-2, 1.5)) for _ in range(3)),
                tokens=rng.randint(1, 40),
            )
            for _ in range(GROUP_SIZE)
        )
        for _ in range(30)
    )
    return Durations(
        tasks=(TaskDurations(groups=groups, drop_share=drop_share),),
        request=RequestTime(base_s=0.02, per_request_s=0.005, slowdown=0.3),
        training=TrainingTime(base_s=0.1, per_sample_s=0.1, slowdown=0.2),
        settle_s=(0.1, 0.3),
        open_s=0.01,
        submit_s=0.02,
        fetch_s=0.01,
    )


def simulate(rule: FreshnessRule, *, seed: int, steps: int = 15, drop_share: float = 0.0) -> SimulatedRun:
    setting = Setting(rule=rule, samples_per_group=GROUP_SIZE, slots=100)
    return Simulation(setting, durations(seed, drop_share=drop_share), seed=seed).run(steps)


@settings(max_examples=30)
@given(rule=rules(), seed=st.integers(0, 10**6), drop_share=st.sampled_from([0.0, 0.3]))
def test_no_simulated_token_is_trained_beyond_the_bound_and_nothing_is_lost(
    rule: FreshnessRule, seed: int, drop_share: float
) -> None:
    run = simulate(rule, seed=seed, drop_share=drop_share)
    lags = [lag for step in run.steps for lag in step.lags]
    assert 0 <= min(lags) <= max(lags) <= rule.max_head_offpolicy_versions
    assert run.opened == run.open + run.queued + run.batched + sum(run.dropped.values())
    assert all(0 <= step.masked_tokens <= step.tokens for step in run.steps)
    ends = [step.ended_at for step in run.steps]
    assert ends == sorted(ends)
    if rule.policy is BatchPolicy.WAIT:
        assert run.dropped.get("stale", 0) == 0
    if not rule.policy.masks_tokens:
        assert all(step.masked_tokens == 0 for step in run.steps)


@pytest.mark.parametrize("policy", [BatchPolicy.WAIT, BatchPolicy.PARTS])
@pytest.mark.parametrize("slower", ["trainer", "engines"])
def test_a_part_of_a_large_run_predicts_the_whole(policy: BatchPolicy, slower: str) -> None:
    """Settings of a run with thousands of workers are compared on a part of it."""
    rule = FreshnessRule(
        groups_per_step=256,
        max_in_flight=512,
        max_head_offpolicy_versions=3,
        policy=policy,
        samples_per_group=GROUP_SIZE if policy is BatchPolicy.PARTS else 1,
        quorum=QUORUM if policy is BatchPolicy.PARTS else None,
    )
    setting = Setting(rule=rule, samples_per_group=GROUP_SIZE, slots=512, workers=512, replicas=4)
    made = durations(0)
    if slower == "engines":
        made = replace(made, training=replace(made.training, per_sample_s=0.001))
    whole, part = predict(setting, made, steps=16), predict_part(setting, made)
    assert part.setting == setting
    for name in ("steps_per_s", "samples_per_s", "tokens_per_s"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name), rel=0.07), name
    assert part.lag_mean == pytest.approx(whole.lag_mean, abs=0.3)
    assert part.max_load == pytest.approx(whole.max_load, rel=0.25)


@settings(max_examples=10)
@given(rule=rules(), seed=st.integers(0, 10**6))
def test_the_same_seed_gives_the_same_simulated_run(rule: FreshnessRule, seed: int) -> None:
    assert simulate(rule, seed=seed) == simulate(rule, seed=seed)


@pytest.mark.parametrize("policy", list(BatchPolicy))
def test_with_equal_episodes_and_enough_slots_the_trainer_never_waits(policy: BatchPolicy) -> None:
    episode = Episode(turns=(Turn(work=1.0, act_s=0.3),))
    fixed = Durations(
        tasks=(TaskDurations(groups=((episode,) * GROUP_SIZE,)),),
        request=RequestTime(base_s=0.2, per_request_s=0.0),
        training=TrainingTime(base_s=1.0),
    )
    in_parts = policy is BatchPolicy.PARTS
    rule = FreshnessRule(
        groups_per_step=4,
        max_in_flight=12,
        max_head_offpolicy_versions=2,
        policy=policy,
        samples_per_group=GROUP_SIZE if in_parts else 1,
        quorum=QUORUM if in_parts else None,
    )
    run = Simulation(Setting(rule=rule, samples_per_group=GROUP_SIZE, slots=12), fixed).run(20)
    assert all(step.trained_s == pytest.approx(1.0) for step in run.steps)
    assert sum(step.waited_s for step in run.steps[2:]) == pytest.approx(0.0, abs=1e-6)


def test_a_synchronous_run_takes_the_sum_of_its_parts() -> None:
    episode = Episode(turns=(Turn(work=1.0, act_s=0.3), Turn(work=2.0, act_s=0.0)))
    fixed = Durations(
        tasks=(TaskDurations(groups=((episode,) * 2,)),),
        request=RequestTime(base_s=0.2, per_request_s=0.0),
        training=TrainingTime(per_sample_s=0.1),
        settle_s=(0.5,),
        open_s=0.01,
        submit_s=0.02,
        fetch_s=0.03,
    )
    rule = FreshnessRule(groups_per_step=3, max_in_flight=3, max_head_offpolicy_versions=0)
    run = Simulation(Setting(rule=rule, samples_per_group=2, slots=3), fixed).run(10)
    # Open, two requests of 0.2 and 0.4 s, the environment, submit, fetch, six samples, and the publication.
    expected = 0.01 + 0.2 + 0.3 + 0.4 + 0.02 + 0.03 + 0.6 + 0.5
    assert run.steps[-1].ended_at - run.steps[-2].ended_at == pytest.approx(expected)
    assert run.idle_engine_share > 0.5


@settings(max_examples=15)
@given(rule=rules(), seed=st.integers(0, 10**6), more=st.sampled_from(["slots", "workers", "replicas"]))
def test_more_workers_never_lower_the_ideal_throughput_and_no_run_exceeds_it(
    rule: FreshnessRule, seed: int, more: str
) -> None:
    known = replace(
        durations(seed), request=RequestTime(base_s=0.02, per_request_s=0.01, per_total_s=0.001, per_worker_s=0.002)
    )
    small = Setting(rule=rule, samples_per_group=GROUP_SIZE, slots=4)
    large = replace(small, **{more: 3 * getattr(small, more)})
    ideal = ideal_samples_per_s(small, known)
    assert ideal_samples_per_s(large, known) >= ideal
    # The ideal trains every sample, also those that are wholly masked.
    # What is queued when the measurement begins, and the luck of the draw, allow a little more.
    assert rule.policy.masks_tokens or predict(small, known, seed=seed, steps=60).samples_per_s <= 1.25 * ideal


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_requests_of_a_replica_share_its_speed(replicas: int) -> None:
    """Without an environment, the time of a batch is its requests over the replicas."""
    episode = Episode(turns=(Turn(work=1.0, act_s=0.0),) * 5)
    fixed = Durations(
        tasks=(TaskDurations(groups=((episode,) * 2,)),),
        request=RequestTime(base_s=0.0, per_request_s=0.01),
        training=TrainingTime(base_s=0.001),
    )
    rule = FreshnessRule(groups_per_step=8, max_in_flight=8, max_head_offpolicy_versions=0)
    run = Simulation(Setting(rule=rule, samples_per_group=2, slots=8, replicas=replicas), fixed).run(5)
    step_s = run.steps[-1].ended_at - run.steps[-2].ended_at
    assert step_s == pytest.approx(16 * 5 * 0.01 / replicas + 0.001, rel=1e-6)


# Cores -----------------------------------------------------------------------------------------------------------------------


def processors(**needs: float) -> Processors:
    return Processors(**{"cores": 2.0, "request_s": 0.02, "worker_s": 0.01, "trainer": 1.2, **needs})


@settings(max_examples=30)
@given(
    rule=rules(),
    seed=st.integers(0, 10**6),
    cores=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    workers=st.integers(1, 3),
    replicas=st.integers(1, 3),
    trainer=st.sampled_from([0.0, 0.2, 0.8, 1.2]),
)
def test_no_run_uses_more_cpu_time_than_its_cores_and_workers_have(
    *, rule: FreshnessRule, seed: int, cores: float, workers: int, replicas: int, trainer: float
) -> None:
    turn = Turn(work=1.0, act_s=0.05)
    episode = Episode(turns=(turn,) * 3, tokens=3)
    needs = processors(cores=cores, trainer=trainer)
    fixed = Durations(
        tasks=(TaskDurations(groups=((episode,) * GROUP_SIZE,)),),
        request=RequestTime(base_s=0.01, per_request_s=0.004),
        training=TrainingTime(base_s=0.2),
        processors=needs,
    )
    setting = Setting(rule=rule, samples_per_group=GROUP_SIZE, slots=100, workers=workers, replicas=replicas)
    run = Simulation(setting, fixed, seed=seed).run(12)
    requests = 3 * sum(step.samples for step in run.steps)
    cpu_s = len(run.steps) * 0.2 * needs.trainer + requests * needs.request_s
    assert cpu_s <= cores * run.seconds * (1 + 1e-9)
    assert requests * needs.worker_s <= workers * run.seconds * (1 + 1e-9)


@given(
    rate=st.floats(0.0, 1e4),
    trainer=st.floats(0.0, 4.0),
    cores=st.floats(0.1, 64.0),
)
def test_a_shortage_of_cores_is_shared_until_all_of_them_are_used(rate: float, trainer: float, cores: float) -> None:
    needs = Processors(cores=cores, request_s=0.001, trainer=trainer)
    slowness = needs.slowness(rate=rate, is_training=True)
    used = rate * 0.001 / slowness + trainer / needs.training_slowness(slowness)
    is_short = rate * 0.001 + trainer > cores
    assert slowness >= 1.0
    assert used == pytest.approx(cores if is_short else rate * 0.001 + trainer, rel=1e-6)


def test_a_trainer_that_waits_for_other_things_is_not_slowed_by_a_shortage_of_cores() -> None:
    needs = Processors(cores=1.0, request_s=0.01, trainer=0.0)
    slowness = needs.slowness(rate=300.0, is_training=True)
    assert slowness == pytest.approx(3.0)
    assert needs.training_slowness(slowness) == 1.0


@settings(max_examples=15)
@given(rule=rules(), seed=st.integers(0, 10**6))
def test_with_enough_cores_and_workers_a_run_is_as_fast_as_without_a_limit(rule: FreshnessRule, seed: int) -> None:
    free = durations(seed)
    setting = Setting(rule=rule, samples_per_group=GROUP_SIZE, slots=100, workers=10_000)
    limited = replace(free, processors=processors(cores=10_000.0))
    expected = Simulation(setting, free, seed=seed).run(15)
    assert Simulation(setting, limited, seed=seed).run(15) == expected


@pytest.mark.parametrize(
    ("cores", "replicas", "expected"), [(1, 1, 1.0), (1, 2, 1.0), (2, 2, 0.5), (2, 4, 0.5), (4, 4, 0.25)]
)
def test_replicas_are_as_fast_together_as_the_cores_that_they_have(cores: int, replicas: int, expected: float) -> None:
    """The time of a batch, relative to one replica."""
    episode = Episode(turns=(Turn(work=1.0, act_s=0.0),) * 5)
    fixed = Durations(
        tasks=(TaskDurations(groups=((episode,) * 2,)),),
        request=RequestTime(base_s=0.0, per_request_s=0.01),
        training=TrainingTime(base_s=0.001),
        processors=Processors(cores=cores, request_s=0.01, trainer=1.0),
    )
    rule = FreshnessRule(groups_per_step=8, max_in_flight=8, max_head_offpolicy_versions=0)
    run = Simulation(Setting(rule=rule, samples_per_group=2, slots=8, replicas=replicas), fixed).run(5)
    step_s = run.steps[-1].ended_at - run.steps[-2].ended_at
    assert step_s == pytest.approx(16 * 5 * 0.01 * expected + 0.001, rel=1e-6)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_worker_handles_one_request_at_a_time(workers: int) -> None:
    episode = Episode(turns=(Turn(work=1.0, act_s=0.0),) * 5)
    fixed = Durations(
        tasks=(TaskDurations(groups=((episode,) * 2,)),),
        request=RequestTime(base_s=0.0, per_request_s=0.01),
        training=TrainingTime(base_s=0.001),
        processors=Processors(cores=100.0, request_s=0.03, worker_s=0.03),
    )
    rule = FreshnessRule(groups_per_step=8, max_in_flight=8, max_head_offpolicy_versions=0)
    run = Simulation(Setting(rule=rule, samples_per_group=2, slots=8, workers=workers), fixed).run(5)
    step_s = run.steps[-1].ended_at - run.steps[-2].ended_at
    assert step_s == pytest.approx(16 * 5 * max(0.01, 0.03 / workers) + 0.001, rel=1e-6)


def test_generation_and_training_on_one_core_take_the_sum_of_their_times() -> None:
    episode = Episode(turns=(Turn(work=1.0, act_s=0.0),))
    fixed = Durations(
        tasks=(TaskDurations(groups=((episode,),)),),
        request=RequestTime(base_s=0.0, per_request_s=0.1),
        training=TrainingTime(base_s=0.5),
        processors=Processors(cores=1.0, request_s=0.1, trainer=1.0),
    )
    rule = FreshnessRule(groups_per_step=4, max_in_flight=12, max_head_offpolicy_versions=2)
    run = Simulation(Setting(rule=rule, samples_per_group=1, slots=12), fixed).run(30)
    step_s = (run.steps[-1].ended_at - run.steps[9].ended_at) / 20
    assert step_s == pytest.approx(4 * 0.1 + 0.5, rel=0.02)


@pytest.mark.parametrize("policy", [BatchPolicy.TRIM, BatchPolicy.PARTS])
def test_samples_of_which_every_token_is_masked_take_no_training_time(policy: BatchPolicy) -> None:
    rng = random.Random(0)
    groups = tuple(
        tuple(
            Episode(turns=(Turn(work=1.0, act_s=0.0), Turn(work=rng.lognormvariate(1, 2), act_s=0.0))) for _ in range(3)
        )
        for _ in range(40)
    )
    fixed = Durations(
        tasks=(TaskDurations(groups=groups),),
        request=RequestTime(base_s=0.1, per_request_s=0.0),
        training=TrainingTime(per_sample_s=0.05),
        submit_s=1.0,
    )
    rule = FreshnessRule(
        groups_per_step=4,
        max_in_flight=12,
        max_head_offpolicy_versions=1,
        policy=policy,
        samples_per_group=GROUP_SIZE if policy is BatchPolicy.PARTS else 1,
        quorum=QUORUM if policy is BatchPolicy.PARTS else None,
    )
    run = Simulation(Setting(rule=rule, samples_per_group=GROUP_SIZE, slots=12), fixed).run(40)
    # Each episode has one token, so no more samples are left out than tokens are masked.
    trained = [(step.trained_s / 0.05, step) for step in run.steps]
    assert all(
        step.samples - step.masked_tokens - 1e-6 <= computed <= step.samples + 1e-6 for computed, step in trained
    )
    assert any(computed < step.samples - 0.5 for computed, step in trained)


def test_units_of_the_gate_are_samples_with_parts() -> None:
    ledger = SimulatedLedger(
        FreshnessRule(
            groups_per_step=2,
            max_in_flight=4,
            max_head_offpolicy_versions=1,
            policy=BatchPolicy.PARTS,
            samples_per_group=3,
            quorum=2,
        )
    )
    first, *_ = ledger.open(4)
    ledger.submit(first, samples=2, oldest_version=0, newest_version=0)
    ledger.submit(first, samples=1, oldest_version=0, newest_version=0, drop="filtered")
    assert (ledger.opened, ledger.leased, ledger.queued) == (12, 9, 2)
    assert ledger.dropped == Counter({"filtered": 1})
