"""HTTP in: the routes of the dialect, at the root for one run and under `/atropos/RUN` for any other."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec
from aiohttp import web
from isal import isal_zlib
from pydantic import BaseModel, ValidationError

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import TransientError
from rollbook.ledger.atropos.batches import deliver_batch
from rollbook.ledger.atropos.bodies import (
    body_answer,
    deliver,
    json_answer,
    read_body,
    require_json_type,
    unpack,
    unpacked_size,
)
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.models import (
    EMPTY_EXAMPLE,
    EnvIdentifier,
    RegisterEnv,
    Registration,
    refuse_extremes,
)
from rollbook.ledger.atropos.openapi import DOCS_PAGE, OPENAPI
from rollbook.ledger.atropos.posts import Incoming, Post
from rollbook.ledger.atropos.refusals import KNOWN, error_answer
from rollbook.ledger.atropos.rules import NoTrainerError, UnknownEnvError
from rollbook.ledger.atropos.scored_data import PostedGroup, read_group, read_groups, read_message, refused
from rollbook.ledger.atropos.service import AtroposService, open_atropos_service
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http.bodies import BodyReader
from rollbook.ledger.http.fast_path import HOT_ROUTES, Asked, HotConnection, HotReply, HotRoute
from rollbook.ledger.rules.run_transaction import UnknownRunError
from rollbook.ledger.store import Store
from rollbook.telemetry.events import EventLog

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PREFIX = "/atropos/{run}"
NATIVE = ("/v1", "/health", "/metrics")
"""Paths of the native API: their errors have its shape."""
CLIENT_GONE = 499
NOT_REGISTERED = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
LARGE = 1 << 20
"""A larger body is looked at in a thread."""


def add_atropos(
    app: web.Application,
    *,
    store: Store,
    config: AtroposConfig,
    limits: LedgerConfig,
    clock: Clock,
    log: EventLog,
) -> None:
    """Mount the dialect on the ledger's app."""
    aiohttp.set_zlib_backend(isal_zlib)  # reads gzip at a third of the cost
    desks = _Desks(store=store, config=config, limits=limits, clock=clock, log=log)
    routes = _Routes(desks, app[HOT_ROUTES].bodies)
    app[HOT_ROUTES].add(routes.hot_post())
    app.cleanup_ctx.append(desks.opened)
    app.middlewares.append(_speak_atropos)
    for prefix in ("", PREFIX):
        for method, path, handler in routes.table():
            app.router.add_route(method, f"{prefix}{path}", handler)


class _Desks:
    """One desk for each run that is spoken to."""

    def __init__(
        self, *, store: Store, config: AtroposConfig, limits: LedgerConfig, clock: Clock, log: EventLog
    ) -> None:
        self.config = config
        self._store = store
        self.limits = limits
        self._clock = clock
        self._log = log
        self._open: dict[RunId, AtroposService] = {}
        self._stack = AsyncExitStack()

    async def opened(self, _: web.Application) -> AsyncIterator[None]:
        async with self._stack:
            await self.at(RunId(self.config.run))
            yield

    async def of(self, request: web.Request) -> AtroposService:
        return await self.at(RunId(request.match_info.get("run", self.config.run)))

    async def at(self, run_id: RunId) -> AtroposService:
        desk = self._open.get(run_id)
        if desk is None:
            desk = await self._stack.enter_async_context(
                open_atropos_service(
                    run_id,
                    store=self._store,
                    config=self.config,
                    limits=self.limits,
                    clock=self._clock,
                    log=self._log,
                )
            )
            self._open[run_id] = desk
        return desk


