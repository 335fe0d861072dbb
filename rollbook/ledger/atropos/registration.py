"""Registering a trainer: for the first time, again, and with another batch size.

The documentation of the original says that another registration resets the server, and its code ignores it. Here the settings of
the new registration apply and no group is dropped, because a trainer that restarts after a crash registers again. `/reset_data`
drops them, and so does another registration with `AtroposConfig.register_again = "reset"`.
"""

import json
from dataclasses import dataclass

from rollbook.contracts.errors import RunError
from rollbook.contracts.group import DropKind, DropReason
from rollbook.ledger.atropos.models import Registration
from rollbook.ledger.atropos.posts import queue_again
from rollbook.ledger.atropos.records import AtroposRecord
from rollbook.ledger.atropos.rules import acknowledge, acknowledge_served, registration_of
from rollbook.ledger.atropos.tables import AtroposTables
from rollbook.ledger.rules import trainer
from rollbook.ledger.rules.run_transaction import RunTransaction


class GoneStepError(RunError):
    """A trainer requests a step whose groups are no longer stored."""


class OtherBatchSizeError(RunError):
    """A trainer requests batches again that were served with another batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    is_first: bool
    num_queued: int
    """Groups that were queued before the registration and are kept."""


def register(run_tx: RunTransaction, registration: Registration) -> Registered:
    """Register a trainer. With `starting_step = k > 0` it gets the batches after k, including ones that were served before."""
    tables = AtroposTables(run_tx.tx)
    record = tables.record(run_tx.run_id)
    is_first = registration_of(record) is None
    acknowledge_served(run_tx, record)
    restored, shift = _resume_position(run_tx, record, registration.starting_step)
    _require_batch_size(run_tx, restored, shift, registration.batch_size)
    trainer.take_role(run_tx, restored_step=restored)
    if restored == run_tx.run.last_acknowledged < run_tx.run.last_decided:
        restored += _return_undelivered(run_tx, restored + 1, registration.batch_size)
    tables.put_record(
        tables.record(run_tx.run_id).changed(
            registration=registration.model_dump_json(),
            handed_step=restored,
            served_step=restored,
            shift=shift,
            server=None,
        )
    )
    num_queued = sum(bucket.num for bucket in tables.buckets(run_tx.run_id))
    _drop_oversized(run_tx, registration.batch_size)
    return Registered(is_first=is_first, num_queued=num_queued)


def _resume_position(run_tx: RunTransaction, record: AtroposRecord, starting_step: int) -> tuple[int, int]:
    """The ledger's step to resume from, and the shift to the trainer's step."""
    run = run_tx.run
    if record.registration is not None and starting_step == 0:
        # Trainers without a checkpoint register with 0. As in the original, they continue with the next batch.
        return run.last_acknowledged, record.shift
    wanted = starting_step - record.shift
    if record.registration is None or not record.first_step <= wanted <= run.last_decided:
        return run.last_acknowledged, starting_step - run.last_acknowledged
    if wanted < run.payload_floor:
        raise GoneStepError(
            f"run {run.run_id}: batch {starting_step + 1} was served and its groups are no longer stored (the oldest is "
            f"{run.payload_floor + record.shift + 1}); register with a later starting_step, start the server with more "
            "--keep-batches, or call /reset_data to start over"
        )
    while run_tx.run.last_acknowledged < wanted:  # it was sent, and the trainer reports that it has it
        acknowledge(run_tx, run_tx.run.last_acknowledged + 1)
    return wanted, record.shift


def _require_batch_size(run_tx: RunTransaction, restored: int, shift: int, batch_size: int) -> None:
    """Batches that were delivered are final, so they can only be served again in their size."""
    for step in range(restored + 1, run_tx.run.last_acknowledged + 1):
        size = _num_sequences(run_tx, step)
        if size != batch_size:
            raise OtherBatchSizeError(
                f"run {run_tx.run_id}: batch {step + shift} was served with {size} sequences and cannot be served again with "
                f"{batch_size}; register with batch_size {size}, or with starting_step {run_tx.run.last_acknowledged + shift} "
                "to continue with new batches"
            )


def _return_undelivered(run_tx: RunTransaction, step: int, batch_size: int) -> int:
    """Queue the groups of a decided batch again if it was not delivered and has another size. Returns 1 if so, else 0."""
    size = _num_sequences(run_tx, step)
    if size == batch_size:
        return 0
    batch = run_tx.tx.batches.get(run_tx.run_id, step)
    assert batch is not None
    ids = [entry.group_id for entry in batch.manifest.entries]
    again = {group.group_id: queue_again(run_tx, group) for group in run_tx.groups(ids)}
    reasons = {old: f"not delivered; queued again as {new} for batches of {batch_size}" for old, new in again.items()}
    acknowledge(run_tx, step, unusable=reasons)
    return 1


def _num_sequences(run_tx: RunTransaction, step: int) -> int:
    batch = run_tx.tx.batches.get(run_tx.run_id, step)
    assert batch is not None
    groups = run_tx.groups([entry.group_id for entry in batch.manifest.entries])
    return sum(json.loads(group.outcome)["num_samples"] for group in groups if group.outcome is not None)


def _drop_oversized(run_tx: RunTransaction, batch_size: int) -> None:
    """Drop queued groups that do not fit into a batch."""
    tables = AtroposTables(run_tx.tx)
    if batch_size < 1:
        return
    reason = DropReason(DropKind.INVALID, f"it has more sequences than a batch of {batch_size}")
    for bucket in tables.buckets(run_tx.run_id):
        if bucket.size > batch_size:
            groups = tables.in_bucket(run_tx.run_id, bucket.env_id, bucket.size, bucket.num)
            tables.remove_queued(groups)
            for group in groups:
                run_tx.drop(run_tx.group(group.group_id), reason, by="register")
