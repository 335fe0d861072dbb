"""The rows of the ledger as frozen records. Rules create them, stores keep them.

A group that is `dispatched` with an owner is *leased*; without one it is *waiting* for another attempt.
"""

from enum import StrEnum
from typing import Any, Self

import msgspec

from rollbook.contracts.admission import Action, ActionKind, MemberId, MemberRole, OwnerId, RunId, RunSettings
from rollbook.contracts.batch import AckReceipt, BatchManifest, EndOfRun, PassSplit
from rollbook.contracts.freshness import BatchPolicy, GateCounts
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.contracts.task import TaskId


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A msgspec struct, since one is created for every row read or written: a frozen dataclass takes five times as long."""

    def changed(self, **fields: Any) -> Self:
        """A copy with other values in some fields."""
        return msgspec.structs.replace(self, **fields)


class Origin(StrEnum):
    DRAWN = "drawn"
    """Granted by the gate."""
    EXTERNAL = "external"
    """Submitted without a grant; opened in the same transaction."""


class OwnerState(StrEnum):
    ALIVE = "alive"
    SILENT = "silent"
    """No heartbeat for too long. Its groups were given to others; it may become alive again."""
    SUPERSEDED = "superseded"
    """A newer owner has its name; its calls are refused."""


class MemberState(StrEnum):
    ALIVE = "alive"
    LEFT = "left"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    """A newer member has its role and name."""


class RunRecord(Record, frozen=True, kw_only=True):
    """A run's settings, its next numbers, its trainer's progress, and the number of groups in each state.

    The `num_*` counters change in the same transaction as the rows they count; the audit compares both.
    """

    run_id: RunId
    settings: RunSettings
    created_at: float
    next_sequence: int = 0
    next_arrival: int = 0
    next_publication: int = 0
    next_owner: int = 0
    next_member: int = 0
    opened_below: int = 0
    settled_below: int = 0
    exhausted: bool = False
    ended: EndOfRun | None = None
    epoch: int = 0
    restored_step: int = 0
    epoch_acknowledged: int = 0
    """Progress of the current trainer: its restored step, then the last step it acknowledged."""
    decided_at_takeover: int = 0
    last_decided: int = 0
    is_last_short: bool = False
    last_acknowledged: int = 0
    durable_step: int = 0
    payload_floor: int = 0
    """Payloads of batches up to this step are deleted."""
    version: int | None = None
    publication: PublicationId | None = None
    """The last one the current trainer confirmed; `version` is its step."""
    last_confirmed: PublicationId | None = None
    """The last one any trainer confirmed."""
    num_opened: int = 0
    num_leased: int = 0
    num_waiting: int = 0
    num_queued: int = 0
    queued_bytes: int = 0
    """Payload bytes of the queued groups."""
    num_batched: int = 0
    num_trained: int = 0
    num_durable: int = 0
    num_unusable: int = 0
    """Batched groups that the trainer could not train; they are counted as trained or durable too."""
    queued_samples: int = 0
    leased_samples: int = 0
    """Samples that the leased parts were opened for. Like those of waiting parts, only with policy `parts`."""
    waiting_samples: int = 0
    external_queued: int = 0
    """Those among the queued groups that the gate did not grant, and their samples."""
    external_queued_samples: int = 0
    expected_samples: int = 0
    """Samples of all groups that were opened: expected = leased + waiting + stored + missing. Only with policy `parts`."""
    stored_samples: int = 0
    next_action: int = 0
    is_paused: bool = False
    is_draining: bool = False
    is_drained: bool = False
    """The drain is complete. The run continues when it is created again."""
    checkpoint_requested: int | None = None
    """An operator requested a checkpoint of this step or a later one; None once there is one."""
    num_quarantined: int = 0
    """Tasks in quarantine now."""

    @property
    def counts(self) -> GateCounts:
        """In groups, or in samples with policy `parts`; without `aged`, which needs a query. External groups do not count."""
        if self.settings.rule.policy is BatchPolicy.PARTS:
            leased, waiting = self.leased_samples, self.waiting_samples
            queued = self.queued_samples - self.external_queued_samples
        else:
            leased, waiting, queued = self.num_leased, self.num_waiting, self.num_queued - self.external_queued
        return GateCounts(leased=leased, waiting=waiting, queued=queued, batches_decided=self.last_decided)

    @property
    def is_over(self) -> bool:
        """No more batches will be decided, so no group is granted."""
        max_steps = self.settings.rule.max_steps
        is_complete = max_steps is not None and self.last_decided >= max_steps
        return self.ended is not None or self.is_last_short or is_complete


class OwnerRecord(Record, frozen=True, kw_only=True):
    run_id: RunId
    owner_id: OwnerId
    name: str
    nonce: str
    state: OwnerState
    last_seen: float
    request_id: str | None = None
    """The last `open` request with grants, and its reply, which is sent again if the request is repeated."""
    reply: bytes | None = None


class MemberRecord(Record, frozen=True, kw_only=True):
    """The lease of a process. It is alive until it ends, and never again."""

    run_id: RunId
    member_id: MemberId
    name: str
    role: MemberRole
    node: str
    address: str
    nonce: str
    state: MemberState
    lease_s: float
    joined_at: float
    last_seen: float
    in_service: bool
    publication: int | None = None
    load: float = 0.0


class GroupRecord(Record, frozen=True, kw_only=True):
    """Everything about a group except its tokens. With policy `parts`, one record for each part.

    All parts of a group have its task, draw, position, origin and sequence.
    """

    run_id: RunId
    group_id: GroupId
    task_id: TaskId
    draw: int
    position: int | None
    """Position in the cursor's order; None for an external group."""
    origin: Origin
    state: GroupState
    sequence: int
    opened_at: float
    owner: OwnerId | None = None
    lease_until: float | None = None
    """Wall time; set while leased."""
    attempt: int = 0
    failures: int = 0
    admission_version: int | None = None
    admission_publication: PublicationId | None = None
    arrival: int | None = None
    publications: tuple[int, ...] = ()
    """Publications that sampled its trained tokens, read from its payload."""
    oldest_version: int | None = None
    """Effective version of its oldest trained token, updated while queued; None if the producer did not report it."""
    newest_version: int | None = None
    """Effective version of its newest trained token, updated while queued; None if an external producer left one out."""
    step: int | None = None
    drop_reason: str | None = None
    unusable: str | None = None
    """Why the trainer could not train it. It counts as trained, with weight 0."""
    outcome: bytes | None = None
    payload_digest: str | None = None
    payload_bytes: int = 0
    has_payload: bool = False
    release_step: int | None = None
    """The payload may be deleted when the oldest kept checkpoint has reached this step."""
    producer: str | None = None
    """The registered producer that submitted it; None for granted groups and for unregistered producers."""
    num_samples: int = 0
    """Samples of the payload."""
    part: int = 1
    expected_samples: int = 0
    """Samples that this part was opened for, only with policy `parts`. The next part is opened for what it lacks."""
    baseline: tuple[float, ...] | None = None
    """Rewards of the quorum: of part 1 from its submission on, of later parts from the start."""
    earlier: bytes | None = None
    """The merged outcome of all earlier parts."""


