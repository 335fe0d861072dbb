"""Messages between the ledger's server and its clients: one struct per request and response, MessagePack or JSON.

Types of `contracts` are sent as they are. A group travels as an encoded frame, which the ledger checks and stores as it is, next to
the fields that the ledger needs. Values that no store can keep (integers beyond 53 bits, NaN and infinity, texts with zero bytes)
are rejected here.
"""

import math
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from rollbook.contracts.admission import (
    LEASE_S,
    MAX_AUTHOR,
    MAX_NOTE,
    ActionKind,
    MemberRole,
    OpenPart,
    Receipt,
    RunSettings,
    SampleCounts,
)
from rollbook.contracts.batch import AckReceipt, BatchManifest, EndOfRun
from rollbook.contracts.group import GroupOutcome, GroupState
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import Draw

CONTENT_TYPE = "application/msgpack"
JSON_CONTENT_TYPE = "application/json"
FRAME_HEADER_BYTES = 8
"""Payloads are streamed one after the other, each preceded by its length as a big-endian integer of this size."""
LARGEST = 2**53 - 1
"""The largest integer that every store, and every JSON parser, keeps exactly."""
MAX_WAIT_S = 60.0
"""Longest long-poll, below the idle limits of common proxies. A longer `wait_s` is allowed and answered after this time."""
MAX_GROUPS = 256
"""Groups in one `submit_many` request."""
MAX_LISTED = 1_000
"""Groups or outcomes in one response."""

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
PublicationOrUnknown = Annotated[int, msgspec.Meta(ge=-1, le=LARGEST)]
"""A publication id; -1 means unknown."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=10_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages. Unknown fields are rejected, so that a misspelt field is not ignored."""


_NUMBER = (int, float)  # made once: this runs for every number of every submitted group


def _reject_unstorable(what: str, *values: Any) -> None:
    """Raises `ValueError` for integers beyond 53 bits, floats that are not finite and texts with zero bytes."""
    for value in values:
        # The common case first. NaN fails both comparisons.
        if value is None or (isinstance(value, _NUMBER) and -LARGEST <= value <= LARGEST):
            continue
        if isinstance(value, str) and "\x00" in value:
            raise ValueError(f"{what}: a text contains a zero byte")
        if isinstance(value, int):
            raise ValueError(f"{what}: {value} has more than 53 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{what}: {value} is not a finite number")


_OUTCOME_NUMBERS = attrgetter(
    *(name for name in GroupOutcome.__dataclass_fields__ if name not in {"invalid_causes", "samples"})
)


def _reject_unstorable_outcome(outcome: GroupOutcome) -> None:
    _reject_unstorable("outcome", *_OUTCOME_NUMBERS(outcome))
    if outcome.invalid_causes:
        _reject_unstorable("outcome", *outcome.invalid_causes, *outcome.invalid_causes.values())
    if outcome.samples:
        if len(outcome.samples) != outcome.num_samples:
            raise ValueError(f"outcome: {len(outcome.samples)} of {outcome.num_samples} samples are described")
        _reject_unstorable("outcome", *chain.from_iterable(outcome.samples))


class ErrorReply(Message, frozen=True, kw_only=True):
    kind: str
    message: str


class CreateRun(Message, frozen=True, kw_only=True):
    settings: RunSettings

    def __post_init__(self) -> None:
        settings, rule = self.settings, self.settings.rule
        spans = (settings.group_deadline_s, settings.owner_ttl_s)
        _reject_unstorable("settings", *spans, settings.max_attempts, settings.directory_id)
        _reject_unstorable(
            "settings", rule.groups_per_step, rule.max_in_flight, rule.max_head_offpolicy_versions, rule.max_steps
        )
        _reject_unstorable("settings", rule.samples_per_group, rule.batch_size, rule.max_in_flight * rule.unit)
        if min(spans) <= 0 or settings.max_attempts < 1:
            raise ValueError("settings: group_deadline_s and owner_ttl_s must be > 0, max_attempts must be >= 1")
        _reject_unstorable("settings", settings.limits.vocabulary_size, settings.limits.max_tokens)
        if rule.max_steps is not None and rule.max_steps < 0:
            raise ValueError(f"settings: max_steps is {rule.max_steps}; it must be >= 0")


