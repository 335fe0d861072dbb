"""Every route of the native dialect, in one table: what is sent, what comes back, and who may call it.

The server registers it, the OpenAPI document and docs/http-api.md are made from it, so that none of them can fall behind.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollbook.contracts.admission import DrawProgress, LedgerStatus, OpenReply, PastDraw
from rollbook.contracts.batch import BatchManifest, TrainerRole
from rollbook.contracts.policy import Publication
from rollbook.ledger.http import wire
from rollbook.ledger.http.auth import Role

ANYBODY = frozenset(Role)
PRODUCER = frozenset({Role.PRODUCER})
TRAINER = frozenset({Role.TRAINER})
EITHER = PRODUCER | TRAINER


class Form(StrEnum):
    """What an answer looks like."""

    MESSAGE = "message"
    """MessagePack, or JSON for who asks for it."""
    FRAMES = "frames"
    """Payloads one after the other, each behind its length (8 bytes, big-endian)."""
    FRAME = "frame"
    """One payload, as it is stored."""
    EVENTS = "events"
    """Server-sent events."""
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    name: str
    type: type
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    method: str
    path: str
    name: str
    """Of the function that answers it."""
    summary: str
    roles: frozenset[Role] | None
    """Who may call it; None for everybody, also without a token."""
    asked: type[wire.Message] | None = None
    answer: Any = None
    form: Form = Form.MESSAGE
    query: tuple[Query, ...] = ()


def _get(path: str, name: str, summary: str, answer: Any, **more: Any) -> Route:
    return Route(method="GET", path=path, name=name, summary=summary, roles=ANYBODY, answer=answer, **more)


def _verb(
    name: str, summary: str, roles: frozenset[Role], asked: type[wire.Message], answer: Any, **more: Any
) -> Route:
    path = f"/v1/runs/{{run}}/{name}"
    return Route(method="POST", path=path, name=name, summary=summary, roles=roles, asked=asked, answer=answer, **more)


STATE = Query(name="state", type=str, meaning="only groups in this state")
LIMIT = Query(name="limit", type=int, meaning="at most this many (100; 1000 at most)")
FROM = Query(name="from", type=int, meaning="the first admission sequence (0)")
OFFSET = Query(name="offset", type=int, meaning="leave out this many first")

ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path="/health",
        name="health",
        summary="Alive and able to read its store.",
        roles=None,
        answer=wire.Health,
    ),
    Route(
        method="GET",
        path="/openapi.json",
        name="openapi",
        summary="This interface as OpenAPI 3.1.",
        roles=None,
        form=Form.JSON,
    ),
    _get("/metrics", "metrics", "Numbers for Prometheus.", None, form=Form.TEXT),
    _get("/v1/runs", "runs", "The ids of all runs, oldest first.", tuple[str, ...]),
    Route(
        method="PUT",
        path="/v1/runs/{run}",
        name="create_run",
        summary="Create a run, or go on with it under new settings. Groups per step, policy and budget of a run never change.",
        roles=TRAINER,
        asked=wire.CreateRun,
        answer=wire.Empty,
    ),
    _get("/v1/runs/{run}/status", "status", "A run at a glance, in constant time.", LedgerStatus),
    _get(
        "/v1/runs/{run}/progress",
        "progress",
        "Which draws were opened and settled: what a cursor is rebuilt from.",
        DrawProgress,
    ),
    _get(
        "/v1/runs/{run}/outcomes",
        "outcomes",
        "What came of the draws, in order of admission: what a curriculum is rebuilt from.",
        list[PastDraw],
        query=(FROM, LIMIT),
    ),
    _get("/v1/runs/{run}/audit", "audit", "Does the record add up? Reads the whole run.", wire.AuditView),
    _get(
        "/v1/runs/{run}/events",
        "events",
        "The status now and whenever something moved. Moves close together are told as one.",
        LedgerStatus,
        form=Form.EVENTS,
    ),
    _get(
        "/v1/runs/{run}/groups",
        "groups",
        "Groups in order of admission.",
        tuple[wire.GroupView, ...],
        query=(STATE, LIMIT, OFFSET),
    ),
    _get("/v1/runs/{run}/groups/{group}", "life", "One group: what happened to it, and why, in sentences.", wire.Life),
    _get(
        "/v1/runs/{run}/groups/{group}/payload",
        "payload",
        "The stored frame of one group, as its producer encoded it.",
        bytes,
        form=Form.FRAME,
    ),
    _get("/v1/runs/{run}/batches/{step}", "manifest", "The composition of a decided batch.", BatchManifest),
    _get(
        "/v1/runs/{run}/publications",
        "publications",
        "Every set of weights that was registered.",
        tuple[Publication, ...],
    ),
    _get(
        "/v1/runs/{run}/producers",
        "producers",
        "Registered producers and what each is owed.",
        tuple[wire.ProducerView, ...],
    ),
    Route(
        method="PUT",
        path="/v1/runs/{run}/producers/{producer}",
        name="register_producer",
        summary="Register a producer, or change its weight and minimum share.",
        roles=PRODUCER,
        asked=wire.RegisterProducer,
        answer=wire.ProducerView,
    ),
    _verb(
        "join", "Become a dispatcher. An older one of the same name is superseded.", PRODUCER, wire.Join, wire.Joined
    ),
    _verb(
        "open", "Ask the gate for groups to play; with `wait_s`, until there are some.", PRODUCER, wire.Open, OpenReply
    ),
    _verb("heartbeat", "A dispatcher's sign of life.", PRODUCER, wire.Heartbeat, wire.Empty),
    _verb(
        "submit",
        "Store a finished group. By group id: the first one wins, a repeat is told so. An id that was never opened is opened here.",
        PRODUCER,
        wire.Submit,
        wire.Receipted,
    ),
    _verb(
        "submit_many",
        "Store several groups in one transaction; each is answered as `submit` would have answered it.",
        PRODUCER,
        wire.SubmitMany,
        wire.SubmittedMany,
    ),
    _verb("close", "Settle a group that will not be submitted.", PRODUCER, wire.Close, wire.Receipted),
    _verb("release", "Give a group back for another attempt.", PRODUCER, wire.Release, wire.Empty),
    _verb("exhausted", "There is no further draw.", PRODUCER, wire.Empty, wire.Empty),
    _verb(
        "take_role",
        "Become the trainer: a higher epoch shuts out every lower one.",
        TRAINER,
        wire.TakeRole,
        TrainerRole,
    ),
    _verb(
        "batch",
        "The batch of a step, the same for ever; with `wait_s`, until there is one.",
        TRAINER,
        wire.Batch,
        wire.BatchReply,
    ),
    _verb("payloads", "The groups of a decided batch, in its order.", TRAINER, wire.Payloads, bytes, form=Form.FRAMES),
    _verb(
        "acknowledge",
        "A step was trained and gave weights of this digest.",
        TRAINER,
        wire.Acknowledge,
        wire.Acknowledged,
    ),
    _verb("register", "Get an id for weights about to be pushed.", TRAINER, wire.Register, Publication),
    _verb("confirm", "Every replica in service has these weights.", TRAINER, wire.Confirm, wire.Empty),
    _verb("checkpointed", "The checkpoint of a step is durable.", TRAINER, wire.Checkpointed, wire.Empty),
    _verb("finish", "The run is over: what is open is dropped.", TRAINER, wire.Finish, wire.Empty),
)
