"""docs/ledger-rules.md, rules 9 to 12: the batch of a step."""

import pytest

from rollbook.contracts.admission import EndOfDataRule, GateState, OwnerId
from rollbook.contracts.batch import BatchManifest, EndOfRun
from rollbook.contracts.errors import FencedError, RunError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import DropKind, DropReason, GroupState
from tests.parts.ledger.groups import draws, settings
from tests.parts.ledger.run_driver import RunDriver


def started(**kwargs: object) -> tuple[RunDriver, OwnerId]:
    driver = RunDriver().create(settings(**kwargs))  # type: ignore[arg-type]  # the names are checked by the callee
    driver.take_role()
    driver.publish(0)
    return driver, driver.join()


def tasks(manifest: BatchManifest | None) -> list[str]:
    assert manifest is not None
    return [entry.group_id.removesuffix("@0") for entry in manifest.entries]


def train(driver: RunDriver, step: int) -> None:
    """Acknowledge and publish."""
    driver.acknowledge(step)
    driver.publish(step)


def test_requesting_a_step_again_returns_the_same_batch() -> None:
    driver, owner = started()
    driver.open(owner, draws(0, 4))
    for task in ("task0", "task1", "task2"):
        driver.submit(task)
    first = driver.decide(1)
    assert first.is_new
    driver.submit("task3")
    again = driver.decide(1)
    assert (again.manifest, again.is_new) == (first.manifest, False)


def test_there_is_no_batch_before_there_are_enough_groups() -> None:
    driver, owner = started()
    driver.open(owner, draws(0, 4))
    driver.submit("task0")
    assert driver.decide(1).manifest is None
    assert driver.status().counts.batches_decided == 0


def test_wait_takes_groups_in_order_of_admission() -> None:
    driver, owner = started()
    driver.open(owner, draws(0, 4))
    for task in ("task3", "task2"):
        driver.submit(task)
    # Two are queued, but the two before them are still being played and the window is one.
    assert driver.decide(1).manifest is None
    driver.submit("task1")
    assert driver.decide(1).manifest is None
    driver.submit("task0")
    assert tasks(driver.decide(1).manifest) == ["task0", "task1"]


def test_wait_lets_a_group_overtake_within_the_window() -> None:
    # O = 3: S = 2, W = (3 - 2) * 2 + 1 = 3, so sequences 0..2 may go while 0 is being played.
    driver, owner = started(staleness_bound=3)
    driver.open(owner, draws(0, 5))
    for task in ("task1", "task3", "task4"):
        driver.submit(task)
    assert driver.decide(1).manifest is None
    driver.submit("task2")
    assert tasks(driver.decide(1).manifest) == ["task1", "task2"]
    # task3 lies three above task0, which is still open.
    assert driver.decide(2).manifest is None
    driver.submit("task0")
    assert tasks(driver.decide(2).manifest) == ["task0", "task3"]


def test_drop_takes_groups_in_order_of_arrival() -> None:
    driver, owner = started(policy=BatchPolicy.DROP)
    driver.open(owner, draws(0, 4))
    for task in ("task3", "task1", "task0"):
        driver.submit(task)
    assert tasks(driver.decide(1).manifest) == ["task3", "task1"]


def test_a_group_that_is_too_old_for_the_step_is_dropped_as_stale() -> None:
    driver, owner = started(policy=BatchPolicy.DROP, staleness_bound=1)
    driver.open(owner, draws(0, 4))
    for task in ("task1", "task2"):
        driver.submit(task)
    driver.decide(1)
    train(driver, 1)
    driver.open(owner, draws(4, 2))
    for task in ("task4", "task5"):
        driver.submit(task, (1,))
    driver.decide(2)
    train(driver, 2)
    driver.submit("task0", (0,))
    decision = driver.decide(3)
    assert (decision.manifest, decision.num_stale) == (None, 1)
    assert driver.group("task0").drop_reason == "stale: its oldest version is 0, batch 3 takes 1 and newer"


def test_stale_groups_are_dropped_even_if_no_batch_is_decided() -> None:
    driver, owner = started(policy=BatchPolicy.DROP, staleness_bound=0)
    driver.open(owner, draws(0, 2))
    driver.submit("task0")
    driver.submit("task1")
    driver.decide(1)
    train(driver, 1)
    driver.open(owner, draws(2, 2))
    driver.submit("task2", (0,))
    assert driver.decide(2).num_stale == 1
    assert driver.open(owner, draws(4, 2)).capacity == 0
    assert driver.status().counts.leased == 2