class JoinMember(Message, frozen=True, kw_only=True):
    name: Name
    """An older member of the same role and name is superseded."""
    role: MemberRole
    node: Name
    """The machine, for people."""
    address: Annotated[str, msgspec.Meta(max_length=512)] = ""
    """URL of the member's server."""
    lease_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = LEASE_S
    """The lease ends after this time without a heartbeat."""
    nonce: Name
    """The same in every retry of one request."""

    def __post_init__(self) -> None:
        _reject_unstorable("member", self.name, self.node, self.address, self.nonce)


class HeartbeatMember(Message, frozen=True, kw_only=True):
    publication: Count | None = None
    """The weights of a policy server."""
    load: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class HeartbeatReply(Message, frozen=True, kw_only=True):
    time: float
    """The ledger's clock, in seconds since 1970: a member on another machine measures the offset of its clock."""


class Announcement(Message, frozen=True, kw_only=True):
    """What a process that does not see the run directory needs to join the run."""

    directory_id: Name
    """Identifies the run directory."""
    version: Name
    """Of Rollbook; a process with another one does not join."""
    config: Annotated[str, msgspec.Meta(max_length=1 << 20)]
    """The resolved configuration as TOML, without secrets."""
    addresses: Annotated[dict[Name, Annotated[str, msgspec.Meta(max_length=10_000)]], msgspec.Meta(max_length=16)]
    """URLs of the run's servers by role."""
    tokens: Annotated[dict[Name, Name], msgspec.Meta(max_length=4)]
    """Tokens of the run's servers, by the names of their files in the run directory."""
    tokenizer_digest: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """SHA-256 of the model's `tokenizer.json`; empty if it has none."""
    needs_env_token: bool = False
    """The environment server of the run requires a token that is not announced (`env.token`)."""


class TelemetryBatch(Message, frozen=True, kw_only=True):
    """Bytes that a process on another machine added to a telemetry file."""

    file: Annotated[str, msgspec.Meta(max_length=256)]
    """Such as `logs/policy-a.jsonl`."""
    data: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    stream: Annotated[str, msgspec.Meta(max_length=64)]
    """Identifies the sender; a sender that starts again at 0 has another one."""
    start: Count
    """Bytes of this file that the sender has sent before."""


class RelayedTelemetry(Message, frozen=True, kw_only=True):
    number: Count
    batch: TelemetryBatch


