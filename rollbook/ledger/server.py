"""HTTP in: parse, call the service, reply. MessagePack bodies under `/v1/runs/{run}/…`; errors as `{kind, message}`."""

import struct
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rollbook.contracts.admission import OwnerId, RunId
from rollbook.contracts.batch import BatchManifest
from rollbook.contracts.errors import FencedError, RunError, TransientError
from rollbook.contracts.group import DropReason, GroupId
from rollbook.contracts.task import TaskId
from rollbook.ledger import wire
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.group_frame import payload_digest
from rollbook.ledger.rules.book import UnknownRunError
from rollbook.ledger.rules.groups import QueueFullError, Submission
from rollbook.ledger.service import Ledger
from rollbook.ledger.store import StoreFaultError

M = TypeVar("M", bound=wire.Message)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MEGABYTE = 1_000_000
MOST_WAIT_S = 60.0
"""Longest long-poll: below the idle limits of common proxies."""

DEFAULT_PAGE = 1000

# First match wins, so the narrower class stands first.
STATUS_OF: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (FencedError, HTTPStatus.CONFLICT),
    (UnknownRunError, HTTPStatus.NOT_FOUND),
    (StoreFaultError, HTTPStatus.INSUFFICIENT_STORAGE),
    (QueueFullError, HTTPStatus.TOO_MANY_REQUESTS),
    (TransientError, HTTPStatus.SERVICE_UNAVAILABLE),
    (RunError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (msgspec.ValidationError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (msgspec.DecodeError, HTTPStatus.BAD_REQUEST),
)


def build_app(ledger: Ledger, config: LedgerConfig) -> web.Application:
    app = web.Application(client_max_size=int(config.max_body_mb * MEGABYTE), middlewares=[_explain_errors])
    routes = _Routes(ledger)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/v1/runs", routes.runs)
    app.router.add_put("/v1/runs/{run}", routes.create_run)
    app.router.add_get("/v1/runs/{run}/status", routes.status)
    app.router.add_get("/v1/runs/{run}/progress", routes.progress)
    app.router.add_get("/v1/runs/{run}/outcomes", routes.outcomes)
    for verb in _Routes.VERBS:
        app.router.add_post(f"/v1/runs/{{run}}/{verb}", getattr(routes, verb))

    async def stop_waiting(_: web.Application) -> None:
        ledger.stop_waiting()

    app.on_shutdown.append(stop_waiting)
    return app


class _Routes:
    VERBS = (
        *("join", "open", "heartbeat", "submit", "close", "release", "exhausted"),
        *("take_role", "batch", "payloads", "acknowledge", "register", "confirm", "checkpointed", "finish"),
    )

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "runs": len(await self._ledger.runs())})

    async def runs(self, _: web.Request) -> web.Response:
        return web.json_response(await self._ledger.runs())

    async def status(self, request: web.Request) -> web.Response:
        return _reply_as_asked(request, await self._ledger.status(_run(request)))

    async def progress(self, request: web.Request) -> web.Response:
        return _reply_as_asked(request, await self._ledger.progress(_run(request)))

    async def outcomes(self, request: web.Request) -> web.Response:
        page = await self._ledger.outcomes(
            _run(request),
            after=_number_asked(request, "after", default=-1),
            limit=_number_asked(request, "limit", default=DEFAULT_PAGE),
        )
        return _reply_as_asked(request, page)

    async def create_run(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.CreateRun)
        await self._ledger.create_run(_run(request), asked.settings)
        return _reply(wire.Empty())

    async def join(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.Join)
        owner = await self._ledger.join(_run(request), asked.owner_name, nonce=asked.nonce)
        return _reply(wire.Joined(owner=owner))

    async def open(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.Open)
        reply = await self._ledger.open(
            _run(request),
            OwnerId(asked.owner),
            asked.draws,
            limit=asked.limit,
            wait_s=min(asked.wait_s, MOST_WAIT_S),
            request_id=asked.request_id,
        )
        return _reply(reply)

    async def heartbeat(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.Heartbeat)
        await self._ledger.heartbeat(_run(request), OwnerId(asked.owner))
        return _reply(wire.Empty())

    async def submit(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.Submit)
        found = payload_digest(asked.payload)
        if found != asked.payload_digest:
            raise RunError(
                f"group {asked.group_id}: its payload has digest {found}, not {asked.payload_digest}: damaged"
            )
        submission = Submission(
            group_id=GroupId(asked.group_id),
            task_id=TaskId(asked.task_id),
            draw=asked.draw,
            attempt=asked.attempt,
            publications=asked.publications,
            outcome=asked.outcome,
            payload=asked.payload,
            payload_digest=asked.payload_digest,
            drop=None if asked.drop is None else _drop_reason(asked.drop),
        )
        return _reply(wire.Receipted(receipt=await self._ledger.submit_encoded(_run(request), submission)))

    async def close(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.Close)
        receipt = await self._ledger.close(
            _run(request), GroupId(asked.group_id), _drop_reason(asked.reason), outcome=asked.outcome
        )
        return _reply(wire.Receipted(receipt=receipt))

    async def release(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.Release)
        await self._ledger.release(_run(request), GroupId(asked.group_id), attempt=asked.attempt, cause=asked.cause)
        return _reply(wire.Empty())

    async def exhausted(self, request: web.Request) -> web.Response:
        await self._ledger.exhausted(_run(request))
        return _reply(wire.Empty())

    async def take_role(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.TakeRole)
        return _reply(await self._ledger.take_role(_run(request), restored_step=asked.restored_step))

    async def batch(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.Batch)
        decided = await self._ledger.decide(
            _run(request), asked.step, epoch=asked.epoch, wait_s=min(asked.wait_s, MOST_WAIT_S)
        )
        if isinstance(decided, BatchManifest):
            return _reply(wire.BatchReply(manifest=decided))
        return _reply(wire.BatchReply(end=decided))

    async def payloads(self, request: web.Request) -> web.StreamResponse:
        """Stream the groups of a decided batch, each behind its length; never more than a few of them in memory."""
        asked = await _body(request, wire.Payloads)
        run_id = _run(request)
        decided = await self._ledger.decide(run_id, asked.step, epoch=asked.epoch, wait_s=0.0)
        if not isinstance(decided, BatchManifest):
            raise RunError(
                f"run {run_id}: batch {asked.step} is not decided, so it has no payloads; ask for the batch first"
            )
        stream = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await stream.prepare(request)
        async for payload in self._ledger.payloads(run_id, decided):
            await stream.write(struct.pack(">Q", len(payload)))
            await stream.write(payload)
        await stream.write_eof()
        return stream

    async def acknowledge(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.Acknowledge)
        receipt = await self._ledger.acknowledge(_run(request), asked.step, asked.weights_digest, epoch=asked.epoch)
        return _reply(wire.Acknowledged(receipt=receipt))

    async def register(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.Register)
        return _reply(await self._ledger.register(_run(request), asked.step, asked.weights_digest, epoch=asked.epoch))

    async def confirm(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.Confirm)
        await self._ledger.confirm(_run(request), asked.publication, epoch=asked.epoch)
        return _reply(wire.Empty())

    async def checkpointed(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.Checkpointed)
        await self._ledger.checkpointed(_run(request), asked.step, oldest_kept=asked.oldest_kept, epoch=asked.epoch)
        return _reply(wire.Empty())

    async def finish(self, request: web.Request) -> web.Response:
        asked = await _body(request, wire.Finish)
        await self._ledger.finish(_run(request), asked.reason, epoch=asked.epoch)
        return _reply(wire.Empty())


