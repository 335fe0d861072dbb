"""A ledger that people run on its own: the socket first, then the store, then answers, until it is told to stop.

The socket listens before the store is opened: whoever calls while a ledger recovers waits in the backlog and is never refused.
"""

import asyncio
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from aiohttp import web

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.contracts.errors import RunError
from rollbook.ledger.config import LedgerServerConfig
from rollbook.ledger.http.auth import Keys, Role, refuse_open_doors
from rollbook.ledger.http.errors import KNOWN, refusal
from rollbook.ledger.http.fast_path import HOT_ROUTES, answering
from rollbook.ledger.http.handlers import Handler, build_app
from rollbook.ledger.http.routes import EITHER
from rollbook.ledger.service import Ledger, open_ledger
from rollbook.ledger.store import Store
from rollbook.ledger.stores.registry import open_store
from rollbook.telemetry.events import EventLog

BACKLOG = 4096
"""Connections that may wait while a ledger restarts."""
WANTED_FILES = 65_536
"""Idle connections cost a descriptor each; ten thousand of them are common where many environments meet one ledger."""

Mount = Callable[[web.Application, Ledger, Store], None]
"""Adds another dialect to the application. Where tokens are set, its routes ask for that of a producer or a trainer."""


def keys_of(config: LedgerServerConfig) -> Keys:
    return Keys(
        {
            Role.PRODUCER: [token.get_secret_value() for token in config.producer_tokens],
            Role.TRAINER: [token.get_secret_value() for token in config.trainer_tokens],
            Role.VIEWER: [token.get_secret_value() for token in config.viewer_tokens],
        }
    )


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound, listening socket; port 0 lets the kernel choose."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host.strip("[]"), port))
    except OSError as error:
        sock.close()
        raise RunError(
            f"the ledger cannot listen on {host}:{port}: {error.strerror}; choose another address"
        ) from error
    sock.listen(BACKLOG)
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def allow_many_connections() -> int:
    """Raise this process's limit of open files as far as the system lets it; returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


async def serve_ledger(
    config: LedgerServerConfig,
    *,
    log: EventLog,
    stop: asyncio.Event | None = None,
    sock: socket.socket | None = None,
    clock: Clock | None = None,
    mount: Mount | None = None,
) -> None:
    """Serve until `stop` is set, or, without one, until SIGTERM or SIGINT. A second signal ends the process at once.

    `sock` is a listening socket that somebody else holds; the ledger then leaves it open for its successor.
    """
    keys = keys_of(config)
    refuse_open_doors(config.host, keys)
    allow_many_connections()
    own = None if sock is not None else listening_socket(config.host, config.port)
    listening = sock or own
    assert listening is not None
    try:
        async with (
            _stopped_by_signals(stop) as stopping,
            open_store(config.store, durability=config.ledger.durability) as store,
            open_ledger(store, config.ledger, clock=clock or SystemClock(), log=log) as ledger,
        ):
            app = build_app(ledger, config.ledger, keys=keys)
            if mount is not None:
                _mount(app, ledger, store, mount, keys)
            async with answering(app, listening.dup(), drain_s=config.drain_s, backlog=BACKLOG):
                url = url_of(listening)
                log.info("ledger.serving", url=url, roles=sorted(keys.roles))
                with _ready_file(config.ready_file, url):
                    await stopping.wait()
                log.info("ledger.stopping", drain_s=config.drain_s)
    finally:
        if own is not None:
            own.close()


def _mount(app: web.Application, ledger: Ledger, store: Store, mount: Mount, keys: Keys) -> None:
    """Add a dialect that knows nothing of tokens, behind a door that does."""
    native = {resource.canonical for resource in app.router.resources()}
    mount(app, ledger, store)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in native:
            try:
                keys.require(request.headers.get("Authorization"), EITHER)
            except KNOWN as error:
                return refusal(error)
        return await handler(request)

    if keys.roles:
        app[HOT_ROUTES].keep_native()
        app.middlewares.append(guarded)


@asynccontextmanager
async def _stopped_by_signals(stop: asyncio.Event | None) -> AsyncIterator[asyncio.Event]:
    if stop is not None:
        yield stop
        return
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def asked_to_stop(number: int) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop, number)
    try:
        yield stopping
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextmanager
def _ready_file(path: Path | None, url: str) -> Iterator[None]:
    """There while the ledger answers. Written beside and moved into place: nobody reads half an address."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(f"{url}\n", encoding="utf-8")
    beside.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
