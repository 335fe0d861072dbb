"""The formulas of the gate: which groups may start, and which a batch may contain."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.freshness import AdmissionShare, BatchPolicy, FreshnessRule, GateCounts, lag

rules = st.builds(
    FreshnessRule,
    groups_per_step=st.integers(1, 64),
    max_in_flight=st.integers(1, 256),
    max_head_offpolicy_versions=st.integers(0, 12),
    policy=st.sampled_from(BatchPolicy),
    max_steps=st.none() | st.integers(1, 50),
    admission_share=st.sampled_from(AdmissionShare),
)
counts = st.builds(
    GateCounts,
    leased=st.integers(0, 100),
    waiting=st.integers(0, 100),
    queued=st.integers(0, 100),
    batches_decided=st.integers(0, 60),
)


def rule(**changed: object) -> FreshnessRule:
    return FreshnessRule(**({"groups_per_step": 4, "max_in_flight": 16, "max_head_offpolicy_versions": 2} | changed))  # type: ignore[arg-type]


def test_a_batch_trained_right_after_it_was_sampled_has_no_lag() -> None:
    assert lag(step=1, oldest_version=0) == 0
    assert lag(step=5, oldest_version=2) == 2


@given(rule=rules, step=st.integers(1, 100), oldest=st.integers(0, 100))
def test_a_group_is_fresh_exactly_when_its_lag_is_within_the_bound(rule: FreshnessRule, step: int, oldest: int) -> None:
    assert rule.is_fresh(step=step, oldest_version=oldest) == (
        lag(step=step, oldest_version=oldest) <= rule.max_head_offpolicy_versions
    )


def test_capacity_is_limited_by_slots_and_by_staleness() -> None:
    # (2 + 0 + 1) * 4 = 12 groups before the first step; 16 may be in flight.
    assert rule().capacity(GateCounts(), version=0) == 12
    assert rule(max_in_flight=5).capacity(GateCounts(leased=3), version=0) == 2
    assert rule().capacity(GateCounts(leased=3, waiting=2, queued=4), version=0) == 3
    assert rule().capacity(GateCounts(batches_decided=1, queued=4, leased=4), version=1) == 4


def test_a_bound_of_zero_admits_one_step_at_a_time() -> None:
    strict = rule(max_head_offpolicy_versions=0)
    assert strict.capacity(GateCounts(), version=0) == 4
    assert strict.capacity(GateCounts(batches_decided=1), version=0) == 0
    assert strict.capacity(GateCounts(batches_decided=1), version=1) == 4


@given(rule=rules, counts=counts, version=st.integers(0, 60))
def test_capacity_never_exceeds_its_limits_and_is_never_negative(
    rule: FreshnessRule, counts: GateCounts, version: int
) -> None:
    capacity = rule.capacity(counts, version=version)
    assert capacity >= 0
    if capacity:
        after = rule.groups_per_step * counts.batches_decided + counts.queued + counts.running + capacity
        assert counts.leased + capacity <= rule.max_in_flight
        assert after <= (rule.admission_bound + version + 1) * rule.groups_per_step
        assert rule.max_steps is None or after <= rule.max_steps * rule.groups_per_step


@given(rule=rules, counts=counts, version=st.integers(0, 60))
def test_a_new_version_never_closes_the_gate(rule: FreshnessRule, counts: GateCounts, version: int) -> None:
    assert rule.capacity(counts, version=version + 1) >= rule.capacity(counts, version=version)


@given(rule=rules)
def test_the_window_keeps_overtaking_within_the_bound(rule: FreshnessRule) -> None:
    overtaking = -(-(rule.window - 1) // rule.groups_per_step)
    assert rule.admission_bound + overtaking <= rule.max_head_offpolicy_versions
    assert rule.window >= 1


def test_admission_uses_all_of_a_small_bound_and_half_of_a_large_one() -> None:
    assert [rule(max_head_offpolicy_versions=bound).admission_bound for bound in range(7)] == [0, 1, 2, 2, 2, 3, 3]
    dropping = FreshnessRule(groups_per_step=4, max_in_flight=4, max_head_offpolicy_versions=6, policy=BatchPolicy.DROP)
    assert dropping.admission_bound == 6


def test_the_published_formula_admits_groups_for_the_whole_bound_and_lets_none_overtake() -> None:
    half = rule(max_in_flight=99, max_head_offpolicy_versions=4)
    whole = rule(max_in_flight=99, max_head_offpolicy_versions=4, admission_share=AdmissionShare.WHOLE)
    counts = GateCounts(leased=3, queued=2, batches_decided=1)
    # min(C - running, (O + v + 1) * P - (accepted + running)) with O = 4, v = 1, P = 4, accepted = 4 + 2, running = 3.
    assert whole.capacity(counts, version=1) == (4 + 1 + 1) * 4 - (6 + 3)
    assert half.capacity(counts, version=1) == (2 + 1 + 1) * 4 - (6 + 3)
    assert (whole.window, half.window) == (1, 2 * 4 + 1)


@given(rule=rules, counts=counts, version=st.integers(0, 60))
def test_the_share_for_admission_matters_only_with_wait_and_a_bound_above_two(
    rule: FreshnessRule, counts: GateCounts, version: int
) -> None:
    whole = replace(rule, admission_share=AdmissionShare.WHOLE)
    assert whole.admission_bound == rule.max_head_offpolicy_versions
    assert whole.capacity(counts, version=version) >= rule.capacity(counts, version=version)
    if rule.policy is not BatchPolicy.WAIT or rule.max_head_offpolicy_versions <= 2:
        half = replace(rule, admission_share=AdmissionShare.HALF)
        assert half.capacity(counts, version=version) == whole.capacity(counts, version=version)
        assert half.window == whole.window


@given(rule=rules, counts=counts)
def test_another_attempt_needs_only_a_free_slot(rule: FreshnessRule, counts: GateCounts) -> None:
    again = rule.retry_capacity(counts)
    assert 0 <= again <= counts.waiting
    assert again == counts.waiting or counts.leased + again >= rule.max_in_flight


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("groups_per_step", 0, "groups_per_step is 0"),
        ("max_head_offpolicy_versions", -1, "max_head_offpolicy_versions is -1"),
        ("max_in_flight", 0, "max_in_flight is 0"),
    ],
)
def test_a_rule_that_admits_nothing_is_rejected(field: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(**{field: value})
