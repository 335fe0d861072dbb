"""The trainer's role: taking it, acknowledging steps, marking checkpoints, ending the run. Rules 13 to 15."""

from rollbook.contracts.batch import AckReceipt, EndOfRun, TrainerRole
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import DropKind, DropReason, GroupState
from rollbook.ledger.records import StepRecord
from rollbook.ledger.rules.book import RunBook
from rollbook.ledger.rules.lineage import find_publication, lose_lineage
from rollbook.ledger.rules.retention import let_payloads_go


def take_role(book: RunBook, *, restored_step: int) -> TrainerRole:
    """Become the trainer. From here to its first confirmed publication the gate is closed."""
    run = book.run
    if restored_step > run.last_acknowledged:
        raise RunError(
            f"run {run.run_id}: checkpoint ahead of the ledger: it is of step {restored_step}, the ledger knows "
            f"{run.last_acknowledged} acknowledged steps. Restore an older checkpoint, or the ledger that belongs to this one"
        )
    if restored_step < run.payload_floor:
        raise RunError(
            f"run {run.run_id}: checkpoint {restored_step} is too old to resume from, the payloads of batches up to "
            f"{run.payload_floor} are gone; restore a newer one"
        )
    book.change(
        epoch=run.epoch + 1,
        restored_step=restored_step,
        epoch_acknowledged=restored_step,
        decided_at_takeover=run.last_decided,
        version=None,
        publication=None,
    )
    book.tx.announce(book.run_id)
    run = book.run
    return TrainerRole(
        epoch=run.epoch,
        restored_step=restored_step,
        last_decided=run.last_decided,
        last_acknowledged=run.last_acknowledged,
        durable_step=run.durable_step,
        last_confirmed=None if run.last_confirmed is None else find_publication(book, run.last_confirmed).contract,
    )


def acknowledge(book: RunBook, step: int, digest: str, *, epoch: int) -> AckReceipt:
    """Batch `step` was trained and gave weights of this digest. In order, idempotent; a replay is compared."""
    book.fence(epoch)
    run = book.run
    if step < 1 or step > min(run.last_decided, run.epoch_acknowledged + 1):
        raise RunError(
            f"run {run.run_id}: step {step} cannot be acknowledged; {run.last_decided} batches are decided and the trainer of "
            f"epoch {epoch} has come to {run.epoch_acknowledged}"
        )
    before = book.tx.steps(book.run_id, step)
    own = next((known for known in before if known.epoch == epoch), None)
    if own is not None and own.digest == digest:
        # Divergence is told again, should its first answer have been lost.
        return AckReceipt.DIVERGED if own.receipt is AckReceipt.DIVERGED else AckReceipt.REPEATED
    receipt = AckReceipt.ACKNOWLEDGED
    if before:
        receipt = AckReceipt.REPEATED if before[-1].digest == digest else AckReceipt.DIVERGED
    if receipt is AckReceipt.DIVERGED:
        lose_lineage(book, step, epoch=epoch)
    elif receipt is AckReceipt.ACKNOWLEDGED:
        _first_time(book, step, digest, epoch)
    book.tx.put_step(
        StepRecord(run_id=book.run_id, step=step, epoch=epoch, digest=digest, receipt=receipt, at=book.now)
    )
    book.change(epoch_acknowledged=max(run.epoch_acknowledged, step))
    return receipt


def _first_time(book: RunBook, step: int, digest: str, epoch: int) -> None:
    published = book.tx.publications(book.run_id, effective_from=step)
    if any(p.epoch < epoch and p.digest != digest for p in published):
        # An earlier trainer published this step and died before it acknowledged it: those weights were not reproduced.
        lose_lineage(book, step, epoch=epoch)
    _move_step(book, step, GroupState.TRAINED, note=f"step {step}", by=f"epoch {epoch}")
    book.change(last_acknowledged=step)


def checkpointed(book: RunBook, step: int, *, oldest_kept: int, epoch: int) -> int:
    """The checkpoint of `step` is durable, and so are its groups. Returns how many payloads were let go."""
    book.fence(epoch)
    run = book.run
    if not 0 <= step <= run.epoch_acknowledged:
        raise RunError(
            f"run {run.run_id}: a checkpoint of step {step} is ahead of the ledger, epoch {epoch} acknowledged "
            f"{run.epoch_acknowledged} steps; acknowledge before marking the checkpoint"
        )
    if oldest_kept > step:
        raise RunError(f"run {run.run_id}: the oldest kept checkpoint {oldest_kept} is newer than checkpoint {step}")
    for durable in range(run.durable_step + 1, step + 1):
        _move_step(book, durable, GroupState.DURABLE, note=f"checkpoint {step}", by=f"epoch {epoch}")
    book.change(durable_step=max(run.durable_step, step))
    num_gone, _ = let_payloads_go(book, oldest_kept, dropped_only=run.settings.keep_payloads)
    return num_gone


def finish(book: RunBook, reason: EndOfRun, *, epoch: int) -> None:
    """The run is over: what is open is dropped, and the gate stays closed."""
    book.fence(epoch)
    if book.run.ended is not None:
        return
    for group in [*book.tx.dispatched(book.run_id), *book.tx.queued(book.run_id)]:
        book.drop(group, DropReason(DropKind.END_OF_RUN, reason.value), by=f"epoch {epoch}")
    book.change(ended=reason)
    book.tx.announce(book.run_id)


def _move_step(book: RunBook, step: int, to: GroupState, *, note: str, by: str) -> None:
    batch = book.tx.batch(book.run_id, step)
    if batch is None:
        raise RunError(f"run {book.run_id}: batch {step} is not recorded, so its groups cannot become {to}")
    for group in book.groups([entry.group_id for entry in batch.manifest.entries]):
        book.move(group, to, note=note, by=by)
