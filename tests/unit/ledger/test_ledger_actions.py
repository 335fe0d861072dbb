"""Actions of operators on a run, by the rules of the ledger on a real store."""

from pathlib import Path

import pytest

from rollbook.contracts.admission import ActionKind, GateState, Receipt
from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.errors import NotFoundError, RunError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import DropKind, DropReason, GroupState
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from tests.parts.ledger.groups import RUN, draws, settings
from tests.parts.ledger.run_driver import RunDriver, blocking_sqlite


@pytest.fixture
def driver() -> RunDriver:
    driver = RunDriver().create(settings(staleness_bound=2))
    driver.take_role()
    driver.publish(0)
    return driver


def train_a_step(driver: RunDriver, step: int) -> None:
    for at in (0, 1):
        driver.submit(f"external{step}-{at}", (-1,))
    driver.decide(step)
    driver.acknowledge(step)


def test_a_pause_stops_grants_of_new_groups_and_of_further_attempts_until_resume(driver: RunDriver) -> None:
    owner = driver.join()
    driver.open(owner, draws(0, 1))
    driver.release("task0", 1)
    driver.act(ActionKind.PAUSE, note="the reward is wrong")
    paused = driver.open(owner, draws(1, 2))
    assert (paused.grants, paused.taken, paused.gate, paused.capacity) == ((), 0, GateState.PAUSED, 0)
    driver.act(ActionKind.RESUME)
    assert [g.task_id for g in driver.open(owner, draws(1, 2)).grants] == ["task0", "task1", "task2"]


def test_groups_that_are_played_during_a_pause_are_stored_and_trained(driver: RunDriver) -> None:
    owner = driver.join()
    driver.open(owner, draws(0, 2))
    driver.act(ActionKind.PAUSE)
    assert [driver.submit(f"task{at}", (0,)) for at in (0, 1)] == [Receipt.STORED, Receipt.STORED]
    assert driver.decide(1).manifest is not None


def test_a_drain_grants_further_attempts_but_no_new_draw(driver: RunDriver) -> None:
    owner = driver.join()
    driver.open(owner, draws(0, 1))
    driver.release("task0", 1)
    driver.act(ActionKind.PAUSE)
    driver.act(ActionKind.DRAIN)
    reply = driver.open(owner, draws(1, 2))
    assert ([g.task_id for g in reply.grants], reply.taken, reply.gate) == (["task0"], 0, GateState.DRAINING)


def test_a_drain_holds_until_it_is_complete_and_the_run_is_created_again(driver: RunDriver) -> None:
    driver.act(ActionKind.DRAIN)
    driver.create(settings(staleness_bound=2))  # as a supervisor that resumes a killed run does
    assert driver.status().gate is GateState.DRAINING
    driver.act(ActionKind.DRAINED, author="supervisor")
    assert driver.status().gate is GateState.DRAINING
    driver.create(settings(staleness_bound=2))
    assert driver.status().gate is GateState.OPEN
    assert driver.audit().violations == ()


def test_a_checkpoint_is_requested_until_one_of_that_step_or_a_later_one_is_durable(driver: RunDriver) -> None:
    driver.act(ActionKind.CHECKPOINT)
    assert driver.status().checkpoint_requested is None, "nothing was trained since the start"
    for step in (1, 2, 3):
        train_a_step(driver, step)
        if step == 2:
            driver.act(ActionKind.CHECKPOINT)
    driver.checkpointed(1)
    assert driver.status().checkpoint_requested == 2
    driver.checkpointed(3)
    assert driver.status().checkpoint_requested is None


