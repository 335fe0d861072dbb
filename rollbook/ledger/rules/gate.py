"""The gate: dispatchers join, get groups to play, and lose them when they stop sending heartbeats.

See docs/ledger-rules.md, rules 4, 7 and 8.
"""

import math
from collections.abc import Sequence
from typing import TypedDict

import msgspec

from rollbook.contracts.admission import Grant, OpenReply, OwnerId
from rollbook.contracts.decoding import msgpack_decoder
from rollbook.contracts.errors import FencedError, RunError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import DropKind, DropReason, GroupState, group_id
from rollbook.contracts.policy import PublicationId
from rollbook.contracts.task import Draw
from rollbook.ledger.records import GroupRecord, Origin, OwnerRecord, OwnerState
from rollbook.ledger.rules.parts import open_part
from rollbook.ledger.rules.run_transaction import RunTransaction
from rollbook.ledger.rules.runs import count_aged, gate_of

TOUCH_FRACTION = 0.25
"""`last_seen` is written once this part of an owner's time-to-live has passed, to save a write for each poll."""
DRAWS_PER_READ = 16


class _Lease(TypedDict):
    """The fields that a grant sets, at every attempt."""

    owner: OwnerId
    lease_until: float
    admission_version: int | None
    admission_publication: PublicationId | None


def join(run_tx: RunTransaction, name: str, nonce: str) -> OwnerId:
    """Register a dispatcher. The older owner of that name is superseded, and its groups wait for another attempt.

    The nonce makes the request idempotent: a repetition returns the owner that the first request created.
    """
    for older in run_tx.tx.owners.named(run_tx.run_id, name):
        if older.nonce == nonce:
            return _touch(run_tx, older).owner_id
    for older in run_tx.tx.owners.named(run_tx.run_id, name):
        if older.state is not OwnerState.SUPERSEDED:
            run_tx.tx.owners.put(older.changed(state=OwnerState.SUPERSEDED, reply=None, request_id=None))
            _revoke_leases(run_tx, older, note=f"dispatcher {older.owner_id} was superseded")
    owner_id = OwnerId(f"{name}#{run_tx.count('next_owner')}")
    run_tx.tx.owners.put(
        OwnerRecord(
            run_id=run_tx.run_id,
            owner_id=owner_id,
            name=name,
            nonce=nonce,
            state=OwnerState.ALIVE,
            last_seen=run_tx.now,
        )
    )
    return owner_id


def heartbeat(run_tx: RunTransaction, owner_id: OwnerId) -> None:
    _touch(run_tx, _find_owner(run_tx, owner_id))


def open_groups(
    run_tx: RunTransaction, owner_id: OwnerId, draws: Sequence[Draw], *, limit: int, request_id: str
) -> OpenReply:
    """Grant up to `limit` groups: those that need another attempt first, then new ones while the gate has capacity."""
    owner = _touch(run_tx, _find_owner(run_tx, owner_id))
    if owner.request_id == request_id and owner.reply is not None:
        return msgpack_decoder(OpenReply).decode(owner.reply)
    grants = _grant_again(run_tx, owner, limit)
    # Groups that were just granted have the current version, so this number stays the same below.
    aged = count_aged(run_tx.tx, run_tx.run)
    quarantined = run_tx.tx.actions.quarantined(run_tx.run_id) if run_tx.run.num_quarantined else frozenset()
    taken = num_dropped = 0
    for number, draw in enumerate(draws):
        if number % DRAWS_PER_READ == 0:
            # One query for several draws: each `get` of them is answered from memory.
            some = draws[number : number + DRAWS_PER_READ]
            run_tx.tx.groups.find(run_tx.run_id, [group_id(each.task_id, each.number) for each in some])
        if run_tx.tx.groups.get(run_tx.run_id, group_id(draw.task_id, draw.number)) is None:
            if len(grants) >= limit or gate_of(run_tx.run, aged=aged)[1] < 1:
                break
            group = _open_new(run_tx, owner, draw)
            if draw.task_id in quarantined:
                run_tx.drop(group, DropReason(DropKind.QUARANTINED), by="gate")
                num_dropped += 1
            else:
                grants.append(_grant(run_tx, group))
        taken += 1
    gate, capacity = gate_of(run_tx.run, aged=aged)
    reply = OpenReply(grants=tuple(grants), taken=taken, gate=gate, capacity=capacity, quarantined=num_dropped)
    if grants:
        # If the response is lost, a repetition of this request must return the same grants.
        run_tx.tx.owners.put(owner.changed(request_id=request_id, reply=msgspec.msgpack.encode(reply)))
    return reply


def expire(run_tx: RunTransaction) -> int:
    """Revoke the leases of silent owners and the leases that have ended. Returns the number of groups moved."""
    moved = 0
    until = run_tx.now - run_tx.run.settings.owner_ttl_s
    for owner in run_tx.tx.owners.alive(run_tx.run_id):
        if owner.last_seen <= until:
            # Its last grants are revoked, so a repetition of that request must not return them.
            run_tx.tx.owners.put(owner.changed(state=OwnerState.SILENT, reply=None, request_id=None))
            moved += _revoke_leases(run_tx, owner, note=f"dispatcher {owner.owner_id} timed out")
    for group in run_tx.tx.groups.leases_ending_by(run_tx.run_id, run_tx.now):
        fail_attempt(
            run_tx, group, DropReason(DropKind.TIMEOUT, f"attempt {group.attempt} passed its deadline"), by="expiry"
        )
        moved += 1
    return moved


