"""Values exchanged between the processes of a run and the ledger: run settings, grants, receipts, progress, status, members,
actions of operators."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from rollbook.contracts.freshness import FreshnessRule, GateCounts
from rollbook.contracts.group import GroupId, GroupOutcome, GroupState
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.contracts.policy import PublicationId
from rollbook.contracts.task import TaskId

RunId = NewType("RunId", str)
OwnerId = NewType("OwnerId", str)
MemberId = NewType("MemberId", str)

LEASE_S = 15.0
"""A member without a heartbeat for this long has left."""
BEATS_PER_LEASE = 4
"""Heartbeats in the time of a lease: one or two may be lost."""


class EndOfDataRule(StrEnum):
    SHORT_BATCH = "short_batch"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run in the ledger. Groups per step, batch policy, staleness bound, its share for admission, and limits never
    change; the rest may, on resume."""

    rule: FreshnessRule
    limits: TrainingLimits = field(default_factory=TrainingLimits)
    """Groups outside of them are refused. A run that was created without limits may get them on resume."""
    group_deadline_s: float = 600.0
    """The lease on a group expires after this time; then the group gets another attempt."""
    max_attempts: int = 3
    owner_ttl_s: float = 30.0
    """A dispatcher without a heartbeat for this long counts as dead; its groups get another attempt."""
    end_of_data: EndOfDataRule = EndOfDataRule.SHORT_BATCH
    keep_payloads: bool = True
    """Keep the payloads of durable groups. Otherwise they are deleted once the oldest kept checkpoint covers them."""
    counts_sequences: bool = False
    """A batch has a fixed number of sequences instead of groups (a run trained through the Atropos API)."""
    directory_id: str = ""
    """The id of the run directory. In a ledger of several runs, another directory cannot continue the run by having its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPart:
    """What a group lacks: the part that is played or expected next. Only with batch policy `parts` a group has more than one."""

    group_id: GroupId
    """The id of the part: that of the group for part 1, then `g/2`, `g/3`, …"""
    number: int = 1
    num_samples: int | None = None
    """The samples that the group lacks. The part may have fewer, and then another part follows. None: the group is one part, of as
    many samples as its dispatcher plays."""
    baseline: tuple[float, ...] | None = None
    """The rewards of the quorum, for every part after the first."""
    outcome: GroupOutcome | None = None
    """The merged outcome of all earlier parts."""

    @property
    def units(self) -> int:
        """What the gate counts for it: `FreshnessRule.unit` for part 1, and the samples that are left for later ones."""
        return 1 if self.num_samples is None else self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Permission to play what a group lacks: the whole group, or the rest of one. `deadline_s` counts from the grant."""

    group_id: GroupId
    """The id to submit, close and release: that of the open part."""
    task_id: TaskId
    draw: int
    position: int
    attempt: int
    sequence: int
    """Admission order within the run; the same for all attempts."""
    admission_version: int
    """The policy version (a step) at admission."""
    admission_publication: PublicationId
    """Minimum publication for every policy request of this group."""
    deadline_s: float
    part: OpenPart


