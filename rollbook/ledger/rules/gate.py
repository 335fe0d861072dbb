"""Dispatchers and the gate: who may play which group, and what happens when they fall silent. Rules 4, 7 and 8."""

from collections.abc import Sequence
from typing import TypedDict

import msgspec

from rollbook.contracts.admission import GateState, Grant, OpenReply, OwnerId
from rollbook.contracts.errors import FencedError, RunError
from rollbook.contracts.group import DropKind, DropReason, GroupState, group_id
from rollbook.contracts.policy import PublicationId
from rollbook.contracts.task import Draw
from rollbook.ledger.records import GroupRecord, Origin, OwnerRecord, OwnerState
from rollbook.ledger.rules.book import RunBook
from rollbook.ledger.rules.runs import gate_of

TOUCH_FRACTION = 0.25
"""An owner's sign of life is written once this part of its time-to-live has passed: a write for each poll would buy nothing."""


class _Lease(TypedDict):
    """What a grant writes on a group, at the first attempt and at every later one."""

    owner: OwnerId
    lease_until: float
    admission_version: int | None
    admission_publication: PublicationId | None


def join(book: RunBook, name: str, nonce: str) -> OwnerId:
    """Become a dispatcher. The older owner of that name is superseded and its groups wait for another attempt.

    The nonce makes a repeated request harmless: it finds the owner that the first one made.
    """
    for older in book.tx.owners_named(book.run_id, name):
        if older.nonce == nonce:
            return _greet(book, older).owner_id
    for older in book.tx.owners_named(book.run_id, name):
        if older.state is not OwnerState.SUPERSEDED:
            book.tx.put_owner(older.changed(state=OwnerState.SUPERSEDED, reply=None, request_id=None))
            _take_back(book, older, note=f"dispatcher {older.owner_id} was superseded")
    owner_id = OwnerId(f"{name}#{book.count('next_owner')}")
    book.tx.put_owner(
        OwnerRecord(
            run_id=book.run_id,
            owner_id=owner_id,
            name=name,
            nonce=nonce,
            state=OwnerState.ALIVE,
            last_seen=book.now,
        )
    )
    return owner_id


def heartbeat(book: RunBook, owner_id: OwnerId) -> None:
    _hear(book, owner_id)


def open_groups(book: RunBook, owner_id: OwnerId, draws: Sequence[Draw], *, limit: int, request_id: str) -> OpenReply:
    """Grant up to `limit` groups: those that need another attempt first, then new ones while the gate has room."""
    owner = _hear(book, owner_id)
    if owner.request_id == request_id and owner.reply is not None:
        return msgspec.msgpack.decode(owner.reply, type=OpenReply)
    grants: list[Grant] = []
    gate, _ = gate_of(book.run)
    if gate in (GateState.OPEN, GateState.FULL):
        rule = book.run.settings.rule
        again = min(limit, rule.retry_capacity(book.run.counts))
        grants += [_attempt_again(book, owner, group) for group in book.tx.waiting(book.run_id, again)]
    taken = 0
    for draw in draws:
        if book.tx.group(book.run_id, group_id(draw.task_id, draw.number)) is None:
            if len(grants) >= limit or gate_of(book.run)[1] < 1:
                break
            grants.append(_grant_new(book, owner, draw))
        taken += 1
    gate, capacity = gate_of(book.run)
    reply = OpenReply(grants=tuple(grants), taken=taken, gate=gate, capacity=capacity)
    if grants:
        # A repeat of this request, its answer lost on the way, must find these grants again: nobody else would play them.
        book.tx.put_owner(owner.changed(request_id=request_id, reply=msgspec.msgpack.encode(reply)))
    return reply


def expire(book: RunBook) -> int:
    """Take back what silent owners and ended leases hold. Returns how many groups moved."""
    moved = 0
    until = book.now - book.run.settings.owner_ttl_s
    for owner in book.tx.owners_alive(book.run_id):
        if owner.last_seen <= until:
            book.tx.put_owner(owner.changed(state=OwnerState.SILENT))
            moved += _take_back(book, owner, note=f"dispatcher {owner.owner_id} fell silent")
    for group in book.tx.leases_ending_by(book.run_id, book.now):
        fail_attempt(
            book, group, DropReason(DropKind.TIMEOUT, f"attempt {group.attempt} passed its deadline"), by="expiry"
        )
        moved += 1
    return moved


