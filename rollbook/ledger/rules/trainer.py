"""The trainer role: taking it, acknowledging steps, recording checkpoints, finishing the run.

See docs/ledger-rules.md, rules 13 to 15.
"""

from collections.abc import Mapping

from rollbook.contracts.batch import AckReceipt, EndOfRun, PassSplit, TrainerRole
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupState
from rollbook.ledger.records import GroupRecord, StepRecord
from rollbook.ledger.rules.groups import delete_payloads
from rollbook.ledger.rules.publications import demote_publications, find_publication
from rollbook.ledger.rules.run_transaction import RunTransaction


def take_role(run_tx: RunTransaction, *, restored_step: int) -> TrainerRole:
    """Become the trainer. The gate is closed until its first confirmed publication."""
    run = run_tx.run
    if restored_step > run.last_acknowledged:
        raise RunError(
            f"run {run.run_id}: checkpoint ahead of the ledger: it is of step {restored_step}, the ledger has "
            f"{run.last_acknowledged} acknowledged steps. If the ledger lost commits, stop the run and use `rollbook ledger "
            "rebuild`; else restore an older checkpoint, or the ledger that belongs to this one"
        )
    if restored_step < run.payload_floor:
        raise RunError(
            f"run {run.run_id}: checkpoint {restored_step} is too old to resume from, the payloads of batches up to "
            f"{run.payload_floor} are gone; restore a newer one"
        )
    run_tx.change(
        epoch=run.epoch + 1,
        restored_step=restored_step,
        epoch_acknowledged=restored_step,
        decided_at_takeover=run.last_decided,
        version=None,
        publication=None,
    )
    run_tx.tx.announce(run_tx.run_id)
    run = run_tx.run
    return TrainerRole(
        epoch=run.epoch,
        restored_step=restored_step,
        last_decided=run.last_decided,
        last_acknowledged=run.last_acknowledged,
        durable_step=run.durable_step,
        last_confirmed=None if run.last_confirmed is None else find_publication(run_tx, run.last_confirmed).contract,
        limits=run.settings.limits,
    )


def acknowledge(
    run_tx: RunTransaction,
    step: int,
    digest: str,
    *,
    epoch: int,
    unusable: Mapping[GroupId, str] | None = None,
    split: PassSplit | None = None,
) -> AckReceipt:
    """Record that batch `step` was trained and produced weights of this digest. In order and idempotent; a replay is compared.

    `unusable` are the groups of the batch that could not be trained, with the reason. docs/ledger-rules.md, rule 18.
    `split` is how it was split into passes; a replay gets it with the batch.
    """
    run_tx.fence(epoch)
    run = run_tx.run
    if step < 1 or step > min(run.last_decided, run.epoch_acknowledged + 1):
        raise RunError(
            f"run {run.run_id}: step {step} cannot be acknowledged; {run.last_decided} batches are decided and the trainer of "
            f"epoch {epoch} has reached step {run.epoch_acknowledged}"
        )
    before = run_tx.tx.steps.of_step(run_tx.run_id, step)
    own = next((known for known in before if known.epoch == epoch), None)
    if own is not None and own.digest == digest:
        # A divergence is reported again, in case the first response was lost.
        return AckReceipt.DIVERGED if own.receipt is AckReceipt.DIVERGED else AckReceipt.REPEATED
    groups = _groups_of_step(run_tx, step)
    unusable = dict(unusable or {})
    strangers = unusable.keys() - {group.group_id for group in groups}
    if strangers:
        raise RunError(f"run {run.run_id}: batch {step} does not contain {min(strangers)}, reported as unusable")
    receipt = AckReceipt.ACKNOWLEDGED
    if before:
        # Which groups are usable is a function of their payloads, so another set is a divergence too.
        is_same = before[-1].digest == digest and unusable.keys() == {g.group_id for g in groups if g.unusable}
        receipt = AckReceipt.REPEATED if is_same else AckReceipt.DIVERGED
    if receipt is AckReceipt.DIVERGED:
        demote_publications(run_tx, step, epoch=epoch)
    elif receipt is AckReceipt.ACKNOWLEDGED:
        _demote_unreproduced(run_tx, step, digest, epoch)
        for group in groups:
            reason = unusable.get(group.group_id)
            note = f"step {step}" if reason is None else f"step {step}, unusable: {reason}"
            run_tx.move(group, GroupState.TRAINED, note=note, by=f"epoch {epoch}", unusable=reason)
        run_tx.change(last_acknowledged=step, num_unusable=run.num_unusable + len(unusable))
    run_tx.tx.steps.put(
        StepRecord(
            run_id=run_tx.run_id,
            step=step,
            epoch=epoch,
            digest=digest,
            receipt=receipt,
            at=run_tx.now,
            split=split,
        )
    )
    run_tx.change(epoch_acknowledged=max(run.epoch_acknowledged, step))
    return receipt


def _demote_unreproduced(run_tx: RunTransaction, step: int, digest: str, epoch: int) -> None:
    published = run_tx.tx.publications.effective_from(run_tx.run_id, step)
    if any(p.epoch < epoch and p.digest != digest for p in published):
        # An earlier trainer published this step and died before acknowledging it; its weights were not reproduced.
        demote_publications(run_tx, step, epoch=epoch)


def checkpointed(run_tx: RunTransaction, step: int, *, oldest_kept: int, epoch: int) -> int:
    """The checkpoint of `step` is durable, and so are its groups. Returns the number of deleted payloads."""
    run_tx.fence(epoch)
    run = run_tx.run
    if not 0 <= step <= run.epoch_acknowledged:
        raise RunError(
            f"run {run.run_id}: a checkpoint of step {step} is ahead of the ledger, epoch {epoch} acknowledged "
            f"{run.epoch_acknowledged} steps; acknowledge before recording the checkpoint"
        )
    if oldest_kept > step:
        raise RunError(f"run {run.run_id}: the oldest kept checkpoint {oldest_kept} is newer than checkpoint {step}")
    for durable in range(run.durable_step + 1, step + 1):
        for group in _groups_of_step(run_tx, durable):
            run_tx.move(group, GroupState.DURABLE, note=f"checkpoint {step}", by=f"epoch {epoch}")
    run_tx.change(durable_step=max(run.durable_step, step))
    if run.checkpoint_requested is not None and step >= run.checkpoint_requested:
        run_tx.change(checkpoint_requested=None)
    num_deleted, _ = delete_payloads(run_tx, oldest_kept, dropped_only=run.settings.keep_payloads)
    return num_deleted


def finish(run_tx: RunTransaction, reason: EndOfRun, *, epoch: int) -> None:
    """End the run: open groups are dropped, and the gate stays closed."""
    run_tx.fence(epoch)
    if run_tx.run.ended is not None:
        return
    for group in [*run_tx.tx.groups.dispatched(run_tx.run_id), *run_tx.tx.groups.queued(run_tx.run_id)]:
        run_tx.drop(group, DropReason(DropKind.END_OF_RUN, reason.value), by=f"epoch {epoch}")
    run_tx.change(ended=reason)
    run_tx.tx.announce(run_tx.run_id)


def _groups_of_step(run_tx: RunTransaction, step: int) -> list[GroupRecord]:
    batch = run_tx.tx.batches.get(run_tx.run_id, step)
    if batch is None:
        raise RunError(f"run {run_tx.run_id}: batch {step} is not recorded")
    return run_tx.groups([entry.group_id for entry in batch.manifest.entries])
