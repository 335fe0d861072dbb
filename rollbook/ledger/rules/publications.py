"""Publications of weights, and the effective version of their tokens. docs/ledger-rules.md, rules 1 and 2.

The effective version of a publication is its step. If a later trainer replays a step and gets other weights, the publications of
earlier trainers from that step on are no longer ancestors of the current weights. They are demoted: their effective version becomes
the last step that both trainers have in common.
"""

from collections.abc import Iterable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Effective versions of a group's oldest and newest trained tokens, as far as they are known."""

    oldest: int | None = None
    newest: int | None = None
    """None if a token of an external group has an unknown version, too: such a token is never too old."""


def effective_versions(
    run_tx: RunTransaction, publications: Iterable[int], *, group_id: GroupId, admitted_at: PublicationId | None
) -> VersionRange:
    """`admitted_at` is the admission publication of a granted group. No older one may sample for it, so a token of an unknown
    publication counts as sampled by that one: a producer cannot evade the staleness bound by leaving versions out.
    """
    publications = set(publications)
    has_unknown = NOT_SAMPLED in publications
    if has_unknown and admitted_at is not None:
        publications.add(admitted_at)
        has_unknown = False
    steps: list[int] = []
    for publication_id in sorted(publications - {NOT_SAMPLED}):
        record = run_tx.tx.publications.get(run_tx.run_id, PublicationId(publication_id))
        if record is None:
            raise UnusableGroupError(
                f"run {run_tx.run_id}: group {group_id} has tokens of publication {publication_id}, which was never registered; "
                "its policy server serves the weights of another run"
            )
        steps.append(record.effective_step)
    if not steps:
        return VersionRange()
    return VersionRange(oldest=min(steps), newest=None if has_unknown else max(steps))


def admission_of(group: GroupRecord | None) -> PublicationId | None:
    """The admission publication of a granted group; None for an external one, which the gate did not admit."""
    return group.admission_publication if group is not None and group.origin is Origin.DRAWN else None


class Masks:
    """Which tokens of a batch are masked, by the effective versions at this moment. `cut` is None if none are."""

    def __init__(self, run_tx: RunTransaction, cut: int | None) -> None:
        self._run_tx = run_tx
        self._cut = cut
        self._steps: dict[int, int] = {}

    def publications(self, group: GroupRecord) -> tuple[int, ...]:
        """The group's publications below the cut; -1 if its tokens of unknown publications are."""
        cut = self._cut
        if cut is None or group.oldest_version is None or group.oldest_version >= cut:
            return ()
        return tuple(
            number for number, version in self._versions(group).items() if version is not None and version < cut
        )

    def oldest_version(self, group: GroupRecord) -> int | None:
        """The effective version of the oldest trained token that is not masked."""
        cut, oldest = self._cut, group.oldest_version
        if cut is None or oldest is None or oldest >= cut:
            return oldest
        return min((v for v in self._versions(group).values() if v is not None and v >= cut), default=None)

    def _versions(self, group: GroupRecord) -> dict[int, int | None]:
        """The effective version of each publication; None for tokens of unknown versions."""
        admission = admission_of(group)
        return {
            number: self._step(admission if number == NOT_SAMPLED else PublicationId(number))
            for number in group.publications
        }

    def _step(self, publication: PublicationId | None) -> int | None:
        if publication is None:
            return None
        if publication not in self._steps:
            self._steps[publication] = find_publication(self._run_tx, publication).effective_step
        return self._steps[publication]


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
                versions = effective_versions(
                    run_tx, group.publications, group_id=group.group_id, admitted_at=admission_of(group)
                )
                run_tx.tx.groups.put(group.changed(oldest_version=versions.oldest, newest_version=versions.newest))
    return len(demoted)
