"""Handlers of the native API: parse the request, call the service, encode the response.

`verbs.py` declares the API; this module handles it, with one method per verb. A request is checked in this order: role of the
token, format and size of the body, fields of the message, rules of the ledger. Errors are sent as `{kind, message}`.
"""

import time
from collections.abc import Awaitable, Callable
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
    MemberId,
    MemberReply,
    OpenReply,
    OwnerId,
    PastDraw,
    RunId,
)
from rollbook.contracts.batch import BatchManifest, TrainerRole
from rollbook.contracts.decoding import convert, json_decoder
from rollbook.contracts.errors import NotFoundError, RollbookError, RunError
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome
from rollbook.contracts.group_codec import EncodedGroup
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import TaskId
from rollbook.ledger.http import wire
from rollbook.ledger.http.auth import Keys
from rollbook.ledger.http.bodies import BodyReader, encode_response, send_frames, send_statuses, wants_zstd
from rollbook.ledger.http.errors import KNOWN_ERRORS, error_response, status_of
from rollbook.ledger.http.metrics import RequestMetrics, ledger_metrics
from rollbook.ledger.http.openapi import openapi_document
from rollbook.ledger.http.relay import Relay
from rollbook.ledger.http.verbs import Form, Verb
from rollbook.ledger.records import GroupRecord, ProducerRecord
from rollbook.ledger.rules.groups import Submission
from rollbook.ledger.service import Ledger
from rollbook.ledger.tools.audit import audit_since
from rollbook.ledger.tools.audit_findings import AuditMark
from rollbook.ledger.tools.explain import explain_group
from rollbook.telemetry.prometheus import LoopLag, metrics_response
from rollbook.telemetry.shipping import ReceivedFiles

M = TypeVar("M", bound=wire.Message)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_RUN_NAME = 128
KEEPALIVE_S = 15.0
"""A stream of events sends at least one line in this time, so that proxies and clients do not close the connection."""


