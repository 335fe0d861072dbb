"""docs/ledger-rules.md, rules 5 to 7: submitting, closing and releasing groups."""

import pytest

from rollbook.contracts.admission import Receipt
from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupState
from rollbook.ledger.records import Origin
from rollbook.ledger.rules.groups import QueueFullError
from tests.parts.ledger.groups import RUN, draws, settings
from tests.parts.ledger.run_driver import RunDriver


@pytest.fixture
def driver() -> RunDriver:
    driver = RunDriver().create(settings())
    driver.take_role()
    driver.publish(0)
    driver.open(driver.join(), draws(0, 3))
    return driver


def test_the_first_submit_wins_and_a_later_one_gets_another_receipt(driver: RunDriver) -> None:
    assert driver.submit("task0") is Receipt.STORED
    before = driver.group("task0")
    assert driver.submit("task0", samples=5) is Receipt.ALREADY_STORED
    assert driver.group("task0") == before


def test_a_submitted_group_stays_stored_through_training(driver: RunDriver) -> None:
    for task in ("task0", "task1"):
        driver.submit(task)
    driver.decide(1)
    assert driver.submit("task0") is Receipt.ALREADY_STORED
    driver.acknowledge(1)
    assert driver.submit("task0") is Receipt.ALREADY_STORED


def test_a_late_submit_does_not_resurrect_a_settled_group(driver: RunDriver) -> None:
    driver.close("task0", DropReason(DropKind.TIMEOUT))
    assert driver.submit("task0") is Receipt.ALREADY_SETTLED
    assert driver.group("task0").state is GroupState.DROPPED
    assert driver.store.read_now(lambda tx: tx.payloads.get(RUN, GroupId("task0@0"))) is None


def test_a_late_submit_of_an_old_attempt_is_taken_if_it_comes_first(driver: RunDriver) -> None:
    driver.release("task0", 1)
    new_owner = driver.join("other")
    assert driver.open(new_owner, []).grants[0].attempt == 2
    assert driver.submit("task0", attempt=1) is Receipt.STORED
    assert driver.submit("task0", attempt=2) is Receipt.ALREADY_STORED


def test_a_submit_with_a_drop_keeps_outcome_and_payload(driver: RunDriver) -> None:
    assert driver.submit("task0", drop=DropReason(DropKind.FILTERED, "constant reward")) is Receipt.STORED
    dropped = driver.group("task0")
    assert (dropped.state, dropped.drop_reason) == (GroupState.DROPPED, "filtered: constant reward")
    assert dropped.outcome is not None
    assert dropped.has_payload
    assert driver.status().dropped == {"filtered": 1}


def test_the_payload_of_a_filtered_group_is_deleted_at_a_later_checkpoint(driver: RunDriver) -> None:
    driver.submit("task0", drop=DropReason(DropKind.FILTERED))
    driver.submit("task1")
    driver.submit("task2")
    driver.decide(1)
    driver.acknowledge(1)
    assert driver.checkpointed(1) == 1
    assert not driver.group("task0").has_payload
    assert driver.group("task1").has_payload
    assert driver.audit().violations == ()


def test_a_group_without_a_grant_is_opened_by_its_submission(driver: RunDriver) -> None:
    assert driver.submit("stranger", (-1,)) is Receipt.STORED
    group = driver.group("stranger")
    assert (group.origin, group.state, group.oldest_version) == (Origin.EXTERNAL, GroupState.QUEUED, None)
    assert driver.status().opened == 4
    assert driver.audit().violations == ()


def test_an_external_group_is_refused_while_the_queue_is_full_but_an_admitted_one_never(driver: RunDriver) -> None:
    driver.submit("task0")
    with pytest.raises(QueueFullError, match="stranger@0"):
        driver.submit("stranger", (-1,), max_queued=1)
    assert driver.submit("task1", max_queued=1) is Receipt.STORED


def test_a_group_submitted_after_the_end_is_recorded_as_dropped(driver: RunDriver) -> None:
    driver.finish(EndOfRun.STOPPED)
    assert driver.submit("stranger", (-1,)) is Receipt.ALREADY_SETTLED
    assert driver.group("stranger").drop_reason == "end_of_run: submitted after the end"
    assert driver.audit().violations == ()


def test_tokens_of_an_unknown_publication_are_refused_by_name(driver: RunDriver) -> None:
    with pytest.raises(RunError, match="task0@0 has tokens of publication 7, which was never registered"):
        driver.submit("task0", (0, 7))
    assert driver.group("task0").state is GroupState.DISPATCHED


def test_a_groups_age_is_that_of_its_oldest_trained_token(driver: RunDriver) -> None:
    for task in ("task0", "task1"):
        driver.submit(task)
    driver.decide(1)
    driver.acknowledge(1)
    newer = driver.publish(1)
    driver.submit("task2", (newer.id, 0))
    assert driver.group("task2").oldest_version == 0


def test_closing_a_group_that_was_never_opened_is_an_error(driver: RunDriver) -> None:
    with pytest.raises(RunError, match="nobody@0 was never opened"):
        driver.close("nobody", DropReason(DropKind.SURPLUS))


def test_closing_twice_settles_once(driver: RunDriver) -> None:
    reason = DropReason(DropKind.INVALID, "8 of 8 samples unscorable")
    assert driver.close("task0", reason) is Receipt.STORED
    assert driver.close("task0", reason) is Receipt.ALREADY_SETTLED
    assert driver.status().dropped == {"invalid": 1}


def test_closing_a_stored_group_changes_nothing(driver: RunDriver) -> None:
    driver.submit("task0")
    assert driver.close("task0", DropReason(DropKind.SURPLUS)) is Receipt.ALREADY_STORED
    assert driver.group("task0").state is GroupState.QUEUED


def test_every_move_of_a_group_is_in_its_history(driver: RunDriver) -> None:
    driver.release("task0", 1, "worker died")
    driver.open(driver.join("other"), [])
    driver.submit("task0", attempt=2)
    driver.submit("task1")
    driver.decide(1)
    driver.acknowledge(1)
    driver.checkpointed(1)
    assert driver.notes("task0") == [
        "dispatched: opened at version 0",
        "dispatched: attempts: attempt 1: worker died",
        "dispatched: attempt 2",
        "queued: attempt 2 submitted",
        "batched: batch 1",
        "trained: step 1",
        "durable: checkpoint 1",
    ]


def test_a_failed_operation_leaves_no_trace(driver: RunDriver) -> None:
    before = driver.status()
    with pytest.raises(RunError):
        driver.submit("stranger", (99,))
    assert driver.status() == before
    assert driver.audit().violations == ()