class CollectTelemetry(Message, frozen=True, kw_only=True):
    relay: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The id in the last response; empty at first."""
    after: Count = 0
    """Batches up to this number were stored; they are deleted here."""


class TelemetryReply(Message, frozen=True, kw_only=True):
    relay: str
    """Changes when the service is started again: its numbers then begin at 1."""
    batches: tuple[RelayedTelemetry, ...]


class Act(Message, frozen=True, kw_only=True):
    kind: ActionKind
    author: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_AUTHOR)]
    target: Annotated[str, msgspec.Meta(max_length=512)] = ""
    """The task of `quarantine` and `readmit`, the group of `annotate`."""
    sample: Count | None = None
    """A note about one sample of the group, from 0."""
    note: Annotated[str, msgspec.Meta(max_length=MAX_NOTE)] = ""
    nonce: Name
    """The same in every retry of one request."""

    def __post_init__(self) -> None:
        _reject_unstorable("action", self.author, self.target, self.note, self.nonce)


class Join(Message, frozen=True, kw_only=True):
    owner_name: Name
    nonce: Name
    """The same in every retry of one request."""


class JoinReply(Message, frozen=True, kw_only=True):
    owner: str


class Open(Message, frozen=True, kw_only=True):
    owner: Name
    draws: tuple[Draw, ...]
    limit: Count
    wait_s: Seconds
    request_id: Name
    """The same in every retry of one request."""

    def __post_init__(self) -> None:
        for draw in self.draws:
            _reject_unstorable("draw", draw.task_id, draw.number, draw.position)


class Heartbeat(Message, frozen=True, kw_only=True):
    owner: Name


class Submit(Message, frozen=True, kw_only=True):
    group_id: Name
    task_id: Name
    draw: Count
    attempt: Count
    publications: tuple[PublicationOrUnknown, ...]
    outcome: GroupOutcome
    drop: Text | None = None
    payload: bytes
    payload_digest: Name
    producer: Name | None = None
    """The registered producer, for a group that the gate did not grant."""

    def __post_init__(self) -> None:
        _reject_unstorable("group", self.group_id, self.task_id, self.drop)
        _reject_unstorable_outcome(self.outcome)


class SubmitMany(Message, frozen=True, kw_only=True):
    """Several groups, each accepted or rejected on its own. A message that cannot be decoded is rejected as a whole."""

    groups: Annotated[tuple[Submit, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class SubmitError(Message, frozen=True, kw_only=True):
    """The error response that `submit` would have sent for this group."""

    status: int
    kind: str
    message: str
    retry_after_s: float | None = None


class SubmitResult(Message, frozen=True, kw_only=True):
    """Either a receipt or an error."""

    receipt: Receipt | None = None
    next_part: OpenPart | None = None
    error: SubmitError | None = None


class SubmitManyReply(Message, frozen=True, kw_only=True):
    results: tuple[SubmitResult, ...]
    """In the order of the groups."""


class Close(Message, frozen=True, kw_only=True):
    group_id: Name
    reason: Text
    outcome: GroupOutcome | None = None

    def __post_init__(self) -> None:
        _reject_unstorable("group", self.group_id, self.reason)
        if self.outcome is not None:
            _reject_unstorable_outcome(self.outcome)


class ReceiptReply(Message, frozen=True, kw_only=True):
    receipt: str


class SubmitReply(Message, frozen=True, kw_only=True, omit_defaults=True):
    receipt: Receipt
    next_part: OpenPart | None = None
    """Only with batch policy `parts`: the part that the group lacks now. Absent if it lacks none."""


class Release(Message, frozen=True, kw_only=True):
    group_id: Name
    attempt: Count
    cause: Text

    def __post_init__(self) -> None:
        _reject_unstorable("release", self.cause)


class TakeRole(Message, frozen=True, kw_only=True):
    restored_step: Count


class Batch(Message, frozen=True, kw_only=True):
    step: Count
    epoch: Count
    wait_s: Seconds


class BatchReply(Message, frozen=True, kw_only=True):
    """Both fields are null while there are not enough groups."""

    manifest: BatchManifest | None = None
    end: EndOfRun | None = None


class Payloads(Message, frozen=True, kw_only=True):
    step: Count
    epoch: Count


class Acknowledge(Message, frozen=True, kw_only=True):
    step: Count
    epoch: Count
    weights_digest: Name
    unusable: dict[Name, Annotated[str, msgspec.Meta(min_length=1, max_length=10_000)]] = {}
    """The groups of the batch that could not be trained, with the reason."""

    def __post_init__(self) -> None:
        _reject_unstorable("unusable", *self.unusable, *self.unusable.values())


class AcknowledgeReply(Message, frozen=True, kw_only=True):
    receipt: AckReceipt


class Register(Message, frozen=True, kw_only=True):
    step: Count
    epoch: Count
    weights_digest: Name


class Confirm(Message, frozen=True, kw_only=True):
    publication: Publication
    epoch: Count

    def __post_init__(self) -> None:
        publication = self.publication
        _reject_unstorable("publication", publication.id, publication.epoch, publication.step, publication.digest)


class Checkpointed(Message, frozen=True, kw_only=True):
    step: Count
    epoch: Count
    oldest_kept: Count


class Finish(Message, frozen=True, kw_only=True):
    reason: EndOfRun
    epoch: Count


class Empty(Message, frozen=True, kw_only=True):
    """A message without fields."""


class RegisterProducer(Message, frozen=True, kw_only=True):
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    """Its share of a batch relative to the other producers."""
    min_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """The fraction of a batch that is reserved for it while it has queued groups."""


class ProducerView(Message, frozen=True, kw_only=True):
    name: str
    weight: float
    min_share: float
    credit: float
    """Groups that it was owed when the last batch was decided; negative if it received more than its share."""
    num_batched: int


class GroupQuery(Message, frozen=True, kw_only=True):
    state: Annotated[GroupState | None, msgspec.Meta(description="only groups in this state")] = None
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_LISTED, description="maximum number of groups")] = 100
    start: Annotated[int, msgspec.Meta(ge=0, le=LARGEST, description="the first admission sequence number")] = (
        msgspec.field(default=0, name="from")
    )


class ActionQuery(Message, frozen=True, kw_only=True):
    start: Annotated[int, msgspec.Meta(ge=0, le=LARGEST, description="the first action number")] = msgspec.field(
        default=0, name="from"
    )
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_LISTED, description="maximum number of actions")] = MAX_LISTED
    target: Annotated[Name | None, msgspec.Meta(description="only actions about this task or group")] = None

    def __post_init__(self) -> None:
        _reject_unstorable("target", self.target)


class PublicationQuery(Message, frozen=True, kw_only=True):
    start: Annotated[int, msgspec.Meta(ge=0, le=LARGEST, description="the first publication id")] = msgspec.field(
        default=0, name="from"
    )
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_LISTED, description="maximum number of publications")] = MAX_LISTED


class StepQuery(Message, frozen=True, kw_only=True):
    start: Annotated[int, msgspec.Meta(ge=0, le=LARGEST, description="the first step")] = msgspec.field(
        default=0, name="from"
    )
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_LISTED, description="maximum number of acknowledgements")] = (
        MAX_LISTED
    )


class StepView(Message, frozen=True, kw_only=True):
    """One acknowledgement. A step that was trained again after a restart has one for each epoch."""

    step: int
    epoch: int
    digest: str
    receipt: AckReceipt
    at: float


class OutcomeQuery(Message, frozen=True, kw_only=True):
    start: Annotated[int, msgspec.Meta(ge=0, le=LARGEST, description="the first admission sequence number")] = (
        msgspec.field(default=0, name="from")
    )
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_LISTED, description="maximum number of draws")] = MAX_LISTED


class GroupView(Message, frozen=True, kw_only=True):
    """The record of a group, without its payload."""

    group_id: str
    task_id: str
    draw: int
    origin: str
    state: GroupState
    sequence: int
    opened_at: float
    attempt: int
    part: int
    num_samples: int
    expected_samples: int
    """The samples that the part was opened for, only with batch policy `parts`."""
    baseline: tuple[float, ...] | None
    owner: str | None
    producer: str | None
    admission_version: int | None
    publications: tuple[int, ...]
    oldest_version: int | None
    newest_version: int | None
    step: int | None
    drop_reason: str | None
    unusable: str | None
    payload_bytes: int
    has_payload: bool
    outcome: GroupOutcome | None


class ChangeQuery(Message, frozen=True, kw_only=True):
    after: Annotated[
        int | None,
        msgspec.Meta(description="the `next` of the last response; without it, only the number to continue after"),
    ] = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED, description="maximum number of changes to read")] = (
        MAX_LISTED
    )

    def __post_init__(self) -> None:
        _reject_unstorable("after", self.after)


class ChangesView(Message, frozen=True, kw_only=True):
    """Groups that changed, as they are now. Changes of other runs are skipped, so a page may be empty and not the last."""

    next: int
    is_complete: bool
    groups: tuple[GroupView, ...]


class MoveView(Message, frozen=True, kw_only=True):
    at: float
    from_state: GroupState | None
    to_state: GroupState
    note: str
    by: str


class GroupHistory(Message, frozen=True, kw_only=True):
    """A group, its state changes, and an explanation of them in sentences."""

    group: GroupView
    moves: tuple[MoveView, ...]
    sentences: tuple[str, ...]


class AuditView(Message, frozen=True, kw_only=True):
    run_id: str
    ok: bool
    opened: int
    law: dict[str, int]
    dropped: dict[str, int]
    steps: int
    max_lag: int | None
    max_head_offpolicy_versions: int
    samples: SampleCounts | None
    """The law of samples, only with batch policy `parts`."""
    violations: tuple[str, ...]
    known: int
    """Durable and dropped groups that an earlier audit of this server has checked. They were not read again."""
    known_at: float | None
    """When that audit ran, as Unix time."""


class AuditQuery(Message, frozen=True, kw_only=True):
    full: Annotated[
        bool, msgspec.Meta(description="read durable and dropped groups again that were audited before")
    ] = False


class Health(Message, frozen=True, kw_only=True):
    status: str
    runs: int
