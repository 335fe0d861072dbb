"""What becomes of a group that was played: submitted, closed, or given back. Rules 5 to 7."""

import math
from collections.abc import Sequence
from typing import TypedDict

import msgspec

from rollbook.contracts.admission import Receipt
from rollbook.contracts.errors import RollbookError, RunError, TransientError
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupOutcome, GroupState
from rollbook.contracts.task import TaskId
from rollbook.ledger.records import GroupRecord, Origin
from rollbook.ledger.rules.book import RunBook
from rollbook.ledger.rules.gate import fail_attempt
from rollbook.ledger.rules.lineage import oldest_effective_version
from rollbook.ledger.rules.producers import find_producer
from rollbook.ledger.store import StoreFaultError

QUEUE_FULL_RETRY_S = 1.0


class QueueFullError(TransientError):
    """The queue holds as many groups as it may; try again once the trainer took some."""


class Submission(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A finished group. The payload stays closed: all the ledger needs to know stands beside it."""

    group_id: GroupId
    task_id: TaskId
    draw: int
    attempt: int
    publications: tuple[int, ...]
    """Behind the trained tokens; -1 stands for unknown."""
    outcome: GroupOutcome
    payload: bytes | memoryview
    payload_digest: str
    drop: DropReason | None = None
    producer: str | None = None
    """The registered producer it comes from, for a group that the gate did not grant."""


def submit(book: RunBook, submission: Submission, *, max_queued: int, max_queued_bytes: int | None = None) -> Receipt:
    """Store a group: the first one wins, whichever attempt it is, unless the group is settled."""
    group = book.tx.group(book.run_id, submission.group_id)
    return _submit(book, submission, group, max_queued, max_queued_bytes)


def _submit(
    book: RunBook,
    submission: Submission,
    group: GroupRecord | None,
    max_queued: int,
    max_queued_bytes: int | None,
) -> Receipt:
    if group is not None and group.state is GroupState.DROPPED:
        return Receipt.ALREADY_SETTLED
    if group is not None and group.state is not GroupState.DISPATCHED:
        return Receipt.ALREADY_STORED
    oldest = oldest_effective_version(book, submission.publications, group_id=submission.group_id)
    if group is None:
        _refuse_when_full(book, submission, max_queued, max_queued_bytes)
        if submission.producer is not None:
            find_producer(book, submission.producer)
        if book.is_over:
            group = _open_external(book, submission)
            book.drop(group, DropReason(DropKind.END_OF_RUN, "submitted after the end"), by="submit")
            return Receipt.ALREADY_SETTLED
        if submission.drop is None:
            _enter(book, submission, oldest)
            return Receipt.STORED
        group = _open_external(book, submission)
    by = group.owner or group.producer or "submit"
    book.tx.put_payload(book.run_id, submission.group_id, submission.payload, submission.payload_digest)
    stored = _stored(book, submission, oldest)
    if submission.drop is not None:
        book.drop(group, submission.drop, by=by, **stored)
    else:
        book.move(group, GroupState.QUEUED, note=f"attempt {submission.attempt} submitted", by=by, **stored)
    return Receipt.STORED


def submit_many(
    book: RunBook, submissions: Sequence[Submission], *, max_queued: int, max_queued_bytes: int | None = None
) -> list[Receipt | RollbookError]:
    """Several, each judged by itself: what `submit` raises it raises before anything of that group is written."""
    outcomes: list[Receipt | RollbookError] = []
    known = book.tx.known_groups(book.run_id, [submission.group_id for submission in submissions])
    seen: set[GroupId] = set()
    for submission in submissions:
        group_id = submission.group_id
        # A group that comes twice in one request is what became of it the first time.
        group = book.tx.group(book.run_id, group_id) if group_id in seen else known.get(group_id)
        seen.add(group_id)
        try:
            outcomes.append(_submit(book, submission, group, max_queued, max_queued_bytes))
        except StoreFaultError:
            raise
        except (RunError, TransientError) as error:
            outcomes.append(error)
    return outcomes


class _Stored(TypedDict):
    """What a submission writes on its group."""

    publications: tuple[int, ...]
    oldest_version: int | None
    outcome: bytes
    payload_digest: str
    payload_bytes: int
    has_payload: bool
    arrival: int


def _stored(book: RunBook, submission: Submission, oldest: int | None) -> _Stored:
    return _Stored(
        publications=submission.publications,
        oldest_version=oldest,
        outcome=msgspec.json.encode(submission.outcome),
        payload_digest=submission.payload_digest,
        payload_bytes=len(submission.payload),
        has_payload=True,
        arrival=book.count("next_arrival"),
    )


def _enter(book: RunBook, submission: Submission, oldest: int | None) -> None:
    """The usual way of a group from outside, and the busiest of all: opened and queued in one row."""
    book.tx.put_payload(book.run_id, submission.group_id, submission.payload, submission.payload_digest)
    group = GroupRecord(
        run_id=book.run_id,
        group_id=submission.group_id,
        task_id=submission.task_id,
        draw=submission.draw,
        position=None,
        origin=Origin.EXTERNAL,
        state=GroupState.QUEUED,
        opened_at=book.now,
        attempt=submission.attempt,
        admission_version=book.field("version"),
        admission_publication=book.field("publication"),
        producer=submission.producer,
        sequence=book.count("next_sequence"),
        **_stored(book, submission, oldest),
    )
    book.enter(group, note=f"attempt {submission.attempt} submitted", by=submission.producer or "submit")


def _refuse_when_full(book: RunBook, submission: Submission, max_queued: int, max_queued_bytes: int | None) -> None:
    # Groups of the gate are never refused here: under `wait` the one that is refused may be the one everybody waits for.
    num_queued, queued_bytes = book.number("num_queued"), book.number("queued_bytes")
    is_full = num_queued >= max_queued
    # An empty queue takes a group of any size: what is larger than the bound would otherwise be sent in vain for ever.
    if max_queued_bytes is not None and num_queued:
        is_full |= queued_bytes + len(submission.payload) > max_queued_bytes
    if is_full:
        raise QueueFullError(
            f"run {book.run_id}: {num_queued} groups are queued, {queued_bytes} bytes in all, no more is taken; "
            f"submit {submission.group_id} again later",
            retry_after_s=QUEUE_FULL_RETRY_S,
        )


def _open_external(book: RunBook, submission: Submission) -> GroupRecord:
    group = GroupRecord(
        run_id=book.run_id,
        group_id=submission.group_id,
        task_id=submission.task_id,
        draw=submission.draw,
        position=None,
        origin=Origin.EXTERNAL,
        state=GroupState.DISPATCHED,
        sequence=book.count("next_sequence"),
        opened_at=book.now,
        attempt=submission.attempt,
        admission_version=book.run.version,
        admission_publication=book.run.publication,
        producer=submission.producer,
    )
    book.begin(group, note="opened by its submission", by=submission.producer or "submit")
    return group


def drop_lost(book: RunBook) -> int:
    """After a start: a group whose tokens a power cut took is not trained, and says why. Returns how many.

    Batched groups are never among them: deciding a batch brings the tokens of its groups to the disk first.
    """
    num_lost = 0
    for group_id in book.tx.lost_payloads(book.run_id):
        group = book.tx.group(book.run_id, group_id)
        if group is None or not group.has_payload:
            continue
        if group.state is GroupState.QUEUED:
            shelved = book.tx.atropos.shelved(book.run_id, group_id)
            if shelved is not None:
                book.tx.atropos.take_shelved([shelved])
            book.tx.delete_payload(book.run_id, group_id)
            book.drop(group, DropReason(DropKind.LOST, "a power cut took its tokens"), by="start", has_payload=False)
            num_lost += 1
        elif group.state in (GroupState.DROPPED, GroupState.DURABLE):
            book.tx.delete_payload(book.run_id, group_id)
            book.tx.put_group(group.changed(has_payload=False))
    if num_lost:
        # A repeated post must not be answered for a group that is gone: it is stored anew.
        book.tx.atropos.forget_unanswered_before(book.run_id, math.inf)
    return num_lost


def close(book: RunBook, group_id: GroupId, reason: DropReason, *, outcome: GroupOutcome | None) -> Receipt:
    """Settle a group that will not be submitted."""
    group = book.group(group_id)
    if group.state is GroupState.DISPATCHED:
        told = {} if outcome is None else {"outcome": msgspec.json.encode(outcome)}
        book.drop(group, reason, by=group.owner or "close", **told)
        return Receipt.STORED
    return Receipt.ALREADY_SETTLED if group.state is GroupState.DROPPED else Receipt.ALREADY_STORED


def release(book: RunBook, group_id: GroupId, *, attempt: int, cause: str) -> None:
    """Give a group back for another attempt. Only the attempt in hand can be given back; an older one is gone already."""
    group = book.group(group_id)
    if group.state is GroupState.DISPATCHED and group.owner is not None and group.attempt == attempt:
        fail_attempt(book, group, DropReason(DropKind.ATTEMPTS, f"attempt {attempt}: {cause}"), by=group.owner)


def exhausted(book: RunBook) -> None:
    """The source has no further draw, and all were opened."""
    if not book.run.exhausted:
        book.change(exhausted=True)
        book.tx.announce(book.run_id)
