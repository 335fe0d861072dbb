"""Publications and what their tokens count as, also after the trainer that published them died. Rules 1 and 2.

A publication counts as its step. When a later trainer replays a step and gets other weights, what earlier trainers published from
that step on no longer belongs to the current lineage: its tokens count as the last version both have in common.
"""

from collections.abc import Iterable

from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import NOT_SAMPLED, Publication, PublicationId
from rollbook.ledger.records import PublicationRecord
from rollbook.ledger.rules.book import RunBook


def register(book: RunBook, step: int, digest: str, *, epoch: int) -> Publication:
    """Get an id for weights about to be pushed. The same weights of the same trainer get the same id."""
    book.fence(epoch)
    # Publications of this step that still count as such: an older one that lost its lineage has nothing to say here.
    of_step = [p for p in book.tx.publications(book.run_id, effective_from=step) if p.step == step]
    for known in of_step:
        if known.epoch == epoch and known.digest == digest:
            return known.contract
        if known.epoch == epoch:
            raise RunError(
                f"run {book.run_id}: epoch {epoch} published step {step} with digest {known.digest} already, not {digest}; "
                "one step has one set of weights"
            )
    _refuse_out_of_order(book, step)
    if any(p.digest != digest for p in of_step):
        lose_lineage(book, step, epoch=epoch)
    record = PublicationRecord(
        run_id=book.run_id,
        id=PublicationId(book.count("next_publication")),
        epoch=epoch,
        step=step,
        digest=digest,
        effective_step=step,
        registered_at=book.now,
    )
    book.tx.put_publication(record)
    return record.contract


def _refuse_out_of_order(book: RunBook, step: int) -> None:
    run = book.run
    # One beyond what is acknowledged: a trainer may publish a step before it acknowledges it.
    newest = min(run.epoch_acknowledged + 1, max(run.last_decided, run.epoch_acknowledged))
    if not 0 <= step <= newest:
        raise RunError(
            f"run {run.run_id}: step {step} cannot be published, the trainer of epoch {run.epoch} has come to {newest}"
        )
    if run.last_confirmed is not None:
        live = find_publication(book, run.last_confirmed)
        if step < live.step:
            raise RunError(
                f"run {run.run_id}: publishing step {step} would move the engines backwards, they have step {live.step}; "
                "replay the recorded batches first"
            )


def confirm(book: RunBook, publication: Publication, *, epoch: int) -> None:
    """Every replica in service has it: from now on the gate counts with its step."""
    book.fence(epoch)
    record = find_publication(book, publication.id)
    if record.contract != publication or record.epoch != epoch:
        raise RunError(
            f"run {book.run_id}: publication {publication.id} is registered as {record.contract}, "
            f"so epoch {epoch} cannot confirm {publication}"
        )
    if record.confirmed_at is None:
        book.tx.put_publication(record.changed(confirmed_at=book.now))
    if book.run.version is None or record.step >= book.run.version:
        book.change(version=record.step, publication=record.id, last_confirmed=record.id)
        book.tx.announce(book.run_id)


def find_publication(book: RunBook, publication_id: PublicationId) -> PublicationRecord:
    record = book.tx.publication(book.run_id, publication_id)
    if record is None:
        raise RunError(f"run {book.run_id}: publication {publication_id} was never registered")
    return record


def oldest_effective_version(book: RunBook, publications: Iterable[int], *, group_id: GroupId) -> int | None:
    """The version a group's lag is judged by: that of its oldest trained token, as far as the producer told."""
    known = sorted({p for p in publications if p != NOT_SAMPLED})
    oldest: int | None = None
    for publication_id in known:
        record = book.tx.publication(book.run_id, PublicationId(publication_id))
        if record is None:
            raise RunError(
                f"run {book.run_id}: group {group_id} has tokens of publication {publication_id}, which was never registered; "
                "its policy server serves weights of another run"
            )
        oldest = record.effective_step if oldest is None else min(oldest, record.effective_step)
    return oldest


def lose_lineage(book: RunBook, step: int, *, epoch: int) -> int:
    """The weights of `step` turned out different: what earlier epochs published from there on counts as `step - 1`.

    Returns how many publications that concerns. Batches decided before stay as they are.
    """
    lost = [p for p in book.tx.publications(book.run_id, effective_from=step) if p.epoch < epoch]
    for record in lost:
        book.tx.put_publication(record.changed(effective_step=step - 1))
    ids = {int(record.id) for record in lost}
    if ids:
        # The whole queue, once for each lost lineage: rare, and exactly what changed its age.
        for group in book.tx.queued(book.run_id):
            if ids.intersection(group.publications):
                oldest = oldest_effective_version(book, group.publications, group_id=group.group_id)
                book.tx.put_group(group.changed(oldest_version=oldest))
    return len(lost)
