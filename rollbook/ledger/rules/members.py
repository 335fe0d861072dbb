"""Members of a run: join, heartbeat, leave, expiry. docs/ledger-rules.md, rule 19.

A member's lease ends once and for all: when it leaves, when it sends no heartbeat in time, or when a newer member has its role and
name. Later requests of that member are refused; it may join again and is a new member then.
"""

from rollbook.contracts.admission import Member, MemberId, MemberReply, MemberRole
from rollbook.contracts.errors import FencedError, RunError
from rollbook.ledger.records import MemberRecord, MemberState, RunRecord
from rollbook.ledger.rules.run_transaction import RunTransaction

EXCLUSIVE = frozenset({MemberRole.SUPERVISOR})


def join(
    run_tx: RunTransaction, *, name: str, role: MemberRole, node: str, address: str, lease_s: float, nonce: str
) -> MemberReply:
    """The older member of this role and name is superseded. An exclusive role is refused while another name holds it.

    The nonce makes the request idempotent: a repetition returns the member that the first request created.
    """
    alive = run_tx.tx.members.alive(run_tx.run_id)
    for other in alive:
        if other.nonce == nonce:
            return MemberReply(member=other.member_id)
    for other in alive:
        if other.role is role and role in EXCLUSIVE and other.name != name:
            return MemberReply(holder=member_of(other))
    for other in alive:
        if other.role is role and other.name == name:
            _end(run_tx, other, MemberState.SUPERSEDED)
    member_id = MemberId(f"{role}#{run_tx.count('next_member')}")
    run_tx.tx.members.put(
        MemberRecord(
            run_id=run_tx.run_id,
            member_id=member_id,
            name=name,
            role=role,
            node=node,
            address=address,
            nonce=nonce,
            state=MemberState.ALIVE,
            lease_s=lease_s,
            joined_at=run_tx.now,
            last_seen=run_tx.now,
            in_service=_is_current(run_tx.run, role, None),
        )
    )
    run_tx.tx.announce(run_tx.run_id)
    return MemberReply(member=member_id)


def heartbeat(run_tx: RunTransaction, member_id: MemberId, *, publication: int | None, load: float) -> None:
    """Extend the lease. Raises `FencedError` if it has ended."""
    member = _find(run_tx, member_id)
    if member.state is not MemberState.ALIVE:
        raise FencedError(
            f"run {run_tx.run_id}: the lease of {member.name!r} ({member_id}) has ended: {member.state}; join again"
        )
    in_service = member.in_service or _is_current(run_tx.run, member.role, publication)
    run_tx.tx.members.put(
        member.changed(last_seen=run_tx.now, publication=publication, load=load, in_service=in_service)
    )


def leave(run_tx: RunTransaction, member_id: MemberId) -> None:
    member = _find(run_tx, member_id)
    if member.state is MemberState.ALIVE:
        _end(run_tx, member, MemberState.LEFT)


def expire(run_tx: RunTransaction) -> list[MemberRecord]:
    """End the leases of silent members. Returns these members."""
    silent = [m for m in run_tx.tx.members.alive(run_tx.run_id) if m.last_seen + m.lease_s <= run_tx.now]
    for member in silent:
        _end(run_tx, member, MemberState.EXPIRED)
    return silent


def extend_leases(run_tx: RunTransaction) -> None:
    """After a restart of the ledger: heartbeats could not arrive meanwhile."""
    for member in run_tx.tx.members.alive(run_tx.run_id):
        run_tx.tx.members.put(member.changed(last_seen=run_tx.now))


def member_of(record: MemberRecord) -> Member:
    return Member(
        id=record.member_id,
        name=record.name,
        role=record.role,
        node=record.node,
        address=record.address,
        joined_at=record.joined_at,
        last_seen=record.last_seen,
        publication=record.publication,
        load=record.load,
        in_service=record.in_service,
    )


def _is_current(run: RunRecord, role: MemberRole, publication: int | None) -> bool:
    """Whether a member may serve. A policy server without the newest confirmed publication would sample from old weights."""
    if role is not MemberRole.POLICY or run.last_confirmed is None:
        return True
    return publication is not None and publication >= run.last_confirmed


def _find(run_tx: RunTransaction, member_id: MemberId) -> MemberRecord:
    member = run_tx.tx.members.get(run_tx.run_id, member_id)
    if member is None:
        raise RunError(f"run {run_tx.run_id}: member {member_id} never joined; join first")
    return member


def _end(run_tx: RunTransaction, member: MemberRecord, state: MemberState) -> None:
    run_tx.tx.members.put(member.changed(state=state, last_seen=run_tx.now))
    run_tx.tx.announce(run_tx.run_id)
