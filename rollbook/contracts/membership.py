"""Members of a run: processes that hold a lease in the ledger, on one or several machines. Rule 19 of the protocol."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

MemberId = NewType("MemberId", str)

LEASE_S = 15.0
"""A member without a heartbeat for this long has left."""
BEATS_PER_LEASE = 4
"""Heartbeats in the time of a lease: one or two may be lost."""


class MemberRole(StrEnum):
    SUPERVISOR = "supervisor"
    """Exclusive: its lease is the lock of the run."""
    POLICY = "policy"
    ROLLOUT = "rollout"
    ENV = "env"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    id: MemberId
    """Never reused: a process that returns is a new member."""
    name: str
    role: MemberRole
    node: str
    """The machine."""
    address: str
    """URL of its server; empty if it has none."""
    joined_at: float
    last_seen: float
    publication: int | None = None
    """The weights that a policy server reported."""
    load: float = 0.0
    """Requests or groups in progress, as it reported."""
    in_service: bool = True
    """A policy server is in service once it has the newest confirmed publication, or a newer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReply:
    """Either the id of the new member, or the member that holds the exclusive role."""

    member: MemberId | None = None
    holder: Member | None = None
