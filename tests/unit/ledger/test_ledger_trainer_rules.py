"""Rules 2 and 13 to 15: role, acknowledgements, checkpoints, lineage."""

import pytest

from rollbook.contracts.admission import OwnerId
from rollbook.contracts.batch import AckReceipt
from rollbook.contracts.errors import FencedError, RunError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import GroupState
from rollbook.ledger.rules import lineage
from tests.parts.ledger.desk import Desk
from tests.parts.ledger.groups import RUN, draws, settings


def trained(steps: int, *, keep_payloads: bool = True, budget: int = 2) -> tuple[Desk, OwnerId]:
    """A run with one group a step that trained and published so many steps."""
    desk = Desk().create(settings(per_step=1, budget=budget, policy=BatchPolicy.DROP, keep_payloads=keep_payloads))
    desk.take_role()
    live = desk.publish(0)
    owner = desk.join()
    for step in range(1, steps + 1):
        desk.open(owner, draws(step, 1))
        desk.submit(f"task{step}", (live.id,))
        desk.decide(step)
        desk.acknowledge(step)
        live = desk.publish(step)
    return desk, owner


def effective(desk: Desk) -> list[int]:
    return [p.effective_step for p in desk.store.read_now(lambda tx: tx.publications.all(RUN))]


def test_a_role_tells_where_the_ledger_stands() -> None:
    desk, _ = trained(3)
    desk.checkpointed(2)
    role = desk.take_role(2)
    assert (role.epoch, role.last_decided, role.last_acknowledged, role.durable_step) == (2, 3, 3, 2)
    assert role.last_confirmed is not None
    assert (role.last_confirmed.id, role.last_confirmed.step) == (3, 3)


def test_a_checkpoint_ahead_of_the_ledger_stops_the_run() -> None:
    desk, _ = trained(1)
    with pytest.raises(RunError, match="checkpoint ahead of the ledger: it is of step 2, the ledger knows 1"):
        desk.take_role(2)


def test_a_checkpoint_whose_batches_are_gone_stops_the_run() -> None:
    desk, _ = trained(3, keep_payloads=False)
    desk.checkpointed(3, oldest_kept=2)
    with pytest.raises(RunError, match="payloads of batches up to 2 are gone"):
        desk.take_role(1)
    assert desk.take_role(2).restored_step == 2


def test_acknowledging_moves_the_groups_of_the_step() -> None:
    desk, _ = trained(1)
    assert desk.group("task1").state is GroupState.TRAINED
    assert desk.acknowledge(1) is AckReceipt.REPEATED


def test_steps_are_acknowledged_in_order() -> None:
    desk, _ = trained(1)
    with pytest.raises(RunError, match="step 2 cannot be acknowledged; 1 batches are decided"):
        desk.acknowledge(2)


def test_a_new_trainer_cannot_skip_a_step_of_its_replay() -> None:
    desk, _ = trained(3)
    desk.take_role(1)
    with pytest.raises(RunError, match="step 3 cannot be acknowledged"):
        desk.acknowledge(3)


def test_an_old_trainer_is_fenced_from_every_verb() -> None:
    desk, _ = trained(1)
    desk.take_role(1)
    desk.epoch = 1
    for verb in (
        lambda: desk.acknowledge(1),
        lambda: desk.register(1),
        lambda: desk.checkpointed(1),
        lambda: desk.decide(1),
    ):
        with pytest.raises(FencedError):
            verb()


def test_a_checkpoint_makes_its_groups_durable_and_is_monotone() -> None:
    desk, _ = trained(3)
    desk.checkpointed(2)
    assert [desk.group(f"task{s}").state for s in (1, 2, 3)] == [
        GroupState.DURABLE,
        GroupState.DURABLE,
        GroupState.TRAINED,
    ]
    desk.checkpointed(1)
    assert desk.status().durable_step == 2


def test_a_checkpoint_of_a_step_that_was_not_acknowledged_is_refused() -> None:
    desk, _ = trained(1)
    with pytest.raises(RunError, match="ahead of the ledger"):
        desk.checkpointed(2)


def test_payloads_are_kept_back_to_the_oldest_kept_checkpoint() -> None:
    desk, _ = trained(3, keep_payloads=False)
    assert desk.checkpointed(3, oldest_kept=2) == 2
    assert [desk.group(f"task{s}").has_payload for s in (1, 2, 3)] == [False, False, True]
    with pytest.raises(RunError, match="batch 2 is recorded, but its payloads went"):
        desk.decide(2)
    assert desk.audit().violations == ()


