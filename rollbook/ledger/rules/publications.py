"""Publications of weights, and the effective version of their tokens. Rules 1 and 2.

The effective version of a publication is its step. If a later trainer replays a step and gets other weights, the publications of
earlier trainers from that step on are no longer ancestors of the current weights. They are demoted: their effective version becomes
the last step that both trainers have in common.
"""

from collections.abc import Iterable

from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.group_checks import UnusableGroupError
from rollbook.contracts.policy import NOT_SAMPLED, Publication, PublicationId
from rollbook.ledger.records import GroupRecord, Origin, PublicationRecord
from rollbook.ledger.rules.run_transaction import RunTransaction


def register(run_tx: RunTransaction, step: int, digest: str, *, epoch: int) -> Publication:
    """Assign an id to weights before they are pushed. The same weights of the same trainer get the same id."""
    run_tx.fence(epoch)
    # Publications whose effective step is this step; demoted ones do not count.
    of_step = [p for p in run_tx.tx.publications.effective_from(run_tx.run_id, step) if p.step == step]
    for known in of_step:
        if known.epoch == epoch and known.digest == digest:
            return known.contract
        if known.epoch == epoch:
            raise RunError(
                f"run {run_tx.run_id}: epoch {epoch} already published step {step} with digest {known.digest}, not {digest}; "
                "one step has one set of weights"
            )
    _refuse_out_of_order(run_tx, step)
    if any(p.digest != digest for p in of_step):
        demote_publications(run_tx, step, epoch=epoch)
    record = PublicationRecord(
        run_id=run_tx.run_id,
        id=PublicationId(run_tx.count("next_publication")),
        epoch=epoch,
        step=step,
        digest=digest,
        effective_step=step,
        registered_at=run_tx.now,
    )
    run_tx.tx.publications.put(record)
    return record.contract


def _refuse_out_of_order(run_tx: RunTransaction, step: int) -> None:
    run = run_tx.run
    # One beyond what is acknowledged: a trainer may publish a step before it acknowledges it.
    newest = min(run.epoch_acknowledged + 1, max(run.last_decided, run.epoch_acknowledged))
    if not 0 <= step <= newest:
        raise RunError(
            f"run {run.run_id}: step {step} cannot be published, the trainer of epoch {run.epoch} has reached {newest}"
        )
    if run.last_confirmed is not None:
        live = find_publication(run_tx, run.last_confirmed)
        if step < live.step:
            raise RunError(
                f"run {run.run_id}: publishing step {step} would move the engines backwards, they have step {live.step}; "
                "replay the recorded batches first"
            )


def confirm(run_tx: RunTransaction, publication: Publication, *, epoch: int) -> None:
    """All replicas in service have these weights; from now on the gate uses its step as the version."""
    run_tx.fence(epoch)
    record = find_publication(run_tx, publication.id)
    if record.contract != publication or record.epoch != epoch:
        raise RunError(
            f"run {run_tx.run_id}: publication {publication.id} is registered as {record.contract}, "
            f"so epoch {epoch} cannot confirm {publication}"
        )
    if record.confirmed_at is None:
        run_tx.tx.publications.put(record.changed(confirmed_at=run_tx.now))
    if run_tx.run.version is None or record.step >= run_tx.run.version:
        run_tx.change(version=record.step, publication=record.id, last_confirmed=record.id)
        run_tx.tx.announce(run_tx.run_id)


def find_publication(run_tx: RunTransaction, publication_id: PublicationId) -> PublicationRecord:
    record = run_tx.tx.publications.get(run_tx.run_id, publication_id)
    if record is None:
        raise RunError(f"run {run_tx.run_id}: publication {publication_id} was never registered")
    return record


def oldest_effective_version(
    run_tx: RunTransaction, publications: Iterable[int], *, group_id: GroupId, admitted_at: PublicationId | None
) -> int | None:
    """The effective version of a group's oldest trained token, as far as its publications are known.

    `admitted_at` is the admission publication of a granted group. No older one may sample for it, so a token of an unknown
    publication counts as sampled by that one: a producer cannot evade the staleness bound by leaving versions out.
    """
    publications = set(publications)
    if NOT_SAMPLED in publications and admitted_at is not None:
        publications.add(admitted_at)
    known = sorted(publications - {NOT_SAMPLED})
    oldest: int | None = None
    for publication_id in known:
        record = run_tx.tx.publications.get(run_tx.run_id, PublicationId(publication_id))
        if record is None:
            raise UnusableGroupError(
                f"run {run_tx.run_id}: group {group_id} has tokens of publication {publication_id}, which was never registered; "
                "its policy server serves the weights of another run"
            )
        oldest = record.effective_step if oldest is None else min(oldest, record.effective_step)
    return oldest


def admission_of(group: GroupRecord | None) -> PublicationId | None:
    """The admission publication of a granted group; None for an external one, which the gate did not admit."""
    return group.admission_publication if group is not None and group.origin is Origin.DRAWN else None


def demote_publications(run_tx: RunTransaction, step: int, *, epoch: int) -> int:
    """The weights of `step` changed: publications of earlier epochs from that step on get the effective version `step - 1`.

    Returns the number of demoted publications. Decided batches do not change.
    """
    demoted = [p for p in run_tx.tx.publications.effective_from(run_tx.run_id, step) if p.epoch < epoch]
    for record in demoted:
        run_tx.tx.publications.put(record.changed(effective_step=step - 1))
    ids = {int(record.id) for record in demoted}
    if ids:
        # Reads the whole queue, but demotions are rare.
        for group in run_tx.tx.groups.queued(run_tx.run_id):
            if ids.intersection((*group.publications, admission_of(group))):
                oldest = oldest_effective_version(
                    run_tx, group.publications, group_id=group.group_id, admitted_at=admission_of(group)
                )
                run_tx.tx.groups.put(group.changed(oldest_version=oldest))
    return len(demoted)
