"""docs/ledger-rules.md, rules 2 and 13 to 15: trainer role, acknowledgements, checkpoints, publications."""

import pytest

from rollbook.contracts.admission import OwnerId
from rollbook.contracts.batch import AckReceipt
from rollbook.contracts.errors import FencedError, RunError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import GroupState
from rollbook.ledger.rules import publications
from tests.parts.ledger.groups import RUN, draws, settings
from tests.parts.ledger.run_driver import RunDriver


def trained(steps: int, *, keep_payloads: bool = True, staleness_bound: int = 2) -> tuple[RunDriver, OwnerId]:
    """A run with one group a step that trained and published so many steps."""
    driver = RunDriver().create(
        settings(per_step=1, staleness_bound=staleness_bound, policy=BatchPolicy.DROP, keep_payloads=keep_payloads)
    )
    driver.take_role()
    live = driver.publish(0)
    owner = driver.join()
    for step in range(1, steps + 1):
        driver.open(owner, draws(step, 1))
        driver.submit(f"task{step}", (live.id,))
        driver.decide(step)
        driver.acknowledge(step)
        live = driver.publish(step)
    return driver, owner


def effective(driver: RunDriver) -> list[int]:
    return [p.effective_step for p in driver.store.read_now(lambda tx: tx.publications.each(RUN))]


def test_a_trainer_role_reports_the_progress_of_the_ledger() -> None:
    driver, _ = trained(3)
    driver.checkpointed(2)
    role = driver.take_role(2)
    assert (role.epoch, role.last_decided, role.last_acknowledged, role.durable_step) == (2, 3, 3, 2)
    assert role.last_confirmed is not None
    assert (role.last_confirmed.id, role.last_confirmed.step) == (3, 3)


def test_a_checkpoint_ahead_of_the_ledger_stops_the_run() -> None:
    driver, _ = trained(1)
    with pytest.raises(RunError, match="checkpoint ahead of the ledger: it is of step 2, the ledger has 1"):
        driver.take_role(2)


def test_a_checkpoint_whose_batches_were_deleted_stops_the_run() -> None:
    driver, _ = trained(3, keep_payloads=False)
    driver.checkpointed(3, oldest_kept=2)
    with pytest.raises(RunError, match="payloads of batches up to 2 are gone"):
        driver.take_role(1)
    assert driver.take_role(2).restored_step == 2


def test_acknowledging_moves_the_groups_of_the_step() -> None:
    driver, _ = trained(1)
    assert driver.group("task1").state is GroupState.TRAINED
    assert driver.acknowledge(1) is AckReceipt.REPEATED


def test_steps_are_acknowledged_in_order() -> None:
    driver, _ = trained(1)
    with pytest.raises(RunError, match="step 2 cannot be acknowledged; 1 batches are decided"):
        driver.acknowledge(2)


def test_a_new_trainer_cannot_skip_a_step_of_its_replay() -> None:
    driver, _ = trained(3)
    driver.take_role(1)
    with pytest.raises(RunError, match="step 3 cannot be acknowledged"):
        driver.acknowledge(3)


def test_a_replaced_trainer_is_fenced_from_every_operation() -> None:
    driver, _ = trained(1)
    driver.take_role(1)
    driver.epoch = 1
    for verb in (
        lambda: driver.acknowledge(1),
        lambda: driver.register(1),
        lambda: driver.checkpointed(1),
        lambda: driver.decide(1),
    ):
        with pytest.raises(FencedError):
            verb()


def test_a_checkpoint_makes_its_groups_durable_and_is_monotone() -> None:
    driver, _ = trained(3)
    driver.checkpointed(2)
    assert [driver.group(f"task{s}").state for s in (1, 2, 3)] == [
        GroupState.DURABLE,
        GroupState.DURABLE,
        GroupState.TRAINED,
    ]
    driver.checkpointed(1)
    assert driver.status().durable_step == 2


def test_a_checkpoint_of_a_step_that_was_not_acknowledged_is_refused() -> None:
    driver, _ = trained(1)
    with pytest.raises(RunError, match="ahead of the ledger"):
        driver.checkpointed(2)