class GateState(StrEnum):
    OPEN = "open"
    FULL = "full"
    NO_POLICY = "no_policy"
    """The current trainer has not confirmed a publication yet."""
    PAUSED = "paused"
    """An operator paused admission."""
    DRAINING = "draining"
    """An operator drains the run: groups that were admitted get more attempts, new ones are not admitted."""
    ENDED = "ended"
    """The run is over; there will be no more grants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReply:
    """Grants in order: first groups that need another attempt, then the accepted prefix of the proposed draws.

    `taken` is the number of proposed draws that the ledger now knows (granted by this reply or opened before).
    """

    grants: tuple[Grant, ...]
    taken: int
    gate: GateState
    capacity: int
    quarantined: int = 0
    """Taken draws that were dropped because their task is in quarantine."""


class Receipt(StrEnum):
    STORED = "stored"
    ALREADY_STORED = "already_stored"
    ALREADY_SETTLED = "already_settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReceipt:
    """The reply to the submission of a part; a whole group is one part."""

    receipt: Receipt
    next_part: OpenPart | None = None
    """The open part of the group now, whichever attempt submitted the one before. None: the group lacks no sample or was closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawProgress:
    """Which positions of the cursor were opened and which of them are settled. The cursor is rebuilt from it."""

    opened_below: int
    """All positions below this one were opened."""
    opened_beyond: tuple[int, ...] = ()
    """Opened positions above the first gap."""
    settled_below: int = 0
    """All positions below this one are settled: batched, trained, durable or dropped."""
    settled_beyond: tuple[int, ...] = ()
    exhausted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PastDraw:
    """A draw that the ledger opened, with its state. A curriculum is rebuilt from these."""

    group_id: GroupId
    task_id: TaskId
    number: int
    """Number of the draw within its task."""
    position: int | None
    """None for a group of an external producer."""
    sequence: int
    state: GroupState
    outcome: GroupOutcome | None
    """None while the group is played, and if it was dropped without an outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCounts:
    """The conservation law of samples with batch policy `parts`: expected = open + stored + missing."""

    expected: int
    """Samples of all groups that were opened."""
    open: int
    """Samples of parts that are being played or need another attempt."""
    stored: int
    """Samples that were submitted, whatever became of their parts."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """Samples that will not come, by the kind of drop of their part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatus:
    """Summary of a run, computed without scanning its history."""

    run_id: RunId
    gate: GateState
    capacity: int
    counts: GateCounts
    opened: int
    by_state: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of dropped groups by kind."""
    queued_bytes: int = 0
    """Total payload size of the queued groups."""
    version: int | None = None
    """Step of the last publication that the current trainer confirmed."""
    publication: int | None = None
    epoch: int = 0
    acknowledged_step: int = 0
    durable_step: int = 0
    unusable: int = 0
    """Number of batched groups that the trainer could not train. They count as trained, with weight 0."""
    samples: SampleCounts | None = None
    """Only with batch policy `parts`."""
    exhausted: bool = False
    ended: bool = False
    checkpoint_requested: int | None = None
    """An operator requested a checkpoint of this step or a later one."""
    quarantined: tuple[str, ...] = ()
    """Tasks that an operator has quarantined."""
    actions: int = 0
    """Number of actions of operators so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What an audit of a run found."""

    run_id: RunId
    opened: int
    law: Mapping[str, int]
    """Groups by state."""
    dropped: Mapping[str, int]
    """Dropped groups by kind."""
    steps: int
    """Trained steps."""
    max_lag: int | None
    max_head_offpolicy_versions: int
    samples: SampleCounts | None = None
    """The law of samples, only with policy `parts`."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Sequences of scored samples that a setting leaves out of training, by reason. Their tokens are stored."""
    violations: tuple[str, ...] = ()
    """One sentence for each. Empty: the records are consistent."""
    known: int = 0
    """Durable and dropped groups that an earlier audit has checked. Their records were not read again."""
    known_at: float | None = None
    """When that audit ran, as Unix time."""

    @property
    def ok(self) -> bool:
        return not self.violations


class MemberRole(StrEnum):
    """Processes that hold a lease in the ledger, on one or several machines. docs/ledger-rules.md, rule 19."""

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
    """A policy server is in service once it has reported the newest confirmed publication, or a newer one, and then until its lease
    ends. A request carries the publication that it needs at least, so a server that falls behind does not serve it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReply:
    """Either the id of the new member, or the member that holds the exclusive role."""

    member: MemberId | None = None
    holder: Member | None = None


class ActionKind(StrEnum):
    PAUSE = "pause"
    """No group starts until `resume`. Groups that are being played finish, and full batches are trained."""
    RESUME = "resume"
    """Ends a pause or a drain."""
    DRAIN = "drain"
    """No new draw starts. When the groups in flight are settled and no full batch is left, the run stops with a checkpoint."""
    DRAINED = "drained"
    """The supervisor found the drain complete and stops the run."""
    CHECKPOINT = "checkpoint"
    """The trainer writes a checkpoint of the last acknowledged step, or a later one."""
    QUARANTINE = "quarantine"
    """The open groups of a task are dropped, and so are its later draws."""
    READMIT = "readmit"
    """Ends the quarantine of a task."""
    ANNOTATE = "annotate"
    """A note about a group or one of its samples. Changes nothing else."""


NEEDS_TASK = frozenset({ActionKind.QUARANTINE, ActionKind.READMIT})
MAX_NOTE = 10_000
MAX_AUTHOR = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    number: int
    """Actions of a run are numbered from 0."""
    kind: ActionKind
    author: str
    at: float
    """Unix time."""
    target: str = ""
    """The task of a quarantine, the group of a note; empty for other actions."""
    sample: int | None = None
    """A note about one sample of the group, from 0."""
    note: str = ""