class ProducerRecord(Record, frozen=True, kw_only=True):
    """A registered producer of external groups, and its share of each batch."""

    run_id: RunId
    name: str
    weight: float
    min_share: float
    registered_at: float
    credit: float = 0.0
    """Groups that its weight entitles it to, minus those it got, after the last batch. Negative: it got more than its part."""
    num_batched: int = 0
    """Number of its groups in all batches so far."""


class MoveRecord(Record, frozen=True, kw_only=True):
    """One state change of a group. A new attempt is a move from dispatched to dispatched."""

    run_id: RunId
    group_id: GroupId
    at: float
    from_state: GroupState | None
    to_state: GroupState
    note: str
    by: str
    """The owner, trainer epoch or rule that caused it."""


class RunChanges(Record, frozen=True, kw_only=True):
    """A page of the changes of a run."""

    next: int
    """The number of the last move that was read. Continue after it."""
    is_complete: bool
    """There are no later moves yet."""
    groups: tuple[GroupRecord, ...]
    """In the order of their first change."""


class ActionRecord(Record, frozen=True, kw_only=True):
    """One action of an operator. Never changed."""

    run_id: RunId
    number: int
    kind: ActionKind
    author: str
    at: float
    target: str
    """A task, a group, or empty."""
    sample: int | None
    note: str
    nonce: str
    """The same in every retry of one request."""

    @property
    def contract(self) -> Action:
        return Action(
            number=self.number,
            kind=self.kind,
            author=self.author,
            at=self.at,
            target=self.target,
            sample=self.sample,
            note=self.note,
        )


class BatchRecord(Record, frozen=True, kw_only=True):
    run_id: RunId
    manifest: BatchManifest
    epoch: int
    decided_at: float


class StepRecord(Record, frozen=True, kw_only=True):
    """One acknowledgement. A replayed step has one for each epoch."""

    run_id: RunId
    step: int
    epoch: int
    digest: str
    receipt: AckReceipt
    at: float
    split: PassSplit | None = None
    """How the step was split into passes; None: its trainer reported none."""


class PublicationRecord(Record, frozen=True, kw_only=True):
    run_id: RunId
    id: PublicationId
    epoch: int
    step: int
    digest: str
    effective_step: int
    """The version its tokens count as: `step`, or less after it was demoted."""
    registered_at: float
    confirmed_at: float | None = None

    @property
    def contract(self) -> Publication:
        return Publication(id=self.id, epoch=self.epoch, step=self.step, digest=self.digest)
