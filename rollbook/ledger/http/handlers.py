"""Handlers of the native API: what the server does for each verb of `verbs.py`.

A request is checked in this order: role of the token, format and size of the body, fields of the message, rules of the ledger.
Errors are sent as `{kind, message}`.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.admission import (
    Action,
    DrawProgress,
    LedgerStatus,
    Member,
    MemberReply,
    OpenReply,
    PartReceipt,
    PastDraw,
    RunId,
)
from rollbook.contracts.batch import BatchManifest, TrainerRole
from rollbook.contracts.decoding import convert, json_decoder
from rollbook.contracts.errors import NotFoundError, RollbookError, RunError
from rollbook.contracts.group import DropReason, GroupOutcome
from rollbook.contracts.group_codec import EncodedGroup
from rollbook.contracts.policy import Publication
from rollbook.ledger.http import verbs, wire
from rollbook.ledger.http.auth import Keys
from rollbook.ledger.http.bodies import BodyReader, encode_response, send_frames, send_statuses, wants_zstd
from rollbook.ledger.http.errors import KNOWN_ERRORS, error_response, status_of
from rollbook.ledger.http.metrics import RequestMetrics, ledger_metrics
from rollbook.ledger.http.openapi import openapi_document
from rollbook.ledger.http.relay import Relay
from rollbook.ledger.http.verb import Declaration, Form, Verb
from rollbook.ledger.records import GroupRecord, ProducerRecord
from rollbook.ledger.rules.groups import Submission
from rollbook.ledger.service import Ledger
from rollbook.ledger.tools.audit import audit_since
from rollbook.ledger.tools.audit_findings import AuditMark
from rollbook.ledger.tools.explain import explain_group
from rollbook.telemetry.prometheus import LoopLag, metrics_response
from rollbook.telemetry.shipping import ReceivedFiles

M = TypeVar("M", bound=wire.Message)
R = TypeVar("R")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Method = Callable[..., Awaitable[R]]
"""Takes the handlers, the request and, if the path has one, the run by name."""

MAX_RUN_NAME = 128
KEEPALIVE_S = 15.0
"""A stream of events sends at least one line in this time, so that proxies and clients do not close the connection."""

METHODS: dict[str, Method[Any]] = {}
"""The method that handles each verb, by the name of the verb."""


def handles(verb: type[Verb[R]]) -> Callable[[Method[R]], Method[R]]:
    """The method handles a verb: it returns the response message."""

    def add(method: Method[R]) -> Method[R]:
        METHODS[verb.declaration.name] = method
        return method

    return add


def streams(verb: type[Verb[Any]]) -> Callable[[Method[web.StreamResponse]], Method[web.StreamResponse]]:
    """The method handles a verb whose response is not one message: it gets the `web.Request` too and sends the response."""

    def add(method: Method[web.StreamResponse]) -> Method[web.StreamResponse]:
        METHODS[verb.declaration.name] = method
        return method

    return add


class LedgerHandlers:
    def __init__(self, ledger: Ledger, bodies: BodyReader, *, telemetry: ReceivedFiles | None = None) -> None:
        self._ledger = ledger
        self._telemetry = telemetry
        self._bodies = bodies
        self.requests = RequestMetrics()
        self._clock = SystemClock()
        self.lag = LoopLag(self._clock)
        self._relay = Relay(self._clock)
        self._audited: dict[RunId, AuditMark] = {}

    def handler(self, verb: Declaration, keys: Keys) -> Handler:
        """The handler of a route. Expected errors become error responses."""
        method = METHODS[verb.name]

        async def call(request: web.Request) -> web.StreamResponse:
            path = dict(request.match_info)
            run = {"run": _checked_run(path.pop("run"))} if "run" in path else {}
            if verb.has_body:
                message = await self._bodies.read(request, verb.request)
            else:
                message = _read_query(request, path, verb.request)
            if verb.form is Form.MESSAGE:
                return encode_response(request, await method(self, message, **run), is_json_default=not verb.has_body)
            response: web.StreamResponse = await method(self, message, **run, http=request)
            return response

        async def handle(request: web.Request) -> web.StreamResponse:
            started = self._clock.now()
            status = HTTPStatus.INTERNAL_SERVER_ERROR.value
            try:
                if verb.roles is not None:
                    keys.require(request.headers.get("Authorization"), verb.roles, is_steering=verb.is_steering)
                response = await call(request)
                status = response.status
                return response
            except KNOWN_ERRORS as error:
                failed = error_response(error)
                status = failed.status
                return failed
            finally:
                self.requests.add(verb.name, status, self._clock.now() - started)

        return handle

    # ------------------------------------------------------------------ reading

    @handles(verbs.GetHealth)
    async def health(self, _: verbs.GetHealth) -> wire.Health:
        return wire.Health(status="ok", runs=len(await self._ledger.runs()))

    @streams(verbs.GetOpenapi)
    async def openapi(self, _: verbs.GetOpenapi, *, http: web.Request) -> web.Response:
        return web.json_response(openapi_document())

    @streams(verbs.GetMetrics)
    async def metrics(self, _: verbs.GetMetrics, *, http: web.Request) -> web.Response:
        statuses = [await self._ledger.status(run_id) for run_id in await self._ledger.runs()]
        families = ledger_metrics(
            statuses,
            requests=self.requests,
            lag=self.lag,
            receiving=self._bodies.receiving_bytes,
            received=self._bodies.received_bytes,
        )
        body, headers = metrics_response(families, http.headers.get("Accept"))
        return web.Response(body=body, headers=headers)

    @handles(verbs.ListRuns)
    async def runs(self, _: verbs.ListRuns) -> tuple[str, ...]:
        return tuple(await self._ledger.runs())

    @handles(verbs.GetStatus)
    async def status(self, _: verbs.GetStatus, run: RunId) -> LedgerStatus:
        return await self._ledger.status(run)

    @handles(verbs.GetProgress)
    async def progress(self, _: verbs.GetProgress, run: RunId) -> DrawProgress:
        return await self._ledger.progress(run)

    @handles(verbs.ListOutcomes)
    async def outcomes(self, request: verbs.ListOutcomes, run: RunId) -> list[PastDraw]:
        return await self._ledger.outcomes(run, after=request.start - 1, limit=request.limit)

    @handles(verbs.AuditRun)
    async def audit(self, request: verbs.AuditRun, run: RunId) -> wire.AuditView:
        mark = None if request.full else self._audited.get(run)
        report, mark = await self._ledger.read(lambda tx: audit_since(tx, run, mark))
        if mark is not None:
            self._audited[run] = mark
        return _view(wire.AuditView, report)

    @streams(verbs.FollowStatus)
    async def events(self, _: verbs.FollowStatus, run: RunId, *, http: web.Request) -> web.StreamResponse:
        await self._ledger.status(run)
        return await send_statuses(http, self._ledger.statuses(run, quiet_s=KEEPALIVE_S))

    @handles(verbs.ListGroups)
    async def groups(self, request: verbs.ListGroups, run: RunId) -> tuple[wire.GroupView, ...]:
        found = await self._ledger.groups(run, request.state, start=request.start, limit=request.limit)
        return tuple(_group_view(group) for group in found)

    @handles(verbs.ListChanges)
    async def changes(self, request: verbs.ListChanges, run: RunId) -> wire.ChangesView:
        found = await self._ledger.changes(run, after=request.after, limit=request.limit)
        return _view(wire.ChangesView, found, groups=tuple(_group_view(group) for group in found.groups))

    @handles(verbs.ExplainGroup)
    async def explain(self, request: verbs.ExplainGroup, run: RunId) -> wire.GroupHistory:
        group = request.group_id
        record, moves, sentences = await self._ledger.read(
            lambda tx: (tx.groups.get(run, group), tx.history.of_group(run, group), explain_group(tx, run, group))
        )
        if record is None:
            raise NotFoundError(f"run {run}: there is no group {group}")
        return wire.GroupHistory(
            group=_group_view(record),
            moves=tuple(_view(wire.MoveView, move) for move in moves),
            sentences=tuple(sentences),
        )

    @streams(verbs.GetPayload)
    async def payload(self, request: verbs.GetPayload, run: RunId, *, http: web.Request) -> web.Response:
        await self._ledger.status(run)
        found = await self._ledger.read(lambda tx: tx.payloads.get(run, request.group_id))
        if found is None:
            raise NotFoundError(f"run {run}: group {request.group_id} has no payload, or it was deleted")
        return web.Response(body=found, content_type="application/octet-stream")

    @handles(verbs.GetManifest)
    async def manifest(self, request: verbs.GetManifest, run: RunId) -> BatchManifest:
        found = await self._ledger.batch_manifest(run, request.step)
        if found is None:
            raise NotFoundError(f"run {run}: batch {request.step} is not decided")
        return found

    @handles(verbs.ListSteps)
    async def steps(self, request: verbs.ListSteps, run: RunId) -> tuple[wire.StepView, ...]:
        found = await self._ledger.steps(run, start=request.start, limit=request.limit)
        return tuple(_view(wire.StepView, record) for record in found)

    @handles(verbs.ListPublications)
    async def publications(self, request: verbs.ListPublications, run: RunId) -> tuple[Publication, ...]:
        found = await self._ledger.publications(run, start=request.start, limit=request.limit)
        return tuple(record.contract for record in found)

    @handles(verbs.ListProducers)
    async def producers(self, _: verbs.ListProducers, run: RunId) -> tuple[wire.ProducerView, ...]:
        return tuple(_producer_view(producer) for producer in await self._ledger.producers(run))

    # ------------------------------------------------------------------ runs and producers

    @handles(verbs.CreateRun)
    async def create_run(self, request: verbs.CreateRun, run: RunId) -> None:
        await self._ledger.create_run(run, request.settings)

    @handles(verbs.RegisterProducer)
    async def register_producer(self, request: verbs.RegisterProducer, run: RunId) -> wire.ProducerView:
        return _producer_view(await self._ledger.register_producer(run, **msgspec.structs.asdict(request)))

    @handles(verbs.ListActions)
    async def actions(self, request: verbs.ListActions, run: RunId) -> tuple[Action, ...]:
        found = await self._ledger.actions(run, start=request.start, limit=request.limit, target=request.target)
        return tuple(record.contract for record in found)

    @handles(verbs.Act)
    async def act(self, request: verbs.Act, run: RunId) -> Action:
        return (await self._ledger.act(run, **msgspec.structs.asdict(request))).contract

    @handles(verbs.ListMembers)
    async def members(self, _: verbs.ListMembers, run: RunId) -> tuple[Member, ...]:
        return tuple(await self._ledger.members(run))

    @handles(verbs.JoinMember)
    async def join_member(self, request: verbs.JoinMember, run: RunId) -> MemberReply:
        return await self._ledger.join_member(run, **msgspec.structs.asdict(request))

    @handles(verbs.HeartbeatMember)
    async def heartbeat_member(self, request: verbs.HeartbeatMember, run: RunId) -> wire.HeartbeatReply:
        await self._ledger.heartbeat_member(run, **msgspec.structs.asdict(request))
        return wire.HeartbeatReply(time=time.time())

    @handles(verbs.LeaveMember)
    async def leave_member(self, request: verbs.LeaveMember, run: RunId) -> None:
        await self._ledger.leave_member(run, request.member)

    @handles(verbs.Announce)
    async def announce(self, request: verbs.Announce, run: RunId) -> None:
        await self._ledger.status(run)  # refuses a run that does not exist
        self._relay.announce(run, request.announcement)

    @handles(verbs.GetAnnouncement)
    async def announcement(self, _: verbs.GetAnnouncement, run: RunId) -> wire.Announcement:
        return self._relay.announcement(run)

    @handles(verbs.ListAnnounced)
    async def announced(self, _: verbs.ListAnnounced) -> tuple[str, ...]:
        return tuple(self._relay.announced())

    @handles(verbs.ShipTelemetry)
    async def ship_telemetry(self, request: verbs.ShipTelemetry, run: RunId) -> None:
        await self._ledger.status(run)  # refuses a run that does not exist
        try:
            if self._telemetry is None:
                self._relay.keep(run, request)
            else:
                # In the event loop: batches of one file stay in order, and 256 KB take less than a millisecond.
                self._telemetry.append(request.file, request.data, stream=request.stream, start=request.start)
        except (OSError, ValueError) as error:
            raise RunError(f"telemetry was not stored: {error}") from error

    @handles(verbs.CollectTelemetry)
    async def collect_telemetry(self, request: verbs.CollectTelemetry, run: RunId) -> verbs.TelemetryReply:
        await self._ledger.status(run)
        return self._relay.collect(run, request)

    @handles(verbs.Join)
    async def join(self, request: verbs.Join, run: RunId) -> wire.JoinReply:
        return wire.JoinReply(owner=await self._ledger.join(run, request.owner_name, nonce=request.nonce))

    @handles(verbs.Open)
    async def open(self, request: verbs.Open, run: RunId) -> OpenReply:
        return await self._ledger.open(
            run,
            request.owner,
            request.draws,
            limit=request.limit,
            wait_s=min(request.wait_s, wire.MAX_WAIT_S),
            request_id=request.request_id,
        )

    @handles(verbs.Heartbeat)
    async def heartbeat(self, request: verbs.Heartbeat, run: RunId) -> None:
        await self._ledger.heartbeat(run, request.owner)

    @handles(verbs.Submit)
    async def submit(self, request: verbs.Submit, run: RunId) -> wire.SubmitReply:
        """One result per group, in the order of the request. A refused group does not affect the others."""
        checked = [_checked_group(group) for group in request.groups]
        stored = iter(await self._ledger.submit(run, *(each for each in checked if isinstance(each, Submission))))
        results = [next(stored) if isinstance(each, Submission) else each for each in checked]
        return wire.SubmitReply(results=tuple(map(_submit_result, results)))

    @handles(verbs.Close)
    async def close(self, request: verbs.Close, run: RunId) -> wire.ReceiptReply:
        reason = _drop_reason(request.reason)
        receipt = await self._ledger.close(run, request.group_id, reason, outcome=request.outcome)
        return wire.ReceiptReply(receipt=receipt)

    @handles(verbs.Release)
    async def release(self, request: verbs.Release, run: RunId) -> None:
        await self._ledger.release(run, request.group_id, attempt=request.attempt, cause=request.cause)

    @handles(verbs.Exhausted)
    async def exhausted(self, _: verbs.Exhausted, run: RunId) -> None:
        await self._ledger.exhausted(run)

    # ------------------------------------------------------------------ the trainer

    @handles(verbs.TakeRole)
    async def take_role(self, request: verbs.TakeRole, run: RunId) -> TrainerRole:
        return await self._ledger.take_role(run, restored_step=request.restored_step)

    @streams(verbs.Batch)
    async def batch(self, request: verbs.Batch, run: RunId, *, http: web.Request) -> web.StreamResponse:
        wait_s = min(request.wait_s, wire.MAX_WAIT_S)
        decided = await self._ledger.decide(run, request.step, epoch=request.epoch, wait_s=wait_s)

        async def frames() -> AsyncIterator[bytes]:
            if isinstance(decided, BatchManifest):
                split = await self._ledger.split_of(run, request.step)
                yield msgspec.msgpack.encode(wire.BatchReply(manifest=decided, split=split))
                async for payload in self._ledger.payloads(run, decided):
                    yield payload
            else:
                yield msgspec.msgpack.encode(wire.BatchReply(end=decided))

        return await send_frames(http, frames(), is_compressed=wants_zstd(http))

    @handles(verbs.Acknowledge)
    async def acknowledge(self, request: verbs.Acknowledge, run: RunId) -> wire.AcknowledgeReply:
        receipt = await self._ledger.acknowledge(run, **msgspec.structs.asdict(request))
        return wire.AcknowledgeReply(receipt=receipt)

    @handles(verbs.Register)
    async def register(self, request: verbs.Register, run: RunId) -> Publication:
        return await self._ledger.register(run, request.step, request.weights_digest, epoch=request.epoch)

    @handles(verbs.Confirm)
    async def confirm(self, request: verbs.Confirm, run: RunId) -> None:
        await self._ledger.confirm(run, request.publication, epoch=request.epoch)

    @handles(verbs.Checkpointed)
    async def checkpointed(self, request: verbs.Checkpointed, run: RunId) -> None:
        await self._ledger.checkpointed(run, request.step, oldest_kept=request.oldest_kept, epoch=request.epoch)

    @handles(verbs.Finish)
    async def finish(self, request: verbs.Finish, run: RunId) -> None:
        await self._ledger.finish(run, request.reason, epoch=request.epoch)


def _checked_run(name: str) -> RunId:
    if "\x00" in name or len(name) > MAX_RUN_NAME:
        raise NotFoundError("the ledger has no run of that name")
    return RunId(name)


def _read_query(request: web.Request, path: dict[str, str], expected: type[M]) -> M:
    """The parameters of the path and of the query as a message. Unknown parameters are ignored."""
    given = {**request.query, **path}
    names = expected.__struct_encode_fields__
    return convert({name: given[name] for name in names if name in given}, expected, strict=False)


def _checked_group(group: EncodedGroup) -> Submission | RunError:
    try:
        return Submission.of(group)
    except RunError as error:
        return error


def _drop_reason(text: str) -> DropReason:
    try:
        return DropReason.parse(text)
    except ValueError as error:
        raise RunError(f"{text!r} is not a drop reason: {error}") from error


def _submit_result(result: PartReceipt | RollbookError) -> wire.SubmitResult:
    if isinstance(result, PartReceipt):
        return wire.SubmitResult(receipt=result.receipt, next_part=result.next_part)
    error = wire.SubmitError(
        status=status_of(result).value,
        kind=type(result).__name__,
        message=str(result),
        retry_after_s=getattr(result, "retry_after_s", None),
    )
    return wire.SubmitResult(error=error)


def _view(kind: type[M], record: object, **changes: object) -> M:
    """A record as a message: the fields of the message, taken from the record unless given in `changes`."""
    names = (name for name in kind.__struct_fields__ if name not in changes)
    return kind(**{name: getattr(record, name) for name in names}, **changes)


def _group_view(group: GroupRecord) -> wire.GroupView:
    outcome = None if group.outcome is None else json_decoder(GroupOutcome).decode(group.outcome)
    return _view(wire.GroupView, group, outcome=outcome)


def _producer_view(producer: ProducerRecord) -> wire.ProducerView:
    return _view(wire.ProducerView, producer)