def test_payloads_stay_where_they_are_to_be_kept() -> None:
    desk, _ = trained(3)
    assert desk.checkpointed(3, oldest_kept=3) == 0


def test_an_exact_replay_is_a_repeat_and_keeps_every_version() -> None:
    desk, _ = trained(3)
    desk.take_role(1)
    assert [desk.acknowledge(step) for step in (2, 3)] == [AckReceipt.REPEATED, AckReceipt.REPEATED]
    assert effective(desk) == [0, 1, 2, 3]


def test_a_diverging_replay_ages_what_the_lost_lineage_sampled() -> None:
    desk, owner = trained(3)
    desk.open(owner, draws(4, 2))
    desk.submit("task4", (3,))
    desk.submit("task5", (3, 2))
    desk.take_role(1)
    assert desk.acknowledge(2, "other2") is AckReceipt.DIVERGED
    assert effective(desk) == [0, 1, 1, 1]
    assert [desk.group(task).oldest_version for task in ("task4", "task5")] == [1, 1]
    assert desk.acknowledge(3, "other3") is AckReceipt.DIVERGED
    assert effective(desk) == [0, 1, 1, 1]
    # Batch 4 takes version 1 and newer (O = 2), batch 5 only 2 and newer.
    desk.publish(3, "other3")
    assert desk.decide(4).manifest is not None
    desk.acknowledge(4)
    assert desk.decide(5).num_stale == 1
    assert desk.audit().violations == ()


def test_divergence_is_told_again_when_its_answer_was_lost() -> None:
    desk, _ = trained(1)
    desk.take_role(0)
    assert desk.acknowledge(1, "other") is AckReceipt.DIVERGED
    assert desk.acknowledge(1, "other") is AckReceipt.DIVERGED


def test_tokens_that_arrive_after_their_lineage_was_lost_are_judged_by_it() -> None:
    desk, owner = trained(3)
    desk.open(owner, draws(4, 1))
    desk.take_role(1)
    desk.acknowledge(2, "other2")
    desk.acknowledge(3, "other3")
    desk.submit("task4", (3,))
    assert desk.group("task4").oldest_version == 1


def test_weights_published_but_not_acknowledged_before_a_crash_are_compared_as_well() -> None:
    desk, owner = trained(1)
    desk.open(owner, draws(2, 1))
    desk.submit("task2", (1,))
    desk.decide(2)
    desk.publish(2)
    desk.take_role(1)
    assert desk.acknowledge(2, "other2") is AckReceipt.ACKNOWLEDGED
    assert effective(desk) == [0, 1, 1]


def test_publication_ids_count_from_zero_and_are_never_reused() -> None:
    desk, _ = trained(1)
    desk.take_role(1)
    assert desk.register(1).id == 2


def test_registering_the_same_weights_again_gives_the_same_id() -> None:
    desk, _ = trained(1)
    assert desk.register(1) == desk.register(1)
    with pytest.raises(RunError, match="one step has one set of weights"):
        desk.register(1, "other")


def test_weights_older_than_what_the_engines_have_are_not_published() -> None:
    desk, _ = trained(3)
    desk.take_role(1)
    with pytest.raises(RunError, match="publishing step 1 would move the engines backwards, they have step 3"):
        desk.register(1)


def test_weights_of_a_step_that_was_not_trained_are_not_published() -> None:
    desk, _ = trained(1)
    with pytest.raises(RunError, match="step 2 cannot be published"):
        desk.register(2)


def test_a_publication_is_confirmed_by_the_trainer_that_registered_it() -> None:
    desk, _ = trained(1)
    publication = desk.register(1)
    desk.take_role(1)
    with pytest.raises(RunError, match="cannot confirm"):
        desk.rule(lambda run_tx: lineage.confirm(run_tx, publication, epoch=2))


def test_the_version_of_the_gate_is_the_last_confirmed_one() -> None:
    desk, _ = trained(2)
    status = desk.status()
    assert (status.version, status.publication, status.epoch, status.acknowledged_step) == (2, 2, 1, 2)
    desk.take_role(2)
    assert desk.status().version is None
