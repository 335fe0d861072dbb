"""Every verb of the ledger's HTTP API, declared once: the struct is the request, its docstring is the documentation.

To add a verb: declare it here, and write the method of `handlers.py` that handles it. Clients send it with `LedgerClient.call`.
"""

from typing import Annotated, Any

import msgspec

from rollbook.contracts.admission import (
    LEASE_S,
    MAX_AUTHOR,
    MAX_NOTE,
    Action,
    ActionKind,
    DrawProgress,
    LedgerStatus,
    Member,
    MemberId,
    MemberReply,
    MemberRole,
    OpenReply,
    OwnerId,
    PastDraw,
    RunSettings,
)
from rollbook.contracts.batch import BatchManifest, EndOfRun, PassSplit, TrainerRole
from rollbook.contracts.group import GroupId, GroupOutcome, GroupState
from rollbook.contracts.group_codec import LARGEST, EncodedGroup
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import Draw
from rollbook.ledger.http import wire
from rollbook.ledger.http.auth import Role
from rollbook.ledger.http.verb import Form, Verb, verb
from rollbook.ledger.http.wire import (
    MAX_GROUPS,
    MAX_LISTED,
    MAX_TEXT,
    Count,
    Name,
    Seconds,
    Text,
    reject_unstorable,
    reject_unstorable_outcome,
)

ALL_ROLES = frozenset(Role)
PRODUCER = frozenset({Role.PRODUCER})
TRAINER = frozenset({Role.TRAINER})
OPERATOR = frozenset({Role.OPERATOR, Role.TRAINER})
AUDIT_S = 600.0
"""The first audit reads every payload of a run."""

GroupName = Annotated[GroupId, msgspec.Meta(min_length=1, max_length=512)]
OwnerName = Annotated[OwnerId, msgspec.Meta(min_length=1, max_length=512)]
MemberName = Annotated[MemberId, msgspec.Meta(min_length=1, max_length=512)]
Limit = Annotated[int, msgspec.Meta(ge=0, le=MAX_LISTED, description="maximum number of entries")]
FromSequence = Annotated[int, msgspec.Meta(ge=0, le=LARGEST, description="the first admission sequence number")]


@verb("GET /health", None)
class GetHealth(Verb[wire.Health], frozen=True):
    """The service is running and can read its store."""


@verb("GET /v1/openapi.json", None, form=Form.JSON)
class GetOpenapi(Verb[dict[str, Any]], frozen=True):
    """This API as OpenAPI 3.1."""


@verb("GET /metrics", ALL_ROLES, form=Form.TEXT)
class GetMetrics(Verb[str], frozen=True):
    """Metrics in the format of Prometheus."""


@verb("GET /v1/runs", ALL_ROLES)
class ListRuns(Verb[tuple[str, ...]], frozen=True):
    """The ids of all runs of the service, oldest first."""


@verb("PUT /v1/runs/{run}", TRAINER)
class CreateRun(Verb[None], frozen=True):
    """Create a run, or continue it with new settings. Groups per step, batch policy and staleness bound of a run cannot change."""

    settings: RunSettings

    def __post_init__(self) -> None:
        settings, rule = self.settings, self.settings.rule
        spans = (settings.group_deadline_s, settings.owner_ttl_s)
        reject_unstorable("settings", *spans, settings.max_attempts, settings.directory_id)
        reject_unstorable(
            "settings", rule.groups_per_step, rule.max_in_flight, rule.max_head_offpolicy_versions, rule.max_steps
        )
        reject_unstorable("settings", rule.samples_per_group, rule.batch_size, rule.max_in_flight * rule.unit)
        if min(spans) <= 0 or settings.max_attempts < 1:
            raise ValueError("settings: group_deadline_s and owner_ttl_s must be > 0, max_attempts must be >= 1")
        reject_unstorable("settings", settings.limits.vocabulary_size, settings.limits.max_tokens)
        if rule.max_steps is not None and rule.max_steps < 0:
            raise ValueError(f"settings: max_steps is {rule.max_steps}; it must be >= 0")


@verb("GET /v1/runs/{run}/status", ALL_ROLES)
class GetStatus(Verb[LedgerStatus], frozen=True):
    """The counters of a run, in constant time."""


@verb("GET /v1/runs/{run}/progress", ALL_ROLES)
class GetProgress(Verb[DrawProgress], frozen=True):
    """Which draws are opened and settled. A cursor is rebuilt from it."""


@verb("GET /v1/runs/{run}/outcomes", ALL_ROLES)
class ListOutcomes(Verb[list[PastDraw]], frozen=True, kw_only=True):
    """The outcomes of past draws, in order of admission. A curriculum is rebuilt from them."""

    start: FromSequence = msgspec.field(default=0, name="from")
    limit: Limit = MAX_LISTED


