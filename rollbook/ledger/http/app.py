"""The HTTP application of a ledger: the native API, and other dialects of the same ledger."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from rollbook.access.guard import REFUSE, AllowedClients, Problem
from rollbook.access.server import for_any_name, serve_app
from rollbook.concurrency.clock import Clock
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http.auth import Keys
from rollbook.ledger.http.bodies import BodyReader, UnsupportedBodyError
from rollbook.ledger.http.errors import KNOWN_ERRORS, RefusedClientError, error_response
from rollbook.ledger.http.handlers import Handler, LedgerHandlers
from rollbook.ledger.http.metrics import RequestMetrics
from rollbook.ledger.http.verbs import PRODUCER, TRAINER, VERBS
from rollbook.ledger.service import Ledger
from rollbook.ledger.store import Store
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.shipping import ReceivedFiles

READ_BUFFER_BYTES = 1 << 20
"""Unread bytes of one connection. With aiohttp's default of 64 KB, reading would pause several times per body."""


OPENAPI_PATH = "/v1/openapi.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerService:
    """An open ledger and its HTTP application."""

    ledger: Ledger
    store: Store
    app: web.Application
    bodies: BodyReader
    config: LedgerConfig
    clock: Clock
    log: EventLog
    requests: RequestMetrics
    """Dialects count their requests here."""

    @asynccontextmanager
    async def serving(
        self, sock: socket.socket, *, drain_s: float, allowed: AllowedClients | None = None
    ) -> AsyncIterator[None]:
        """Serve requests on a listening socket. At the end, requests in progress get `drain_s` seconds to finish."""
        async with serve_app(self.app, sock, allowed=allowed, drain_s=drain_s, read_buffer_bytes=READ_BUFFER_BYTES):
            yield


Dialect = Callable[[LedgerService], None]
"""Adds the routes of another API to the application. If tokens are set, its routes require one of a producer or trainer."""


def build_service(
    ledger: Ledger,
    store: Store,
    config: LedgerConfig,
    *,
    clock: Clock,
    log: EventLog,
    keys: Keys | None = None,
    dialects: Sequence[Dialect] = (),
    run_directory: Path | None = None,
) -> LedgerService:
    """Without `keys` no request requires a token: for tests, and for a ledger inside another service.

    `run_directory`: where telemetry of processes on other machines is stored.
    """
    keys = keys or Keys({})
    bodies = BodyReader(config)
    # `bodies` limits the size of a body. This limit only guards against handlers that do not use it.
    app = web.Application(client_max_size=bodies.max_bytes)
    app[REFUSE] = refuse
    telemetry = None if run_directory is None else ReceivedFiles(run_directory)
    handlers = LedgerHandlers(ledger, bodies, telemetry=telemetry)
    # aiohttp tries routes in order: `submit`, the most frequent request, goes first.
    for verb in sorted(VERBS, key=lambda verb: verb.name != "submit"):
        handler = handlers.handler(verb, keys)
        app.router.add_route(verb.method, for_any_name(verb.path), handler)
        if verb.path == OPENAPI_PATH and not dialects:
            # A dialect has its own document at the root, where its clients look for it.
            app.router.add_route(verb.method, "/openapi.json", handler)

    async def measure_loop_lag(_: web.Application) -> AsyncIterator[None]:
        measuring = asyncio.create_task(handlers.lag.run(), name="ledger.loop_lag")
        yield
        measuring.cancel()
        with suppress(asyncio.CancelledError):
            await measuring

    async def stop_waiting(_: web.Application) -> None:
        ledger.stop_waiting()

    app.cleanup_ctx.append(measure_loop_lag)
    app.on_shutdown.append(stop_waiting)
    service = LedgerService(
        ledger=ledger,
        store=store,
        app=app,
        bodies=bodies,
        config=config,
        clock=clock,
        log=log,
        requests=handlers.requests,
    )
    for dialect in dialects:
        dialect(service)
    if dialects and keys.roles and not keys.open_roles & PRODUCER:
        app.middlewares.append(_require_token(keys))
    return service


def refuse(_: web.Request, problem: Problem, message: str) -> web.StreamResponse:
    """The response to a request that the guard refused."""
    return error_response(
        UnsupportedBodyError(message) if problem is Problem.CONTENT_TYPE else RefusedClientError(message)
    )


def _require_token(keys: Keys) -> Middleware:
    """Checks the token for all routes but the native ones, which check it themselves."""
    native = {verb.path for verb in VERBS}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in native:
            try:
                keys.require(request.headers.get("Authorization"), PRODUCER | TRAINER)
            except KNOWN_ERRORS as error:
                return error_response(error)
        return await handler(request)

    return check