def grace(book: RunBook) -> None:
    """After a restart: nobody could be heard meanwhile, so owners and leases get at least one time-to-live from now."""
    ttl = book.run.settings.owner_ttl_s
    for owner in book.tx.owners_alive(book.run_id):
        book.tx.put_owner(owner.changed(last_seen=book.now))
    for group in book.tx.leases_ending_by(book.run_id, book.now + ttl):
        book.tx.put_group(group.changed(lease_until=book.now + ttl))


def fail_attempt(book: RunBook, group: GroupRecord, reason: DropReason, *, by: str) -> GroupRecord:
    """An attempt failed: another one, or, after the last, the end of the group for `reason`."""
    failures = group.failures + 1
    if failures >= book.run.settings.max_attempts:
        return book.drop(group, reason, by=by, failures=failures)
    return book.move(
        group, GroupState.DISPATCHED, note=str(reason), by=by, owner=None, lease_until=None, failures=failures
    )


def _hear(book: RunBook, owner_id: OwnerId) -> OwnerRecord:
    owner = book.tx.owner(book.run_id, owner_id)
    if owner is None:
        raise RunError(f"run {book.run_id}: dispatcher {owner_id} never joined; join first")
    return _greet(book, owner)


def _greet(book: RunBook, owner: OwnerRecord) -> OwnerRecord:
    """Note a sign of life. One that was silent is welcome again, without the groups that others got meanwhile."""
    if owner.state is OwnerState.SUPERSEDED:
        raise FencedError(
            f"run {book.run_id}: dispatcher {owner.owner_id} was superseded by a newer one named {owner.name!r}; it must stop"
        )
    age = book.now - owner.last_seen
    if owner.state is OwnerState.ALIVE and age < TOUCH_FRACTION * book.run.settings.owner_ttl_s:
        return owner
    seen = owner.changed(state=OwnerState.ALIVE, last_seen=book.now)
    book.tx.put_owner(seen)
    return seen


def _take_back(book: RunBook, owner: OwnerRecord, *, note: str) -> int:
    """Losing its owner is no failure of the group: it keeps its place in the gate and waits for another attempt."""
    leased = book.tx.leased_by(book.run_id, owner.owner_id)
    for group in leased:
        book.move(group, GroupState.DISPATCHED, note=note, by="gate", owner=None, lease_until=None)
    return len(leased)


def _attempt_again(book: RunBook, owner: OwnerRecord, group: GroupRecord) -> Grant:
    attempt = group.attempt + 1
    leased = book.move(
        group,
        GroupState.DISPATCHED,
        note=f"attempt {attempt}",
        by=owner.owner_id,
        attempt=attempt,
        **_lease(book, owner),
    )
    return _grant(book, leased)


def _grant_new(book: RunBook, owner: OwnerRecord, draw: Draw) -> Grant:
    if book.run.exhausted:
        book.change(exhausted=False)
    group = GroupRecord(
        run_id=book.run_id,
        group_id=group_id(draw.task_id, draw.number),
        task_id=draw.task_id,
        draw=draw.number,
        position=draw.position,
        origin=Origin.DRAWN,
        state=GroupState.DISPATCHED,
        sequence=book.count("next_sequence"),
        opened_at=book.now,
        attempt=1,
        **_lease(book, owner),
    )
    book.begin(group, note=f"opened at version {book.run.version}", by=owner.owner_id)
    return _grant(book, group)


def _lease(book: RunBook, owner: OwnerRecord) -> _Lease:
    return _Lease(
        owner=owner.owner_id,
        lease_until=book.now + book.run.settings.group_deadline_s,
        admission_version=book.run.version,
        admission_publication=book.run.publication,
    )


def _grant(book: RunBook, group: GroupRecord) -> Grant:
    return Grant(
        group_id=group.group_id,
        task_id=group.task_id,
        draw=group.draw,
        position=group.position if group.position is not None else -1,
        attempt=group.attempt,
        sequence=group.sequence,
        admission_version=group.admission_version or 0,
        admission_publication=group.admission_publication or PublicationId(0),
        deadline_s=book.run.settings.group_deadline_s,
    )