@verb("GET /v1/runs/{run}/audit", ALL_ROLES, takes_s=AUDIT_S)
class AuditRun(Verb[wire.AuditView], frozen=True, kw_only=True):
    """Check the record of a run for consistency. Reads what changed since the last audit by this server."""

    full: Annotated[
        bool, msgspec.Meta(description="read durable and dropped groups again that were audited before")
    ] = False


@verb("GET /v1/runs/{run}/events", ALL_ROLES, form=Form.EVENTS)
class FollowStatus(Verb[LedgerStatus], frozen=True):
    """The status now and after each change. Changes close together are sent as one event."""


@verb("GET /v1/runs/{run}/groups", ALL_ROLES)
class ListGroups(Verb[tuple[wire.GroupView, ...]], frozen=True):
    """Groups in order of admission."""

    state: Annotated[GroupState | None, msgspec.Meta(description="only groups in this state")] = None
    start: FromSequence = msgspec.field(default=0, name="from")
    limit: Limit = 100


@verb("GET /v1/runs/{run}/changes", ALL_ROLES)
class ListChanges(Verb[wire.ChangesView], frozen=True, kw_only=True):
    """The groups that changed since an earlier request. A copy of the run is kept up to date by it."""

    after: Annotated[
        int | None,
        msgspec.Meta(description="the `next` of the last response; without it, only the number to continue after"),
    ] = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED, description="maximum number of changes to read")] = (
        MAX_LISTED
    )

    def __post_init__(self) -> None:
        reject_unstorable("after", self.after)


@verb("GET /v1/runs/{run}/groups/{group_id}", ALL_ROLES)
class ExplainGroup(Verb[wire.GroupHistory], frozen=True):
    """One group: its state changes and the reasons for them, in sentences."""

    group_id: GroupId


@verb("GET /v1/runs/{run}/groups/{group_id}/payload", ALL_ROLES, form=Form.FRAME)
class GetPayload(Verb[bytes], frozen=True):
    """The stored frame of one group, as its producer encoded it. 404 if it has none, or none any more."""

    group_id: GroupId


@verb("GET /v1/runs/{run}/batches/{step}", ALL_ROLES)
class GetManifest(Verb[BatchManifest], frozen=True):
    """The composition of a decided batch."""

    step: Count


@verb("GET /v1/runs/{run}/steps", ALL_ROLES)
class ListSteps(Verb[tuple[wire.StepView, ...]], frozen=True, kw_only=True):
    """A page of the acknowledged steps with the digests of their weights, by step and epoch."""

    start: Annotated[int, msgspec.Meta(ge=0, le=LARGEST, description="the first step")] = msgspec.field(
        default=0, name="from"
    )
    limit: Limit = MAX_LISTED


@verb("GET /v1/runs/{run}/publications", ALL_ROLES)
class ListPublications(Verb[tuple[Publication, ...]], frozen=True, kw_only=True):
    """A page of the registered weight publications, by id."""

    start: Annotated[int, msgspec.Meta(ge=0, le=LARGEST, description="the first publication id")] = msgspec.field(
        default=0, name="from"
    )
    limit: Limit = MAX_LISTED


@verb("GET /v1/runs/{run}/producers", ALL_ROLES)
class ListProducers(Verb[tuple[wire.ProducerView, ...]], frozen=True):
    """Registered producers and the groups that each is owed."""


@verb("PUT /v1/runs/{run}/producers", PRODUCER)
class RegisterProducer(Verb[wire.ProducerView], frozen=True):
    """Register a producer that submits groups without grants, or change its weight and minimum share."""

    name: Name
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    """Its share of a batch relative to the other producers."""
    min_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """The fraction of a batch that is reserved for it while it has queued groups."""

    def __post_init__(self) -> None:
        reject_unstorable("producer", self.name)


@verb("GET /v1/runs/{run}/actions", ALL_ROLES)
class ListActions(Verb[tuple[Action, ...]], frozen=True, kw_only=True):
    """Actions of operators, oldest first."""

    start: Annotated[int, msgspec.Meta(ge=0, le=LARGEST, description="the first action number")] = msgspec.field(
        default=0, name="from"
    )
    limit: Limit = MAX_LISTED
    target: Annotated[Name | None, msgspec.Meta(description="only actions about this task or group")] = None

    def __post_init__(self) -> None:
        reject_unstorable("target", self.target)


