"""What a dispatcher and the ledger say to each other: runs, grants, receipts, status."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from rollbook.contracts.freshness import FreshnessRule, GateCounts
from rollbook.contracts.group import GroupId, GroupOutcome, GroupState
from rollbook.contracts.policy import PublicationId
from rollbook.contracts.task import TaskId

RunId = NewType("RunId", str)
OwnerId = NewType("OwnerId", str)


class EndOfDataRule(StrEnum):
    SHORT_BATCH = "short_batch"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What the ledger must know of a run. P, policy and budget of a run never change; the rest may, on resume."""

    rule: FreshnessRule
    group_deadline_s: float = 600.0
    """A lease on a group ends after this; the group then gets another attempt."""
    max_attempts: int = 3
    owner_ttl_s: float = 30.0
    """A dispatcher that is silent for this long is gone; its groups get another attempt."""
    end_of_data: EndOfDataRule = EndOfDataRule.SHORT_BATCH
    keep_payloads: bool = True
    """Keep the tokens of durable groups. Otherwise they go once the oldest kept checkpoint covers them."""
    counts_sequences: bool = False
    """A batch has a number of sequences, in however many groups: the run is trained in the Atropos dialect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Permission to play one group. `deadline_s` counts from the moment of the grant."""

    group_id: GroupId
    task_id: TaskId
    draw: int
    position: int
    attempt: int
    sequence: int
    """Admission order within the run; kept over attempts."""
    admission_version: int
    """The policy version at admission (a step)."""
    admission_publication: PublicationId
    """Every policy request of this group asks for weights at least this new."""
    deadline_s: float


class GateState(StrEnum):
    OPEN = "open"
    FULL = "full"
    NO_POLICY = "no_policy"
    """No publication of the current trainer was confirmed yet."""
    ENDED = "ended"
    """The run is over: nothing will be granted again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReply:
    """Grants in order: groups that need another attempt first, then the accepted prefix of the proposed draws.

    `taken` counts how many of the proposed draws are settled by this reply (granted now, or known to the ledger from before).
    """

    grants: tuple[Grant, ...]
    taken: int
    gate: GateState
    capacity: int


class Receipt(StrEnum):
    STORED = "stored"
    ALREADY_STORED = "already_stored"
    ALREADY_SETTLED = "already_settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawProgress:
    """What the cursor is rebuilt from: which positions were opened and which of them are settled."""

    opened_below: int
    """Every position below this one was opened."""
    opened_beyond: tuple[int, ...] = ()
    """Opened positions above the first gap."""
    settled_below: int = 0
    """Every position below this one is settled: batched, trained, durable or dropped."""
    settled_beyond: tuple[int, ...] = ()
    exhausted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PastDraw:
    """A draw that the ledger opened, and what came of it so far: what a curriculum is rebuilt from."""

    group_id: GroupId
    task_id: TaskId
    number: int
    """Of the draw, within its task."""
    position: int | None
    """None for a group that somebody submitted unasked."""
    sequence: int
    state: GroupState
    outcome: GroupOutcome | None
    """None while it is played, and for one that was dropped without having been scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatus:
    """A run at a glance. Answered without scanning history."""

    run_id: RunId
    gate: GateState
    capacity: int
    counts: GateCounts
    opened: int
    by_state: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Dropped groups by kind."""
    queued_bytes: int = 0
    """Payloads of the queued groups."""
    version: int | None = None
    """Step of the last publication the current trainer confirmed."""
    publication: int | None = None
    epoch: int = 0
    acknowledged_step: int = 0
    durable_step: int = 0
    exhausted: bool = False
    ended: bool = False