class _Routes:
    def __init__(self, desks: _Desks, bodies: BodyReader) -> None:
        self._desks = desks
        self._bodies = bodies

    def table(self) -> tuple[tuple[str, str, Handler], ...]:
        return (
            ("GET", "/", self.root),
            ("POST", "/register", self.register),
            ("POST", "/register-env", self.register_env),
            ("POST", "/disconnect-env", self.disconnect_env),
            ("GET", "/wandb_info", self.wandb_info),
            ("GET", "/info", self.info),
            ("GET", "/batch", self.batch),
            ("GET", "/latest_example", self.latest_example),
            ("POST", "/scored_data", self.scored_data),
            ("POST", "/scored_data_list", self.scored_data_list),
            ("GET", "/status", self.status),
            ("GET", "/status-env", self.status_env),
            ("GET", "/reset_data", self.reset_data),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/docs", self.docs),
        )

    async def root(self, request: web.Request) -> web.Response:
        return json_answer(request, {"message": "AtroposLib API"})

    async def register(self, request: web.Request) -> web.Response:
        asked = await self._message(request, Registration)
        desk = await self._desks.of(request)
        return json_answer(request, {"uuid": await desk.register(asked)})

    async def register_env(self, request: web.Request) -> web.Response:
        asked = await self._message(request, RegisterEnv)
        desk = await self._desks.of(request)
        registered = await desk.register_env(asked)
        return json_answer(request, registered or {"status": "wait for trainer to start"})

    async def disconnect_env(self, request: web.Request) -> web.Response:
        asked = await self._message(request, EnvIdentifier)
        desk = await self._desks.of(request)
        try:
            await desk.disconnect_env(asked.env_id)
        except UnknownEnvError as error:
            return json_answer(request, {"status": "failure", "error": str(error)})
        return json_answer(request, {"status": "success"})

    async def wandb_info(self, request: web.Request) -> web.Response:
        found = await (await self._desks.of(request)).registration()
        group, project = (None, None) if found is None else (found.wandb_group, found.wandb_project)
        return json_answer(request, {"group": group, "project": project})

    async def info(self, request: web.Request) -> web.Response:
        found = await (await self._desks.of(request)).registration()
        size, length = (-1, -1) if found is None else (found.batch_size, found.max_token_len)
        return json_answer(request, {"batch_size": size, "max_token_len": length})

    async def batch(self, request: web.Request) -> web.StreamResponse:
        desk = await self._desks.of(request)
        try:
            async with desk.batch() as handed:
                if handed is None:
                    return json_answer(request, {"batch": None})
                return await deliver_batch(request, desk, [entry.group_id for entry in handed.manifest.entries])
        except (UnknownRunError, NoTrainerError):
            return json_answer(request, NOT_REGISTERED)

    async def latest_example(self, request: web.Request) -> web.Response:
        found = await (await self._desks.of(request)).latest_example()
        return json_answer(request, EMPTY_EXAMPLE) if found is None else body_answer(request, found)

    async def scored_data(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        return await self._post(request, len(body), lambda: _post_of(read_group(body)))

    def hot_post(self) -> HotRoute:
        """The same without a framework around it, for the run at the root."""

        async def answer(asked: Asked, body: memoryview, connection: HotConnection) -> None:
            head = _HotHead({"Accept-Encoding": asked.headers.get(b"accept-encoding", b"").decode("latin-1")})
            is_packed = b"content-encoding" in asked.headers

            def read() -> Post:
                return _post_of(read_group(unpack(body, at_most=self._bodies.most_bytes) if is_packed else bytes(body)))

            try:
                incoming = await _incoming(unpacked_size(body) if is_packed else len(body), read)
                desk = await self._desks.at(RunId(self._desks.config.run))
                async with desk.posted(incoming) as told:
                    reply = HotReply(body=msgspec.json.encode(told), content_type="application/json")
                    await connection.deliver(reply)
            except KNOWN as error:
                connection.send(HotReply.of(error_answer(head, error)))

        return HotRoute(
            before=b"POST /scored_data HTTP/1.1",
            after=None,
            content_types=frozenset({b"application/json"}),
            encodings=frozenset({b"", b"gzip"}),
            answer=answer,
            refuse=lambda error: error_answer(_HotHead({}), TransientError(str(error))),
            body_s=self._desks.config.body_s,
            is_native=False,
        )

    async def scored_data_list(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        return await self._post(request, len(body), lambda: _list_of(read_groups(body)))

    async def _post(self, request: web.Request, size: int, read: Callable[[], Post]) -> web.Response:
        incoming = await _incoming(size, read)
        desk = await self._desks.of(request)
        async with desk.posted(incoming) as answer:
            return await deliver(request, json_answer(request, answer))

    async def status(self, request: web.Request) -> web.Response:
        return json_answer(request, await (await self._desks.of(request)).status())

    async def status_env(self, request: web.Request) -> web.Response:
        asked = await self._message(request, EnvIdentifier)
        return json_answer(request, await (await self._desks.of(request)).status_env(asked.env_id))

    async def reset_data(self, request: web.Request) -> web.Response:
        await (await self._desks.of(request)).reset()
        return web.Response(text="Reset successful")

    async def openapi(self, request: web.Request) -> web.Response:
        return body_answer(request, OPENAPI)

    async def docs(self, request: web.Request) -> web.Response:
        return body_answer(request, DOCS_PAGE, content_type="text/html")

    async def _body(self, request: web.Request) -> bytes:
        require_json_type(request)
        return await read_body(request, bodies=self._bodies, within_s=self._desks.config.body_s)

    async def _message(self, request: web.Request, expected: type[M]) -> M:
        found = read_message(await self._body(request))
        try:
            message = expected.model_validate(found, from_attributes=True)
        except ValidationError as error:
            raise refused(error) from None
        refuse_extremes(message)
        return message


def _post_of(group: PostedGroup) -> Post:
    return Post(digest=group.digest, groups=(group,), is_list=False)


def _list_of(groups: Sequence[PostedGroup]) -> Post:
    digest = hashlib.blake2b("\n".join(group.digest for group in groups).encode(), digest_size=16).hexdigest()
    return Post(digest=f"list {digest}", groups=tuple(groups), is_list=True)


async def _incoming(size: int, read: Callable[[], Post]) -> Incoming:
    """A body of usual size is looked at when its turn to be stored has come; a large one here, so that nobody waits for it."""
    incoming = Incoming(read)
    if size > LARGE:
        await asyncio.to_thread(incoming.parse)
    return incoming


@web.middleware
async def _speak_atropos(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in the dialect's shape, and permission for browsers from anywhere, as the original gives it."""
    if request.path.startswith(NATIVE):
        return await handler(request)
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        answer: web.StreamResponse = web.Response(text="OK", headers=_preflight(request))
    else:
        answer = await _answered(request, handler)
    if not answer.prepared and "Origin" in request.headers:
        answer.headers["Access-Control-Allow-Origin"] = "*"
        answer.headers["Access-Control-Allow-Credentials"] = "true"
    return answer


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionResetError:
        # Nobody hears this any more; what was to be remembered of it is.
        return web.Response(status=CLIENT_GONE)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        answer = json_answer(request, {"detail": error.reason}, status=error.status)
        if isinstance(error, web.HTTPMethodNotAllowed):
            answer.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return answer
    except KNOWN as error:
        return error_answer(request, error)


@dataclass(frozen=True, slots=True)
class _HotHead:
    headers: Mapping[str, str]


def _preflight(request: web.Request) -> dict[str, str]:
    return {
        "Access-Control-Allow-Methods": "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT",
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
        "Access-Control-Max-Age": "600",
        "Vary": "Origin",
    }