@verb("POST /v1/runs/{run}/actions", OPERATOR)
class Act(Verb[Action], frozen=True, kw_only=True):
    """Act on the run: pause or resume admission, drain, request a checkpoint, quarantine or readmit a task, annotate a group.
    The action is recorded with its author and time."""

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
        reject_unstorable("action", self.author, self.target, self.note, self.nonce)


@verb("GET /v1/runs/{run}/members", ALL_ROLES)
class ListMembers(Verb[tuple[Member, ...]], frozen=True):
    """The living members of the run: processes that hold a lease."""


@verb("POST /v1/runs/{run}/members", TRAINER)
class JoinMember(Verb[MemberReply], frozen=True, kw_only=True):
    """Join the run. The role `supervisor` has one member at a time: while there is another, the response names it as `holder`."""

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
        reject_unstorable("member", self.name, self.node, self.address, self.nonce)


@verb("POST /v1/runs/{run}/members/heartbeat", TRAINER)
class HeartbeatMember(Verb[wire.HeartbeatReply], frozen=True):
    """Extend the lease of a member. A lease that has ended is refused (409): join again."""

    member: MemberName
    publication: Count | None = None
    """The weights of a policy server."""
    load: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0

    def __post_init__(self) -> None:
        reject_unstorable("member", self.member)


@verb("POST /v1/runs/{run}/members/leave", TRAINER)
class LeaveMember(Verb[None], frozen=True):
    """End the lease of a member."""

    member: MemberName

    def __post_init__(self) -> None:
        reject_unstorable("member", self.member)


@verb("PUT /v1/runs/{run}/announcement", TRAINER)
class Announce(Verb[None], frozen=True):
    """Announce a running run to processes that join it without its directory.
    Kept in memory for 15 s; the supervisor repeats it."""

    announcement: wire.Announcement


@verb("GET /v1/runs/{run}/announcement", TRAINER)
class GetAnnouncement(Verb[wire.Announcement], frozen=True):
    """What a process needs to join the run, with tokens of the run's servers. 404 if the run is not announced."""


@verb("GET /v1/announced", TRAINER)
class ListAnnounced(Verb[tuple[str, ...]], frozen=True):
    """The ids of the runs that processes can join now."""


@verb("POST /v1/runs/{run}/telemetry", TRAINER)
class ShipTelemetry(Verb[None], frozen=True):
    """Append to a telemetry file of the run directory, for a process on another machine. A repeated batch is appended once.
    A service without a run directory keeps it in memory for the supervisor, up to 8 MiB a run; more is refused (429)."""

    file: Annotated[str, msgspec.Meta(max_length=256)]
    """Such as `logs/policy-a.jsonl`."""
    data: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    """Bytes to append."""
    stream: Annotated[str, msgspec.Meta(max_length=64)]
    """Identifies the sender; a sender that starts again at 0 has another one."""
    start: Count
    """Bytes of this file that the sender has sent before."""


class RelayedTelemetry(wire.Message, frozen=True, kw_only=True):
    number: Count
    batch: ShipTelemetry


class TelemetryReply(wire.Message, frozen=True, kw_only=True):
    relay: str
    """Changes when the service is started again: its numbers then begin at 1."""
    batches: tuple[RelayedTelemetry, ...]