def test_groups_of_unknown_versions_are_never_stale() -> None:
    driver, _ = started(staleness_bound=0)
    for task in ("a", "b", "c", "d"):
        driver.submit(task, (-1,))
    assert tasks(driver.decide(1).manifest) == ["a", "b"]
    train(driver, 1)
    manifest = driver.decide(2).manifest
    assert tasks(manifest) == ["c", "d"]
    assert manifest is not None
    assert [entry.oldest_version for entry in manifest.entries] == [None, None]


def test_a_batch_can_be_decided_one_ahead() -> None:
    driver, owner = started()
    driver.open(owner, draws(0, 4))
    for task in ("task0", "task1", "task2", "task3"):
        driver.submit(task)
    driver.decide(1)
    assert tasks(driver.decide(2).manifest) == ["task2", "task3"]


def test_batches_are_decided_in_order() -> None:
    driver, _ = started()
    with pytest.raises(RunError, match="batch 2 cannot be decided, the next one is 1"):
        driver.decide(2)


def test_a_trainer_that_was_replaced_is_refused() -> None:
    driver, _ = started()
    driver.take_role()
    with pytest.raises(FencedError, match="epoch 1 was replaced by epoch 2"):
        driver.decide(1, epoch=1)


def test_an_epoch_that_was_never_assigned_is_an_error() -> None:
    driver, _ = started()
    with pytest.raises(RunError, match="epoch 9 was never assigned"):
        driver.decide(1, epoch=9)


def test_nothing_new_is_decided_until_recorded_batches_are_replayed() -> None:
    driver, owner = started()
    driver.open(owner, draws(0, 4))
    for task in ("task0", "task1", "task2", "task3"):
        driver.submit(task)
    driver.decide(1)
    driver.take_role()
    with pytest.raises(RunError, match="batches 1 to 1 are replayed"):
        driver.decide(2)
    assert driver.decide(1).manifest is not None
    driver.acknowledge(1)
    assert driver.decide(2).is_new


def test_steps_beyond_the_last_are_the_end_of_the_run() -> None:
    driver, _ = started(max_steps=3)
    assert driver.decide(4).end is EndOfRun.MAX_STEPS


def test_at_the_end_of_data_the_rest_forms_one_short_batch() -> None:
    driver, owner = started()
    driver.open(owner, draws(0, 3))
    for task in ("task0", "task1", "task2"):
        driver.submit(task)
    driver.exhausted()
    assert tasks(driver.decide(1).manifest) == ["task0", "task1"]
    last = driver.decide(2).manifest
    assert tasks(last) == ["task2"]
    assert last is not None
    assert last.is_last
    assert driver.decide(3).end is EndOfRun.END_OF_DATA
    assert driver.status().gate is GateState.ENDED
    assert driver.audit().violations == ()


def test_the_short_batch_waits_for_groups_that_are_still_played() -> None:
    driver, owner = started()
    driver.open(owner, draws(0, 3))
    driver.submit("task0")
    driver.exhausted()
    assert driver.decide(1).manifest is None
    driver.close("task1", DropReason(DropKind.FILTERED))
    driver.release("task2", 1)
    assert driver.decide(1).manifest is None
    driver.close("task2", DropReason(DropKind.FILTERED))
    assert tasks(driver.decide(1).manifest) == ["task0"]


def test_at_the_end_of_data_the_rest_is_dropped_if_configured() -> None:
    driver, owner = started(end_of_data=EndOfDataRule.DROP)
    driver.open(owner, draws(0, 1))
    driver.submit("task0")
    driver.exhausted()
    assert driver.decide(1).end is EndOfRun.END_OF_DATA
    assert driver.group("task0").state is GroupState.DROPPED
    assert driver.status().dropped == {"end_of_data": 1}


def test_finishing_drops_open_groups_and_closes_the_gate() -> None:
    driver, owner = started()
    driver.open(owner, draws(0, 3))
    driver.submit("task0")
    driver.finish(EndOfRun.STOPPED)
    assert driver.status().dropped == {"end_of_run": 3}
    assert driver.open(owner, draws(3, 1)).gate is GateState.ENDED
    assert driver.decide(1).end is EndOfRun.STOPPED
    driver.finish(EndOfRun.STOPPED)
    assert driver.audit().violations == ()