class LedgerHandlers:
    """One method for each verb. It takes the request message and, by name, the parameters of the path, and returns the response.

    A method of a verb whose response is not a message takes the `web.Request` instead and returns a `web.StreamResponse`.
    """

    def __init__(self, ledger: Ledger, bodies: BodyReader, *, telemetry: ReceivedFiles | None = None) -> None:
        self._ledger = ledger
        self._telemetry = telemetry
        self._bodies = bodies
        self.requests = RequestMetrics()
        self._clock = SystemClock()
        self.lag = LoopLag(self._clock)
        self._relay = Relay(self._clock)
        self._audited: dict[RunId, AuditMark] = {}

    def handler(self, verb: Verb[Any, Any], keys: Keys) -> Handler:
        """The handler of a route. Expected errors become error responses."""
        method: Callable[..., Awaitable[Any]] = getattr(self, verb.name)

        async def call(request: web.Request) -> web.StreamResponse:
            path = {name: _checked(name, value) for name, value in request.match_info.items()}
            if verb.has_body:
                message = await self._bodies.read(request, verb.request)
            else:
                message = _read_query(request, verb.request)
            if verb.form is Form.MESSAGE:
                return encode_response(request, await method(message, **path), is_json_default=not verb.has_body)
            response: web.StreamResponse = await method(message, **path, http=request)
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

    async def health(self, _: wire.Empty) -> wire.Health:
        return wire.Health(status="ok", runs=len(await self._ledger.runs()))

    async def openapi(self, _: wire.Empty, *, http: web.Request) -> web.Response:
        return web.json_response(openapi_document())

    async def metrics(self, _: wire.Empty, *, http: web.Request) -> web.Response:
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

    async def runs(self, _: wire.Empty) -> list[RunId]:
        return await self._ledger.runs()

    async def status(self, _: wire.Empty, run: RunId) -> LedgerStatus:
        return await self._ledger.status(run)

    async def progress(self, _: wire.Empty, run: RunId) -> DrawProgress:
        return await self._ledger.progress(run)

    async def outcomes(self, request: wire.OutcomeQuery, run: RunId) -> list[PastDraw]:
        return await self._ledger.outcomes(run, after=request.start - 1, limit=request.limit)

    async def audit(self, request: wire.AuditQuery, run: RunId) -> wire.AuditView:
        mark = None if request.full else self._audited.get(run)
        report, mark = await self._ledger.read(lambda tx: audit_since(tx, run, mark))
        if mark is not None:
            self._audited[run] = mark
        return _view(wire.AuditView, report)

    async def events(self, _: wire.Empty, run: RunId, *, http: web.Request) -> web.StreamResponse:
        await self._ledger.status(run)
        return await send_statuses(http, self._ledger.statuses(run, quiet_s=KEEPALIVE_S))

    async def groups(self, request: wire.GroupQuery, run: RunId) -> list[wire.GroupView]:
        found = await self._ledger.groups(run, request.state, start=request.start, limit=request.limit)
        return [_group_view(group) for group in found]

    async def changes(self, request: wire.ChangeQuery, run: RunId) -> wire.ChangesView:
        found = await self._ledger.changes(run, after=request.after, limit=request.limit)
        return _view(wire.ChangesView, found, groups=tuple(_group_view(group) for group in found.groups))

    async def explain(self, _: wire.Empty, run: RunId, group: GroupId) -> wire.GroupHistory:
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

    async def payload(self, _: wire.Empty, run: RunId, group: GroupId, *, http: web.Request) -> web.Response:
        await self._ledger.status(run)
        found = await self._ledger.read(lambda tx: tx.payloads.get(run, group))
        if found is None:
            raise NotFoundError(f"run {run}: group {group} has no payload, or it was deleted")
        return web.Response(body=found, content_type="application/octet-stream")

    async def manifest(self, _: wire.Empty, run: RunId, step: str) -> BatchManifest:
        found = await self._ledger.batch_manifest(run, convert(step, wire.Count, strict=False))
        if found is None:
            raise NotFoundError(f"run {run}: batch {step} is not decided")
        return found

    async def steps(self, request: wire.StepQuery, run: RunId) -> list[wire.StepView]:
        found = await self._ledger.steps(run, start=request.start, limit=request.limit)
        return [_view(wire.StepView, record) for record in found]

    async def publications(self, request: wire.PublicationQuery, run: RunId) -> list[Publication]:
        found = await self._ledger.publications(run, start=request.start, limit=request.limit)
        return [record.contract for record in found]

    async def producers(self, _: wire.Empty, run: RunId) -> list[wire.ProducerView]:
        return [_producer_view(producer) for producer in await self._ledger.producers(run)]

    # ------------------------------------------------------------------ runs and producers

    async def create_run(self, request: wire.CreateRun, run: RunId) -> wire.Empty:
        await self._ledger.create_run(run, request.settings)
        return wire.Empty()

    async def register_producer(self, request: wire.RegisterProducer, run: RunId, producer: str) -> wire.ProducerView:
        record = await self._ledger.register_producer(run, producer, weight=request.weight, min_share=request.min_share)
        return _producer_view(record)

    async def actions(self, request: wire.ActionQuery, run: RunId) -> list[Action]:
        found = await self._ledger.actions(run, start=request.start, limit=request.limit, target=request.target)
        return [record.contract for record in found]

    async def act(self, request: wire.Act, run: RunId) -> Action:
        return (await self._ledger.act(run, **msgspec.structs.asdict(request))).contract

    async def members(self, _: wire.Empty, run: RunId) -> list[Member]:
        return await self._ledger.members(run)

    async def join_member(self, request: wire.JoinMember, run: RunId) -> MemberReply:
        return await self._ledger.join_member(run, **msgspec.structs.asdict(request))

    async def heartbeat_member(
        self, request: wire.HeartbeatMember, run: RunId, member: MemberId
    ) -> wire.HeartbeatReply:
        await self._ledger.heartbeat_member(run, member, publication=request.publication, load=request.load)
        return wire.HeartbeatReply(time=time.time())

    async def leave_member(self, _: wire.Empty, run: RunId, member: MemberId) -> wire.Empty:
        await self._ledger.leave_member(run, member)
        return wire.Empty()

    async def announce(self, request: wire.Announcement, run: RunId) -> wire.Empty:
        await self._ledger.status(run)  # refuses a run that does not exist
        self._relay.announce(run, request)
        return wire.Empty()

    async def announcement(self, _: wire.Empty, run: RunId) -> wire.Announcement:
        return self._relay.announcement(run)

    async def announced(self, _: wire.Empty) -> list[RunId]:
        return self._relay.announced()

    async def ship_telemetry(self, request: wire.TelemetryBatch, run: RunId) -> wire.Empty:
        await self._ledger.status(run)  # refuses a run that does not exist
        try:
            if self._telemetry is None:
                self._relay.keep(run, request)
            else:
                # In the event loop: batches of one file stay in order, and 256 KB take less than a millisecond.
                self._telemetry.append(request.file, request.data, stream=request.stream, start=request.start)
        except (OSError, ValueError) as error:
            raise RunError(f"telemetry was not stored: {error}") from error
        return wire.Empty()

    async def collect_telemetry(self, request: wire.CollectTelemetry, run: RunId) -> wire.TelemetryReply:
        await self._ledger.status(run)
        return self._relay.collect(run, request)

    async def join(self, request: wire.Join, run: RunId) -> wire.JoinReply:
        return wire.JoinReply(owner=await self._ledger.join(run, request.owner_name, nonce=request.nonce))

    async def open(self, request: wire.Open, run: RunId) -> OpenReply:
        return await self._ledger.open(
            run,
            OwnerId(request.owner),
            request.draws,
            limit=request.limit,
            wait_s=min(request.wait_s, wire.MAX_WAIT_S),
            request_id=request.request_id,
        )

    async def heartbeat(self, request: wire.Heartbeat, run: RunId) -> wire.Empty:
        await self._ledger.heartbeat(run, OwnerId(request.owner))
        return wire.Empty()

    async def submit(self, request: wire.Submit, run: RunId) -> wire.SubmitReply:
        return _view(wire.SubmitReply, await self._ledger.submit(run, _submission(request)))

    async def submit_many(self, request: wire.SubmitMany, run: RunId) -> wire.SubmitManyReply:
        """One result per group, in the order of the request. A rejected group does not affect the others."""
        results: dict[int, wire.SubmitResult] = {}
        valid: dict[int, Submission] = {}
        for at, group in enumerate(request.groups):
            try:
                valid[at] = _submission(group)
            except RunError as error:
                results[at] = _submit_error(error)
        outcomes = await self._ledger.submit_many(run, list(valid.values()))
        for at, outcome in zip(valid, outcomes, strict=True):
            if isinstance(outcome, RollbookError):
                results[at] = _submit_error(outcome)
            else:
                results[at] = wire.SubmitResult(receipt=outcome.receipt, next_part=outcome.next_part)
        return wire.SubmitManyReply(results=tuple(results[at] for at in range(len(request.groups))))

    async def close(self, request: wire.Close, run: RunId) -> wire.ReceiptReply:
        group_id, reason = GroupId(request.group_id), _drop_reason(request.reason)
        return wire.ReceiptReply(receipt=await self._ledger.close(run, group_id, reason, outcome=request.outcome))

    async def release(self, request: wire.Release, run: RunId) -> wire.Empty:
        await self._ledger.release(run, GroupId(request.group_id), attempt=request.attempt, cause=request.cause)
        return wire.Empty()

    async def exhausted(self, _: wire.Empty, run: RunId) -> wire.Empty:
        await self._ledger.exhausted(run)
        return wire.Empty()

    # ------------------------------------------------------------------ the trainer

    async def take_role(self, request: wire.TakeRole, run: RunId) -> TrainerRole:
        return await self._ledger.take_role(run, restored_step=request.restored_step)

    async def batch(self, request: wire.Batch, run: RunId) -> wire.BatchReply:
        wait_s = min(request.wait_s, wire.MAX_WAIT_S)
        decided = await self._ledger.decide(run, request.step, epoch=request.epoch, wait_s=wait_s)
        if isinstance(decided, BatchManifest):
            return wire.BatchReply(manifest=decided)
        return wire.BatchReply(end=decided)

    async def payloads(self, request: wire.Payloads, run: RunId, *, http: web.Request) -> web.StreamResponse:
        decided = await self._ledger.decide(run, request.step, epoch=request.epoch, wait_s=0.0)
        if not isinstance(decided, BatchManifest):
            raise RunError(
                f"run {run}: batch {request.step} is not decided and has no payloads; request the batch first"
            )
        return await send_frames(http, self._ledger.payloads(run, decided), is_compressed=wants_zstd(http))

    async def acknowledge(self, request: wire.Acknowledge, run: RunId) -> wire.AcknowledgeReply:
        unusable = {GroupId(group): reason for group, reason in request.unusable.items()}
        receipt = await self._ledger.acknowledge(
            run, request.step, request.weights_digest, epoch=request.epoch, unusable=unusable
        )
        return wire.AcknowledgeReply(receipt=receipt)

    async def register(self, request: wire.Register, run: RunId) -> Publication:
        return await self._ledger.register(run, request.step, request.weights_digest, epoch=request.epoch)

    async def confirm(self, request: wire.Confirm, run: RunId) -> wire.Empty:
        await self._ledger.confirm(run, request.publication, epoch=request.epoch)
        return wire.Empty()

    async def checkpointed(self, request: wire.Checkpointed, run: RunId) -> wire.Empty:
        await self._ledger.checkpointed(run, request.step, oldest_kept=request.oldest_kept, epoch=request.epoch)
        return wire.Empty()

    async def finish(self, request: wire.Finish, run: RunId) -> wire.Empty:
        await self._ledger.finish(run, request.reason, epoch=request.epoch)
        return wire.Empty()


