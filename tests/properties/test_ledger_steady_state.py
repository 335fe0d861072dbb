"""Without crashes: `wait` drops nothing and trains everything, whatever finishes first; `drop` keeps the bound."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.admission import AuditReport, Grant
from rollbook.contracts.freshness import AdmissionShare, BatchPolicy, FreshnessRule
from tests.parts.ledger.groups import draws, part_of
from tests.parts.ledger.groups import settings as run_settings
from tests.parts.ledger.run_driver import RunDriver
from tests.parts.ledger.simulation import SimulatedRun

STEPS = 8
QUORUM = 2


def play(rule: FreshnessRule, *, seed: int, patience: int) -> AuditReport:
    """A run of so many steps, in which groups finish in a random order and some are given back. `patience` favours the young."""
    rng = random.Random(seed)
    driver = RunDriver().create(
        run_settings(
            per_step=rule.groups_per_step,
            in_flight=rule.max_in_flight,
            staleness_bound=rule.max_head_offpolicy_versions,
            policy=rule.policy,
            max_steps=STEPS,
            max_attempts=1_000,
            deadline_s=1e9,
            ttl_s=1e9,
            group_size=3,
            quorum=QUORUM,
            admission_share=rule.admission_share,
        )
    )
    simulation = SimulatedRun(driver=driver, staleness_bound=rule.max_head_offpolicy_versions)
    simulation.take_over(checkpoint=0, salt="")
    simulation.publish()
    owner = driver.join()
    playing: list[Grant] = []
    at = 0
    for _ in range(5_000):
        reply = driver.open(owner, draws(at, 4), limit=4)
        at += reply.taken
        playing += reply.grants
        if playing:
            finished = max(rng.sample(range(len(playing)), min(patience, len(playing))))
            grant = playing.pop(finished)
            if rng.random() < 0.1:
                driver.release(grant.task_id, grant.attempt, part=grant.part.number)
            else:
                # As old as its admission allows: the whole group was sampled at once, then it took its time.
                stamps = (int(grant.admission_publication),)
                simulation.tokens[grant.group_id] = stamps
                if grant.part.num_samples is None:
                    driver.submit(grant.task_id, stamps, attempt=grant.attempt)
                else:
                    # One sample now; the others of the group come later, perhaps of another attempt.
                    part = part_of(grant.task_id, grant.part, [stamps], quorum=QUORUM)
                    following = driver.send(part, attempt=grant.attempt).next_part
                    if following is not None:
                        playing.append(replace(grant, group_id=following.group_id, part=following))
        if rng.random() < 0.7 and simulation.train():
            simulation.publish()
        if rng.random() < 0.2 and simulation.step >= 1:
            simulation.decide(simulation.step + 1)
        if simulation.step == STEPS:
            break
    return driver.audit()


rules = st.builds(
    FreshnessRule,
    groups_per_step=st.integers(1, 4),
    max_in_flight=st.integers(1, 12),
    max_head_offpolicy_versions=st.integers(0, 6),
    policy=st.sampled_from(BatchPolicy),
    admission_share=st.sampled_from(AdmissionShare),
)


@settings(max_examples=60)
@given(rule=rules, seed=st.integers(0, 10**9), patience=st.integers(1, 6))
def test_a_run_reaches_its_last_step_within_the_bound_and_wait_drops_nothing(
    rule: FreshnessRule, seed: int, patience: int
) -> None:
    report = play(rule, seed=seed, patience=patience)
    assert report.violations == ()
    assert report.steps == STEPS
    assert report.max_lag is not None
    assert report.max_lag <= rule.max_head_offpolicy_versions
    if rule.policy is BatchPolicy.WAIT:
        assert report.dropped == {}
    if report.samples is not None:
        assert report.samples.missing == {}


@settings(max_examples=20)
@given(seed=st.integers(0, 10**9))
def test_with_a_staleness_bound_of_zero_every_token_is_of_the_version_that_is_trained(seed: int) -> None:
    rule = FreshnessRule(groups_per_step=2, max_in_flight=8, max_head_offpolicy_versions=0)
    report = play(rule, seed=seed, patience=3)
    assert (report.violations, report.max_lag, report.dropped) == ((), 0, {})