@pytest.mark.parametrize("policy", [BatchPolicy.WAIT, BatchPolicy.PARTS])
def test_a_quarantine_drops_open_groups_and_later_draws_of_the_task_and_nothing_else(policy: BatchPolicy) -> None:
    is_in_parts = policy is BatchPolicy.PARTS
    run = settings(
        policy=policy, staleness_bound=2, group_size=2 if is_in_parts else 1, quorum=2 if is_in_parts else None
    )
    driver = RunDriver().create(run)
    driver.take_role()
    driver.publish(0)
    owner = driver.join()
    driver.open(owner, draws(0, 2))
    driver.submit("task9", (-1,))
    for task in ("task1", "task9", "task2"):
        driver.act(ActionKind.QUARANTINE, task)
    assert [driver.group(task).state for task in ("task0", "task1", "task9")] == [
        GroupState.DISPATCHED,
        GroupState.DROPPED,
        GroupState.DROPPED,
    ]
    reply = driver.open(owner, draws(2, 2))
    assert ([grant.task_id for grant in reply.grants], reply.taken) == (["task3"], 2)
    assert driver.group("task2").drop_reason == "quarantined"
    assert driver.close("task1", DropReason(DropKind.FILTERED)) is Receipt.ALREADY_SETTLED
    driver.submit("task2x", (-1,))
    assert driver.group("task2x").state is GroupState.QUEUED
    assert driver.status().quarantined == ("task1", "task2", "task9")
    assert driver.audit().violations == ()


def test_an_external_group_of_a_task_in_quarantine_is_stored_as_dropped(driver: RunDriver) -> None:
    driver.act(ActionKind.QUARANTINE, "task0")
    assert driver.submit("task0", (-1,)) is Receipt.STORED
    assert (driver.group("task0").state, driver.group("task0").drop_reason) == (GroupState.DROPPED, "quarantined")
    driver.act(ActionKind.READMIT, "task0")
    assert driver.status().quarantined == ()


def test_a_repeated_request_is_recorded_and_done_once(driver: RunDriver) -> None:
    first = driver.act(ActionKind.QUARANTINE, "task0", nonce="n")
    assert driver.act(ActionKind.QUARANTINE, "task0", nonce="n") == first
    assert driver.status().actions == 1


def test_actions_without_sense_are_refused_with_the_reason(driver: RunDriver) -> None:
    driver.act(ActionKind.QUARANTINE, "task0")
    for kind, target, message in (
        (ActionKind.QUARANTINE, "task0", "already"),
        (ActionKind.READMIT, "task1", "not in quarantine"),
        (ActionKind.QUARANTINE, "", "needs a task"),
        (ActionKind.PAUSE, "task0", "no target"),
        (ActionKind.DRAINED, "", "not being drained"),
    ):
        with pytest.raises(RunError, match=message):
            driver.act(kind, target)
    with pytest.raises(RunError, match="author"):
        driver.act(ActionKind.PAUSE, author=" ")
    assert driver.status().actions == 1


def test_a_note_needs_a_group_a_text_and_a_sample_of_the_group_and_is_possible_after_the_end(driver: RunDriver) -> None:
    driver.submit("task0", (-1,), samples=2)
    driver.finish(EndOfRun.STOPPED)
    note = driver.act(ActionKind.ANNOTATE, "task0@0", sample=1, note="it reads the answer from the prompt")
    assert driver.store.read_now(lambda tx: tx.actions.of_target(RUN, "task0@0")) == [note]
    with pytest.raises(RunError, match="no sample 2"):
        driver.act(ActionKind.ANNOTATE, "task0@0", sample=2, note="x")
    with pytest.raises(RunError, match="empty"):
        driver.act(ActionKind.ANNOTATE, "task0@0")
    with pytest.raises(NotFoundError):
        driver.act(ActionKind.ANNOTATE, "task7@0", note="x")
    with pytest.raises(RunError, match="is over"):
        driver.act(ActionKind.PAUSE)


def test_the_audit_finds_a_run_that_is_not_as_its_actions_left_it(tmp_path: Path) -> None:
    file = blocking_sqlite(tmp_path / FILE_NAME)
    driver = RunDriver(file).create(settings())
    driver.act(ActionKind.PAUSE)
    driver.rule(lambda run_tx: run_tx.change(is_paused=False))
    assert any("paused" in sentence for sentence in driver.audit().violations)
    file.close()
