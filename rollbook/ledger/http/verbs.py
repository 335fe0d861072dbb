"""Every verb of the ledger's HTTP API, declared once: name, method, path, role, request, response and description.

The server's routes, the OpenAPI document, docs/http-api.md and the methods of the client are derived from these declarations.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from rollbook.contracts.admission import Action, DrawProgress, LedgerStatus, Member, MemberReply, OpenReply, PastDraw
from rollbook.contracts.batch import BatchManifest, TrainerRole
from rollbook.contracts.policy import Publication
from rollbook.ledger.http import wire
from rollbook.ledger.http.auth import Role

ALL_ROLES = frozenset(Role)
PRODUCER = frozenset({Role.PRODUCER})
TRAINER = frozenset({Role.TRAINER})
OPERATOR = frozenset({Role.OPERATOR, Role.TRAINER})

Q = TypeVar("Q", bound=wire.Message)
R = TypeVar("R")


class Form(StrEnum):
    """The format of a response."""

    MESSAGE = "message"
    """MessagePack or JSON, as the request's `Accept` header says."""
    FRAMES = "frames"
    """Payloads one after the other, each preceded by its length (8 bytes, big-endian)."""
    FRAME = "frame"
    """One payload, as it is stored."""
    EVENTS = "events"
    """Server-sent events."""
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb(Generic[Q, R]):
    name: str
    """Also the name of the method that handles it on the server."""
    method: str
    path: str
    summary: str
    roles: frozenset[Role] | None
    """Roles that may call it; None: no token is required."""
    request: type[Q]
    """The body of a POST or PUT; the query parameters of a GET."""
    response: type[R]
    form: Form = Form.MESSAGE
    is_steering: bool = False
    """It can end a run, so it needs a token also where its role needs none."""

    @property
    def has_body(self) -> bool:
        return self.method != "GET"


VERBS: list[Verb[Any, Any]] = []
"""In the order of the documentation."""


def _verb(  # noqa: PLR0917 - the columns of the table
    name: str,
    route: str,
    roles: frozenset[Role] | None,
    request: type[Q],
    response: type[R],
    summary: str,
    *,
    form: Form = Form.MESSAGE,
    is_steering: bool = False,
) -> Verb[Q, R]:
    method, path = route.split(" ")
    verb = Verb(
        name=name,
        method=method,
        path=path,
        summary=summary,
        roles=roles,
        request=request,
        response=response,
        form=form,
        is_steering=is_steering,
    )
    VERBS.append(verb)
    return verb