def _checked(name: str, value: str) -> str:
    if name == "run" and ("\x00" in value or len(value) > MAX_RUN_NAME):
        raise NotFoundError("the ledger has no run of that name")
    return value


def _read_query(request: web.Request, expected: type[M]) -> M:
    """The query parameters as a message. Unknown parameters are ignored."""
    names = expected.__struct_encode_fields__
    return convert({name: request.query[name] for name in names if name in request.query}, expected, strict=False)


def _submission(request: wire.Submit) -> Submission:
    group = EncodedGroup(
        id=GroupId(request.group_id),
        task_id=TaskId(request.task_id),
        draw=request.draw,
        publications=request.publications,
        payload=request.payload,
        digest=request.payload_digest,
    )
    drop = None if request.drop is None else _drop_reason(request.drop)
    return Submission.of(group, request.outcome, attempt=request.attempt, drop=drop, producer=request.producer)


def _drop_reason(text: str) -> DropReason:
    try:
        return DropReason.parse(text)
    except ValueError as error:
        raise RunError(f"{text!r} is not a drop reason: {error}") from error


def _submit_error(error: RollbookError) -> wire.SubmitResult:
    failed = wire.SubmitError(
        status=status_of(error).value,
        kind=type(error).__name__,
        message=str(error),
        retry_after_s=getattr(error, "retry_after_s", None),
    )
    return wire.SubmitResult(error=failed)


def _view(kind: type[M], record: object, **changes: object) -> M:
    """A record as a message: the fields of the message, taken from the record unless given in `changes`."""
    names = (name for name in kind.__struct_fields__ if name not in changes)
    return kind(**{name: getattr(record, name) for name in names}, **changes)


def _group_view(group: GroupRecord) -> wire.GroupView:
    outcome = None if group.outcome is None else json_decoder(GroupOutcome).decode(group.outcome)
    return _view(wire.GroupView, group, outcome=outcome)


def _producer_view(producer: ProducerRecord) -> wire.ProducerView:
    return _view(wire.ProducerView, producer)
