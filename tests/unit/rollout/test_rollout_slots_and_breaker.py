"""The failure breaker and the slots of a dispatcher."""

import pytest

from rollbook.contracts.admission import GateState, Grant, LedgerStatus, OpenPart, OpenReply, RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import BatchPolicy, FreshnessRule, GateCounts
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import PublicationId
from rollbook.contracts.task import TaskId
from rollbook.rollout.dispatch.failure_breaker import FailureBreaker, GroupEnd, RolloutsFailingError
from rollbook.rollout.dispatch.slots import StalenessController

USEFUL, DECLINED, FAILED = GroupEnd.USEFUL, GroupEnd.DECLINED, GroupEnd.FAILED


def record(breaker: FailureBreaker, *ends: GroupEnd, cause: str = "env: connection lost") -> None:
    for end in ends:
        breaker.record(end, {cause: 8} if end is FAILED else {})


def test_five_failed_groups_in_a_row_stop_the_run_with_the_causes() -> None:
    breaker = FailureBreaker(log_hint="logs/rollout.jsonl")
    record(breaker, FAILED, FAILED, FAILED, FAILED, USEFUL, FAILED, FAILED, FAILED, FAILED)
    with pytest.raises(RolloutsFailingError) as raised:
        record(breaker, FAILED)
    assert "5 groups in a row failed" in str(raised.value)
    assert "72 x env: connection lost" in str(raised.value)
    assert "logs/rollout.jsonl" in str(raised.value)
    assert isinstance(raised.value, RunError)


def test_the_first_cause_is_reported_with_the_most_frequent_ones() -> None:
    breaker = FailureBreaker(log_hint="x")
    breaker.record(FAILED, {"the disk is full": 1})
    record(breaker, *[FAILED] * 3, cause="connection lost")
    with pytest.raises(
        RolloutsFailingError, match=r"32 x connection lost\n  1 x .*\nThe first was: the disk is full\n"
    ):
        record(breaker, FAILED, cause="connection lost")


def test_half_of_the_last_twenty_failed_stops_the_run_and_less_does_not() -> None:
    breaker = FailureBreaker(log_hint="x")
    record(breaker, *([FAILED, USEFUL, USEFUL] * 20))
    with pytest.raises(RolloutsFailingError, match="10 of the last 20"):
        record(breaker, *([FAILED, USEFUL] * 10))


def test_a_declined_group_is_neither_a_failure_nor_a_success() -> None:
    breaker = FailureBreaker(log_hint="x")
    record(breaker, *([DECLINED] * 15), USEFUL, *([DECLINED] * 19))
    with pytest.raises(RolloutsFailingError, match="none of the last 20 groups gave a sample"):
        record(breaker, DECLINED)
    with pytest.raises(RolloutsFailingError, match="5 groups in a row"):
        record(FailureBreaker(log_hint="x"), *([FAILED, DECLINED] * 5))


def reply(grants: int, capacity: int) -> OpenReply:
    return OpenReply(grants=(grant(),) * grants, taken=grants, gate=GateState.OPEN, capacity=capacity)


def grant(samples: int | None = None) -> Grant:
    return Grant(
        group_id=GroupId("t@0"),
        task_id=TaskId("t"),
        draw=0,
        position=0,
        attempt=1,
        sequence=0,
        admission_version=0,
        admission_publication=PublicationId(0),
        deadline_s=60.0,
        part=OpenPart(group_id=GroupId("t@0"), num_samples=samples),
    )


def test_the_controller_counts_slots_and_settled_groups() -> None:
    rule = FreshnessRule(groups_per_step=4, max_in_flight=10, max_head_offpolicy_versions=1)
    controller = StalenessController(rule, slots=64)
    assert controller.to_propose == 10, "more than C would never be granted"
    controller.opened(reply(7, capacity=1))
    assert (controller.to_propose, controller.running, controller.capacity) == (3, 7, 1)
    for is_accepted in (True, False):
        controller.count(is_accepted=is_accepted)
        controller.freed(1)
    controller.freed(1)
    assert (controller.free, controller.running, controller.accepted, controller.rejected) == (6, 4, 1, 1)
    for _ in range(4):
        controller.freed(1)
    with pytest.raises(ValueError, match="1 ended, but 0 were running"):
        controller.freed(1)


def test_a_group_that_was_submitted_in_part_leaves_the_rest_of_its_slot_to_others() -> None:
    rule = FreshnessRule(
        groups_per_step=4,
        max_in_flight=3,
        max_head_offpolicy_versions=1,
        policy=BatchPolicy.PARTS,
        samples_per_group=8,
        quorum=4,
    )
    controller = StalenessController(rule, slots=64)
    grants = tuple(grant(samples=samples) for samples in (8, 8, 3))
    controller.opened(OpenReply(grants=grants, taken=3, gate=GateState.OPEN, capacity=0))
    assert (controller.running, controller.free) == (19, 0)
    controller.freed(3)
    assert controller.to_propose == 1
    controller.freed(5 + 3)
    assert controller.to_propose == 2


def test_the_capacity_of_the_controller_is_that_of_the_gate() -> None:
    rule = FreshnessRule(groups_per_step=4, max_in_flight=10, max_head_offpolicy_versions=1)
    controller = StalenessController(rule, slots=64)
    counts = GateCounts(leased=3, queued=2, batches_decided=2)
    status = LedgerStatus(run_id=RunId("r"), gate=GateState.OPEN, capacity=99, counts=counts, opened=13, version=2)
    controller.update(status)
    assert controller.capacity == rule.capacity(counts, version=2) == 3