def extend_leases(run_tx: RunTransaction) -> None:
    """After a restart: heartbeats could not arrive meanwhile, so owners and leases get at least one time-to-live from now.

    A lease that ends later than a new one would was written before the clock was set back: it gets the length of a new one.
    """
    settings = run_tx.run.settings
    shortest = run_tx.now + settings.owner_ttl_s
    longest = max(shortest, run_tx.now + settings.group_deadline_s)
    for owner in run_tx.tx.owners.alive(run_tx.run_id):
        run_tx.tx.owners.put(owner.changed(last_seen=run_tx.now))
    for group in run_tx.tx.groups.leases_ending_by(run_tx.run_id, math.inf):
        assert group.lease_until is not None  # only leased groups are listed
        lease_until = min(max(group.lease_until, shortest), longest)
        if lease_until != group.lease_until:
            run_tx.tx.groups.put(group.changed(lease_until=lease_until))


def fail_attempt(run_tx: RunTransaction, group: GroupRecord, reason: DropReason, *, by: str) -> GroupRecord:
    """Count a failed attempt. The group waits for another attempt, or is dropped for `reason` after the last one."""
    failures = group.failures + 1
    if failures >= run_tx.run.settings.max_attempts:
        return run_tx.drop(group, reason, by=by, failures=failures)
    return run_tx.move(
        group, GroupState.DISPATCHED, note=str(reason), by=by, owner=None, lease_until=None, failures=failures
    )


def _find_owner(run_tx: RunTransaction, owner_id: OwnerId) -> OwnerRecord:
    owner = run_tx.tx.owners.get(run_tx.run_id, owner_id)
    if owner is None:
        raise RunError(f"run {run_tx.run_id}: dispatcher {owner_id} never joined; join first")
    return owner


def _touch(run_tx: RunTransaction, owner: OwnerRecord) -> OwnerRecord:
    """Record that the owner is alive. A silent owner becomes alive again, without its former groups."""
    if owner.state is OwnerState.SUPERSEDED:
        raise FencedError(
            f"run {run_tx.run_id}: dispatcher {owner.owner_id} was superseded by a newer one named {owner.name!r}; it must stop"
        )
    age = run_tx.now - owner.last_seen
    if owner.state is OwnerState.ALIVE and age < TOUCH_FRACTION * run_tx.run.settings.owner_ttl_s:
        return owner
    seen = owner.changed(state=OwnerState.ALIVE, last_seen=run_tx.now)
    run_tx.tx.owners.put(seen)
    return seen


def _revoke_leases(run_tx: RunTransaction, owner: OwnerRecord, *, note: str) -> int:
    """The loss of its owner does not count as a failed attempt: the group waits for another one."""
    leased = run_tx.tx.groups.leased_by(run_tx.run_id, owner.owner_id)
    for group in leased:
        run_tx.move(group, GroupState.DISPATCHED, note=note, by="gate", owner=None, lease_until=None)
    return len(leased)


def _grant_again(run_tx: RunTransaction, owner: OwnerRecord, limit: int) -> list[Grant]:
    """Grant waiting groups. They are admitted already and only need a slot."""
    run = run_tx.run
    if not run.num_waiting or run.is_over or run.version is None or run.is_paused or run.is_drained:
        return []
    room = run.settings.rule.retry_capacity(run.counts)
    grants: list[Grant] = []
    for group in run_tx.tx.groups.waiting(run_tx.run_id, min(limit, room)):
        room -= group.expected_samples or 1
        if room < 0:
            break
        grants.append(_attempt_again(run_tx, owner, group))
    return grants


def _attempt_again(run_tx: RunTransaction, owner: OwnerRecord, group: GroupRecord) -> Grant:
    attempt = group.attempt + 1
    leased = run_tx.move(
        group,
        GroupState.DISPATCHED,
        note=f"attempt {attempt}",
        by=owner.owner_id,
        attempt=attempt,
        **_lease(run_tx, owner),
    )
    return _grant(run_tx, leased)


def _open_new(run_tx: RunTransaction, owner: OwnerRecord, draw: Draw) -> GroupRecord:
    rule = run_tx.run.settings.rule
    if run_tx.run.exhausted:
        run_tx.change(exhausted=False)
    group = GroupRecord(
        run_id=run_tx.run_id,
        group_id=group_id(draw.task_id, draw.number),
        task_id=draw.task_id,
        draw=draw.number,
        position=draw.position,
        origin=Origin.DRAWN,
        state=GroupState.DISPATCHED,
        sequence=run_tx.count("next_sequence"),
        opened_at=run_tx.now,
        attempt=1,
        expected_samples=rule.samples_per_group if rule.policy is BatchPolicy.PARTS else 0,
        **_lease(run_tx, owner),
    )
    run_tx.open(group, note=f"opened at version {run_tx.run.version}", by=owner.owner_id)
    return group


def _lease(run_tx: RunTransaction, owner: OwnerRecord) -> _Lease:
    return _Lease(
        owner=owner.owner_id,
        lease_until=run_tx.now + run_tx.run.settings.group_deadline_s,
        admission_version=run_tx.run.version,
        admission_publication=run_tx.run.publication,
    )


def _grant(run_tx: RunTransaction, group: GroupRecord) -> Grant:
    return Grant(
        group_id=group.group_id,
        task_id=group.task_id,
        draw=group.draw,
        position=group.position if group.position is not None else -1,
        attempt=group.attempt,
        sequence=group.sequence,
        admission_version=group.admission_version or 0,
        admission_publication=group.admission_publication or PublicationId(0),
        deadline_s=run_tx.run.settings.group_deadline_s,
        part=open_part(group),
    )