def test_payloads_are_kept_back_to_the_oldest_kept_checkpoint() -> None:
    driver, _ = trained(3, keep_payloads=False)
    assert driver.checkpointed(3, oldest_kept=2) == 2
    assert [driver.group(f"task{s}").has_payload for s in (1, 2, 3)] == [False, False, True]
    with pytest.raises(RunError, match="batch 2 is recorded, but its payloads were deleted"):
        driver.decide(2)
    assert driver.audit().violations == ()


def test_payloads_are_kept_if_configured() -> None:
    driver, _ = trained(3)
    assert driver.checkpointed(3, oldest_kept=3) == 0


def test_an_exact_replay_is_a_repeat_and_keeps_every_version() -> None:
    driver, _ = trained(3)
    driver.take_role(1)
    assert [driver.acknowledge(step) for step in (2, 3)] == [AckReceipt.REPEATED, AckReceipt.REPEATED]
    assert effective(driver) == [0, 1, 2, 3]


def test_a_diverging_replay_lowers_the_version_of_groups_sampled_by_demoted_weights() -> None:
    driver, owner = trained(3)
    driver.open(owner, draws(4, 2))
    driver.submit("task4", (3,))
    driver.submit("task5", (3, 2))
    driver.take_role(1)
    assert driver.acknowledge(2, "other2") is AckReceipt.DIVERGED
    assert effective(driver) == [0, 1, 1, 1]
    assert [driver.group(task).oldest_version for task in ("task4", "task5")] == [1, 1]
    assert driver.acknowledge(3, "other3") is AckReceipt.DIVERGED
    assert effective(driver) == [0, 1, 1, 1]
    # Batch 4 takes version 1 and newer (O = 2), batch 5 only 2 and newer.
    driver.publish(3, "other3")
    assert driver.decide(4).manifest is not None
    driver.acknowledge(4)
    assert driver.decide(5).num_stale == 1
    assert driver.audit().violations == ()


def test_divergence_is_reported_again_if_its_response_was_lost() -> None:
    driver, _ = trained(1)
    driver.take_role(0)
    assert driver.acknowledge(1, "other") is AckReceipt.DIVERGED
    assert driver.acknowledge(1, "other") is AckReceipt.DIVERGED


def test_tokens_of_demoted_weights_get_the_demoted_version_on_arrival() -> None:
    driver, owner = trained(3)
    driver.open(owner, draws(4, 1))
    driver.take_role(1)
    driver.acknowledge(2, "other2")
    driver.acknowledge(3, "other3")
    driver.submit("task4", (3,))
    assert driver.group("task4").oldest_version == 1


def test_weights_published_but_not_acknowledged_before_a_crash_are_compared_as_well() -> None:
    driver, owner = trained(1)
    driver.open(owner, draws(2, 1))
    driver.submit("task2", (1,))
    driver.decide(2)
    driver.publish(2)
    driver.take_role(1)
    assert driver.acknowledge(2, "other2") is AckReceipt.ACKNOWLEDGED
    assert effective(driver) == [0, 1, 1]


def test_publication_ids_count_from_zero_and_are_never_reused() -> None:
    driver, _ = trained(1)
    driver.take_role(1)
    assert driver.register(1).id == 2


def test_registering_the_same_weights_again_gives_the_same_id() -> None:
    driver, _ = trained(1)
    assert driver.register(1) == driver.register(1)
    with pytest.raises(RunError, match="one step has one set of weights"):
        driver.register(1, "other")


def test_weights_older_than_what_the_engines_have_are_not_published() -> None:
    driver, _ = trained(3)
    driver.take_role(1)
    with pytest.raises(RunError, match="publishing step 1 would move the engines backwards, they have step 3"):
        driver.register(1)


def test_weights_of_a_step_that_was_not_trained_are_not_published() -> None:
    driver, _ = trained(1)
    with pytest.raises(RunError, match="step 2 cannot be published"):
        driver.register(2)


def test_a_publication_is_confirmed_by_the_trainer_that_registered_it() -> None:
    driver, _ = trained(1)
    publication = driver.register(1)
    driver.take_role(1)
    with pytest.raises(RunError, match="cannot confirm"):
        driver.rule(lambda run_tx: publications.confirm(run_tx, publication, epoch=2))


def test_the_version_of_the_gate_is_the_last_confirmed_one() -> None:
    driver, _ = trained(2)
    status = driver.status()
    assert (status.version, status.publication, status.epoch, status.acknowledged_step) == (2, 2, 1, 2)
    driver.take_role(2)
    assert driver.status().version is None