def _run(request: web.Request) -> RunId:
    return RunId(request.match_info["run"])


def _number_asked(request: web.Request, name: str, *, default: int) -> int:
    text = request.query.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise RunError(f"{name} is {text[:40]!r}; it must be a whole number") from error


async def _body(request: web.Request, expected: type[M]) -> M:
    return msgspec.msgpack.decode(await request.read(), type=expected)


def _drop_reason(text: str) -> DropReason:
    try:
        return DropReason.parse(text)
    except ValueError as error:
        raise RunError(f"{text!r} is no drop reason: {error}") from error


def _reply(answer: Any) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(answer), content_type=wire.CONTENT_TYPE)


def _reply_as_asked(request: web.Request, answer: Any) -> web.Response:
    if wire.CONTENT_TYPE in request.headers.get("Accept", ""):
        return _reply(answer)
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


@web.middleware
async def _explain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "BodyTooLarge", error.text or "the body is too large")
    except tuple(kind for kind, _ in STATUS_OF) as error:
        status = next(status for kind, status in STATUS_OF if isinstance(error, kind))
        refusal = _refusal(status, type(error).__name__, str(error))
        retry_after_s = getattr(error, "retry_after_s", None)
        if retry_after_s is not None:
            refusal.headers["Retry-After"] = f"{retry_after_s:g}"
        return refusal


def _refusal(status: HTTPStatus, kind: str, message: str) -> web.Response:
    """Readable for people with curl, structured for clients."""
    body = msgspec.json.encode(wire.ErrorReply(kind=kind, message=message))
    return web.Response(status=status, body=body, content_type="application/json")
