"""Rules 5 to 7: what becomes of a group."""

import pytest

from rollbook.contracts.admission import Receipt
from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import DropKind, DropReason, GroupState
from rollbook.ledger.records import Origin
from rollbook.ledger.rules.groups import QueueFullError
from tests.parts.ledger.desk import Desk
from tests.parts.ledger.groups import RUN, draws, settings


@pytest.fixture
def desk() -> Desk:
    desk = Desk().create(settings())
    desk.take_role()
    desk.publish(0)
    desk.open(desk.join(), draws(0, 3))
    return desk


def test_the_first_submit_wins_and_a_later_one_is_told_so(desk: Desk) -> None:
    assert desk.submit("task0") is Receipt.STORED
    before = desk.group("task0")
    assert desk.submit("task0", samples=5) is Receipt.ALREADY_STORED
    assert desk.group("task0") == before


def test_a_submitted_group_stays_stored_through_training(desk: Desk) -> None:
    for task in ("task0", "task1"):
        desk.submit(task)
    desk.decide(1)
    assert desk.submit("task0") is Receipt.ALREADY_STORED
    desk.acknowledge(1)
    assert desk.submit("task0") is Receipt.ALREADY_STORED


def test_a_late_submit_does_not_resurrect_a_settled_group(desk: Desk) -> None:
    desk.close("task0", DropReason(DropKind.TIMEOUT))
    assert desk.submit("task0") is Receipt.ALREADY_SETTLED
    assert desk.group("task0").state is GroupState.DROPPED
    assert desk.store.read_now(lambda tx: tx.payloads.get(RUN, desk.group("task0").group_id)) is None


def test_a_late_submit_of_an_old_attempt_is_taken_if_it_comes_first(desk: Desk) -> None:
    desk.release("task0", 1)
    new_owner = desk.join("other")
    assert desk.open(new_owner, []).grants[0].attempt == 2
    assert desk.submit("task0", attempt=1) is Receipt.STORED
    assert desk.submit("task0", attempt=2) is Receipt.ALREADY_STORED


def test_a_submit_with_a_drop_keeps_outcome_and_payload(desk: Desk) -> None:
    assert desk.submit("task0", drop=DropReason(DropKind.FILTERED, "constant reward")) is Receipt.STORED
    dropped = desk.group("task0")
    assert (dropped.state, dropped.drop_reason) == (GroupState.DROPPED, "filtered: constant reward")
    assert dropped.outcome is not None
    assert dropped.has_payload
    assert desk.status().dropped == {"filtered": 1}


def test_the_short_lived_payload_of_a_filtered_group_goes_with_a_later_checkpoint(desk: Desk) -> None:
    desk.submit("task0", drop=DropReason(DropKind.FILTERED))
    desk.submit("task1")
    desk.submit("task2")
    desk.decide(1)
    desk.acknowledge(1)
    assert desk.checkpointed(1) == 1
    assert not desk.group("task0").has_payload
    assert desk.group("task1").has_payload
    assert desk.audit().violations == ()


def test_a_group_nobody_opened_is_opened_by_its_submission(desk: Desk) -> None:
    assert desk.submit("stranger", (-1,)) is Receipt.STORED
    group = desk.group("stranger")
    assert (group.origin, group.state, group.oldest_version) == (Origin.EXTERNAL, GroupState.QUEUED, None)
    assert desk.status().opened == 4
    assert desk.audit().violations == ()


def test_an_external_group_is_refused_while_the_queue_is_full_but_an_admitted_one_never(desk: Desk) -> None:
    desk.submit("task0")
    with pytest.raises(QueueFullError, match="stranger@0"):
        desk.submit("stranger", (-1,), max_queued=1)
    assert desk.submit("task1", max_queued=1) is Receipt.STORED


def test_a_group_submitted_after_the_end_is_recorded_as_dropped(desk: Desk) -> None:
    desk.finish(EndOfRun.STOPPED)
    assert desk.submit("stranger", (-1,)) is Receipt.ALREADY_SETTLED
    assert desk.group("stranger").drop_reason == "end_of_run: submitted after the end"
    assert desk.audit().violations == ()


def test_tokens_of_an_unknown_publication_are_refused_by_name(desk: Desk) -> None:
    with pytest.raises(RunError, match="task0@0 has tokens of publication 7, which was never registered"):
        desk.submit("task0", (0, 7))
    assert desk.group("task0").state is GroupState.DISPATCHED


def test_a_groups_age_is_that_of_its_oldest_trained_token(desk: Desk) -> None:
    for task in ("task0", "task1"):
        desk.submit(task)
    desk.decide(1)
    desk.acknowledge(1)
    newer = desk.publish(1)
    desk.submit("task2", (newer.id, 0))
    assert desk.group("task2").oldest_version == 0


def test_closing_a_group_that_was_never_opened_is_an_error(desk: Desk) -> None:
    with pytest.raises(RunError, match="nobody@0 was never opened"):
        desk.close("nobody", DropReason(DropKind.SURPLUS))


def test_closing_twice_settles_once(desk: Desk) -> None:
    reason = DropReason(DropKind.INVALID, "8 of 8 samples unscorable")
    assert desk.close("task0", reason) is Receipt.STORED
    assert desk.close("task0", reason) is Receipt.ALREADY_SETTLED
    assert desk.status().dropped == {"invalid": 1}


def test_closing_a_stored_group_changes_nothing(desk: Desk) -> None:
    desk.submit("task0")
    assert desk.close("task0", DropReason(DropKind.SURPLUS)) is Receipt.ALREADY_STORED
    assert desk.group("task0").state is GroupState.QUEUED


def test_every_move_of_a_group_is_told_in_its_history(desk: Desk) -> None:
    desk.release("task0", 1, "worker died")
    desk.open(desk.join("other"), [])
    desk.submit("task0", attempt=2)
    desk.submit("task1")
    desk.decide(1)
    desk.acknowledge(1)
    desk.checkpointed(1)
    assert desk.notes("task0") == [
        "dispatched: opened at version 0",
        "dispatched: attempts: attempt 1: worker died",
        "dispatched: attempt 2",
        "queued: attempt 2 submitted",
        "batched: batch 1",
        "trained: step 1",
        "durable: checkpoint 1",
    ]


def test_a_failed_operation_leaves_no_trace(desk: Desk) -> None:
    before = desk.status()
    with pytest.raises(RunError):
        desk.submit("stranger", (99,))
    assert desk.status() == before
    assert desk.audit().violations == ()