HEALTH = _verb("health", "GET /health", None, wire.Empty, wire.Health, "The service is running and can read its store.")
OPENAPI = _verb("openapi", "GET /openapi.json", None, wire.Empty, dict, "This API as OpenAPI 3.1.", form=Form.JSON)
METRICS = _verb(
    "metrics", "GET /metrics", ALL_ROLES, wire.Empty, str, "Metrics in the format of Prometheus.", form=Form.TEXT
)
RUNS = _verb("runs", "GET /v1/runs", ALL_ROLES, wire.Empty, tuple[str, ...], "The ids of all runs, oldest first.")
CREATE_RUN = _verb(
    "create_run",
    "PUT /v1/runs/{run}",
    TRAINER,
    wire.CreateRun,
    wire.Empty,
    (
        "Create a run, or continue it with new settings. "
        "Groups per step, batch policy and staleness bound of a run cannot change."
    ),
)
STATUS = _verb(
    "status",
    "GET /v1/runs/{run}/status",
    ALL_ROLES,
    wire.Empty,
    LedgerStatus,
    "The counters of a run, in constant time.",
)
PROGRESS = _verb(
    "progress",
    "GET /v1/runs/{run}/progress",
    ALL_ROLES,
    wire.Empty,
    DrawProgress,
    "Which draws are opened and settled. A cursor is rebuilt from it.",
)
OUTCOMES = _verb(
    "outcomes",
    "GET /v1/runs/{run}/outcomes",
    ALL_ROLES,
    wire.OutcomeQuery,
    list[PastDraw],
    "The outcomes of past draws, in order of admission. A curriculum is rebuilt from them.",
)
AUDIT = _verb(
    "audit",
    "GET /v1/runs/{run}/audit",
    ALL_ROLES,
    wire.AuditQuery,
    wire.AuditView,
    "Check the record of a run for consistency. Reads what changed since the last audit by this server.",
)
EVENTS = _verb(
    "events",
    "GET /v1/runs/{run}/events",
    ALL_ROLES,
    wire.Empty,
    LedgerStatus,
    "The status now and after each change. Changes close together are sent as one event.",
    form=Form.EVENTS,
)
GROUPS = _verb(
    "groups",
    "GET /v1/runs/{run}/groups",
    ALL_ROLES,
    wire.GroupQuery,
    tuple[wire.GroupView, ...],
    "Groups in order of admission.",
)
CHANGES = _verb(
    "changes",
    "GET /v1/runs/{run}/changes",
    ALL_ROLES,
    wire.ChangeQuery,
    wire.ChangesView,
    "The groups that changed since an earlier request. A copy of the run is kept up to date by it.",
)
EXPLAIN = _verb(
    "explain",
    "GET /v1/runs/{run}/groups/{group}",
    ALL_ROLES,
    wire.Empty,
    wire.GroupHistory,
    "One group: its state changes and the reasons for them, in sentences.",
)
PAYLOAD = _verb(
    "payload",
    "GET /v1/runs/{run}/groups/{group}/payload",
    ALL_ROLES,
    wire.Empty,
    bytes,
    "The stored frame of one group, as its producer encoded it.",
    form=Form.FRAME,
)
MANIFEST = _verb(
    "manifest",
    "GET /v1/runs/{run}/batches/{step}",
    ALL_ROLES,
    wire.Empty,
    BatchManifest,
    "The composition of a decided batch.",
)
STEPS = _verb(
    "steps",
    "GET /v1/runs/{run}/steps",
    ALL_ROLES,
    wire.StepQuery,
    tuple[wire.StepView, ...],
    "A page of the acknowledged steps with the digests of their weights, by step and epoch.",
)
PUBLICATIONS = _verb(
    "publications",
    "GET /v1/runs/{run}/publications",
    ALL_ROLES,
    wire.PublicationQuery,
    tuple[Publication, ...],
    "A page of the registered weight publications, by id.",
)
PRODUCERS = _verb(
    "producers",
    "GET /v1/runs/{run}/producers",
    ALL_ROLES,
    wire.Empty,
    tuple[wire.ProducerView, ...],
    "Registered producers and the groups that each is owed.",
)
REGISTER_PRODUCER = _verb(
    "register_producer",
    "PUT /v1/runs/{run}/producers/{producer}",
    PRODUCER,
    wire.RegisterProducer,
    wire.ProducerView,
    "Register a producer, or change its weight and minimum share.",
)
ACTIONS = _verb(
    "actions",
    "GET /v1/runs/{run}/actions",
    ALL_ROLES,
    wire.ActionQuery,
    tuple[Action, ...],
    "Actions of operators, oldest first.",
)
ACT = _verb(
    "act",
    "POST /v1/runs/{run}/actions",
    OPERATOR,
    wire.Act,
    Action,
    (
        "Act on the run: pause or resume admission, drain, request a checkpoint, quarantine or readmit a task, annotate a group. "
        "The action is recorded with its author and time."
    ),
)
MEMBERS = _verb(
    "members",
    "GET /v1/runs/{run}/members",
    ALL_ROLES,
    wire.Empty,
    tuple[Member, ...],
    "The living members of the run: processes that hold a lease.",
)
JOIN_MEMBER = _verb(
    "join_member",
    "POST /v1/runs/{run}/members",
    TRAINER,
    wire.JoinMember,
    MemberReply,
    "Join the run. The role `supervisor` has one member at a time: while there is another, the response names it as `holder`.",
)
HEARTBEAT_MEMBER = _verb(
    "heartbeat_member",
    "POST /v1/runs/{run}/members/{member}/heartbeat",
    TRAINER,
    wire.HeartbeatMember,
    wire.HeartbeatReply,
    "Extend the lease of a member. A lease that has ended is refused (409): join again.",
)
LEAVE_MEMBER = _verb(
    "leave_member",
    "POST /v1/runs/{run}/members/{member}/leave",
    TRAINER,
    wire.Empty,
    wire.Empty,
    "End the lease of a member.",
)
ANNOUNCE = _verb(
    "announce",
    "PUT /v1/runs/{run}/announcement",
    TRAINER,
    wire.Announcement,
    wire.Empty,
    "Announce a running run to processes that join it without its directory. Kept in memory for 15 s; the supervisor repeats it.",
)
ANNOUNCEMENT = _verb(
    "announcement",
    "GET /v1/runs/{run}/announcement",
    TRAINER,
    wire.Empty,
    wire.Announcement,
    "What a process needs to join the run, with tokens of the run's servers.",
)
ANNOUNCED = _verb(
    "announced",
    "GET /v1/announced",
    TRAINER,
    wire.Empty,
    tuple[str, ...],
    "The ids of the runs that processes can join now.",
)
SHIP_TELEMETRY = _verb(
    "ship_telemetry",
    "POST /v1/runs/{run}/telemetry",
    TRAINER,
    wire.TelemetryBatch,
    wire.Empty,
    (
        "Append to a telemetry file of the run directory, for a process on another machine. A repeated batch is appended once. "
        "A service without a run directory keeps it in memory for the supervisor, up to 8 MiB a run; more is refused (429)."
    ),
)
COLLECT_TELEMETRY = _verb(
    "collect_telemetry",
    "POST /v1/runs/{run}/telemetry/collect",
    TRAINER,
    wire.CollectTelemetry,
    wire.TelemetryReply,
    "Telemetry of the run's processes on other machines, for the supervisor, which stores it in the run directory.",
)
JOIN = _verb(
    "join",
    "POST /v1/runs/{run}/join",
    PRODUCER,
    wire.Join,
    wire.JoinReply,
    "Join as a dispatcher. An earlier dispatcher of the same name is superseded.",
    is_steering=True,
)
OPEN = _verb(
    "open",
    "POST /v1/runs/{run}/open",
    PRODUCER,
    wire.Open,
    OpenReply,
    "Request groups to play from the gate; with `wait_s`, wait until there are some.",
)
HEARTBEAT = _verb(
    "heartbeat",
    "POST /v1/runs/{run}/heartbeat",
    PRODUCER,
    wire.Heartbeat,
    wire.Empty,
    "Report that a dispatcher is alive.",
)
SUBMIT = _verb(
    "submit",
    "POST /v1/runs/{run}/submit",
    PRODUCER,
    wire.Submit,
    wire.SubmitReply,
    (
        "Store a finished group. "
        "The first submission of a group id is stored; a repetition gets the receipt `already_stored`. "
        "A group id that was never opened is opened here. "
        "With batch policy `parts`, the part that the group still lacks is opened too and returned as `next_part`."
    ),
)
SUBMIT_MANY = _verb(
    "submit_many",
    "POST /v1/runs/{run}/submit_many",
    PRODUCER,
    wire.SubmitMany,
    wire.SubmitManyReply,
    "Store several groups in one transaction. Each gets the result that `submit` would have given.",
)
CLOSE = _verb(
    "close",
    "POST /v1/runs/{run}/close",
    PRODUCER,
    wire.Close,
    wire.ReceiptReply,
    "Settle a group that will not be submitted.",
)
RELEASE = _verb(
    "release", "POST /v1/runs/{run}/release", PRODUCER, wire.Release, wire.Empty, "Return a group for another attempt."
)
EXHAUSTED = _verb(
    "exhausted",
    "POST /v1/runs/{run}/exhausted",
    PRODUCER,
    wire.Empty,
    wire.Empty,
    "Report that there are no further draws.",
    is_steering=True,
)
TAKE_ROLE = _verb(
    "take_role",
    "POST /v1/runs/{run}/take_role",
    TRAINER,
    wire.TakeRole,
    TrainerRole,
    "Become the trainer. Requests with a lower epoch are rejected from now on.",
)
BATCH = _verb(
    "batch",
    "POST /v1/runs/{run}/batch",
    TRAINER,
    wire.Batch,
    wire.BatchReply,
    "The batch of a step; it never changes. With `wait_s`, wait until there is one.",
)
PAYLOADS = _verb(
    "payloads",
    "POST /v1/runs/{run}/payloads",
    TRAINER,
    wire.Payloads,
    bytes,
    "The groups of a decided batch, in its order.",
    form=Form.FRAMES,
)
ACKNOWLEDGE = _verb(
    "acknowledge",
    "POST /v1/runs/{run}/acknowledge",
    TRAINER,
    wire.Acknowledge,
    wire.AcknowledgeReply,
    "Report that a step was trained, and the digest of the resulting weights.",
)
REGISTER = _verb(
    "register",
    "POST /v1/runs/{run}/register",
    TRAINER,
    wire.Register,
    Publication,
    "Get a publication id for weights to be pushed.",
)
CONFIRM = _verb(
    "confirm",
    "POST /v1/runs/{run}/confirm",
    TRAINER,
    wire.Confirm,
    wire.Empty,
    "Report that every replica in service has these weights.",
)
CHECKPOINTED = _verb(
    "checkpointed",
    "POST /v1/runs/{run}/checkpointed",
    TRAINER,
    wire.Checkpointed,
    wire.Empty,
    "Report that the checkpoint of a step is durable.",
)
FINISH = _verb(
    "finish", "POST /v1/runs/{run}/finish", TRAINER, wire.Finish, wire.Empty, "End the run. Open groups are dropped."
)