@verb("POST /v1/runs/{run}/telemetry/collect", TRAINER)
class CollectTelemetry(Verb[TelemetryReply], frozen=True, kw_only=True):
    """Telemetry of the run's processes on other machines, for the supervisor, which stores it in the run directory."""

    relay: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The id in the last response; empty at first."""
    after: Count = 0
    """Batches up to this number were stored; they are deleted here."""


@verb("POST /v1/runs/{run}/join", PRODUCER, is_steering=True)
class Join(Verb[wire.JoinReply], frozen=True, kw_only=True):
    """Join as a dispatcher. An earlier dispatcher of the same name is superseded."""

    owner_name: Name
    nonce: Name
    """The same in every retry of one request."""


@verb("POST /v1/runs/{run}/open", PRODUCER, is_steering=True)
class Open(Verb[OpenReply], frozen=True, kw_only=True):
    """Request groups to play from the gate; with `wait_s`, wait until there are some."""

    owner: OwnerName
    draws: tuple[Draw, ...]
    limit: Count
    wait_s: Seconds
    request_id: Name
    """The same in every retry of one request."""

    def __post_init__(self) -> None:
        for draw in self.draws:
            reject_unstorable("draw", draw.task_id, draw.number, draw.position)


@verb("POST /v1/runs/{run}/heartbeat", PRODUCER, is_steering=True)
class Heartbeat(Verb[None], frozen=True):
    """Report that a dispatcher is alive."""

    owner: OwnerName


@verb("POST /v1/runs/{run}/submit", PRODUCER)
class Submit(Verb[wire.SubmitReply], frozen=True):
    """Store finished groups in one transaction. Each is stored or refused on its own, and the reply has a result for each.
    The first submission of a group id is stored; a repetition gets the receipt `already_stored`.
    A group id that was never opened is opened here.
    With batch policy `parts`, the part that the group still lacks is opened too and returned as `next_part`.
    A message that cannot be decoded is rejected as a whole."""

    groups: Annotated[tuple[EncodedGroup, ...], msgspec.Meta(max_length=MAX_GROUPS)]

    def __post_init__(self) -> None:
        for group in self.groups:
            reject_unstorable("group", group.id, group.producer)
            if group.drop is not None:
                reject_unstorable("drop", group.drop.detail)
                if len(group.drop.detail) > MAX_TEXT:
                    raise ValueError(
                        f"drop: the detail has {len(group.drop.detail)} characters, at most {MAX_TEXT} are stored"
                    )
            reject_unstorable_outcome(group.outcome)


@verb("POST /v1/runs/{run}/close", PRODUCER, is_steering=True)
class Close(Verb[wire.ReceiptReply], frozen=True, kw_only=True):
    """Settle a group that will not be submitted."""

    group_id: GroupName
    reason: Text
    outcome: GroupOutcome | None = None

    def __post_init__(self) -> None:
        reject_unstorable("group", self.group_id, self.reason)
        if self.outcome is not None:
            reject_unstorable_outcome(self.outcome)


@verb("POST /v1/runs/{run}/release", PRODUCER, is_steering=True)
class Release(Verb[None], frozen=True):
    """Return a group for another attempt."""

    group_id: GroupName
    attempt: Count
    cause: Text

    def __post_init__(self) -> None:
        reject_unstorable("release", self.cause)


@verb("POST /v1/runs/{run}/exhausted", PRODUCER, is_steering=True)
class Exhausted(Verb[None], frozen=True):
    """Report that there are no more draws."""


@verb("POST /v1/runs/{run}/take_role", TRAINER)
class TakeRole(Verb[TrainerRole], frozen=True, kw_only=True):
    """Become the trainer. Requests with a lower epoch are rejected from now on."""

    restored_step: Count


@verb("POST /v1/runs/{run}/batch", TRAINER, form=Form.FRAMES)
class Batch(Verb[wire.BatchReply], frozen=True, kw_only=True):
    """The batch of a step, which never changes: its manifest, then the stored frames of its groups, in the order of the manifest.
    With `wait_s`, wait until there is one."""

    step: Count
    epoch: Count
    wait_s: Seconds


@verb("POST /v1/runs/{run}/acknowledge", TRAINER)
class Acknowledge(Verb[wire.AcknowledgeReply], frozen=True, kw_only=True):
    """Report that a step was trained, and the digest of the resulting weights."""

    step: Count
    epoch: Count
    weights_digest: Name
    unusable: dict[GroupName, Annotated[str, msgspec.Meta(min_length=1, max_length=10_000)]] = msgspec.field(
        default_factory=dict
    )
    """The groups of the batch that could not be trained, with the reason."""
    split: PassSplit | None = None
    """How the step was split into passes. A trainer that replays the step gets it with the batch."""

    def __post_init__(self) -> None:
        reject_unstorable("unusable", *self.unusable, *self.unusable.values())
        if self.split is not None:
            reject_unstorable("split", self.split.max_tokens, self.split.checkpointed_layers)


@verb("POST /v1/runs/{run}/register", TRAINER)
class Register(Verb[Publication], frozen=True, kw_only=True):
    """Get a publication id for weights to be pushed."""

    step: Count
    epoch: Count
    weights_digest: Name


@verb("POST /v1/runs/{run}/confirm", TRAINER)
class Confirm(Verb[None], frozen=True, kw_only=True):
    """Report that every replica in service has these weights."""

    publication: Publication
    epoch: Count

    def __post_init__(self) -> None:
        publication = self.publication
        reject_unstorable("publication", publication.id, publication.epoch, publication.step, publication.digest)


@verb("POST /v1/runs/{run}/checkpointed", TRAINER)
class Checkpointed(Verb[None], frozen=True, kw_only=True):
    """Report that the checkpoint of a step is durable."""

    step: Count
    epoch: Count
    oldest_kept: Count


@verb("POST /v1/runs/{run}/finish", TRAINER)
class Finish(Verb[None], frozen=True, kw_only=True):
    """End the run. Open groups are dropped."""

    reason: EndOfRun
    epoch: Count


VERBS = [kind.declaration for kind in Verb.__subclasses__()]
"""In the order of the documentation."""
