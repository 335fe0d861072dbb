"""Composes a ledger service from its store, rules and HTTP application.

Used by `rollbook train`, `rollbook ledger serve` and `run-api` alike. The socket listens before the store is opened: clients that
connect while the ledger recovers wait in the backlog and are not refused.
"""

import asyncio
import ctypes
import os
import platform
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from rollbook.access.guard import AllowedClients, is_loopback
from rollbook.access.tokens import read_or_create_token
from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.errors import RunError
from rollbook.ledger.config import LedgerConfig, LedgerServerConfig
from rollbook.ledger.http.app import Dialect, LedgerService, build_service
from rollbook.ledger.http.auth import Keys, Role, require_tokens, steering_keys
from rollbook.ledger.service import open_ledger
from rollbook.ledger.store import Store
from rollbook.ledger.stores.registry import only_service, open_store
from rollbook.telemetry.events import EventLog

MAX_OPEN_FILES = 65_536
"""Each idle connection costs a file descriptor; a ledger that serves many environments has thousands of them."""
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
"""From glibc's <malloc.h>."""
MALLOC_OPTIONS = (
    (M_ARENA_MAX, 1),
    (M_MMAP_THRESHOLD, 8 << 20),
    (M_TRIM_THRESHOLD, 64 << 20),
    (M_TOP_PAD, 4 << 20),
)


@asynccontextmanager
async def open_ledger_service(
    store_url: str,
    config: LedgerConfig,
    *,
    log: EventLog,
    clock: Clock | None = None,
    keys: Keys | None = None,
    dialects: Sequence[Dialect] = (),
    wait_s: float = 0.0,
    run_directory: Path | None = None,
) -> AsyncIterator[LedgerService]:
    """Opens the store and the ledger on it. The caller then serves it with `LedgerService.serving`.

    A SQLite store that another process uses for longer than `wait_s` is refused. `run_directory`: where telemetry of processes on
    other machines is stored.
    """
    allow_many_connections()
    keep_memory_for_bodies()
    with only_service(store_url, wait_s=wait_s):
        async with (
            open_store(store_url, durability=config.durability, payloads=config.payloads) as store,
            ledger_service_on(
                store, config, log=log, clock=clock, keys=keys, dialects=dialects, run_directory=run_directory
            ) as service,
        ):
            yield service


@asynccontextmanager
async def ledger_service_on(
    store: Store,
    config: LedgerConfig,
    *,
    log: EventLog,
    clock: Clock | None = None,
    keys: Keys | None = None,
    dialects: Sequence[Dialect] = (),
    run_directory: Path | None = None,
) -> AsyncIterator[LedgerService]:
    clock = clock or SystemClock()
    async with open_ledger(store, config, clock=clock, log=log) as ledger:
        yield build_service(
            ledger, store, config, clock=clock, log=log, keys=keys, dialects=dialects, run_directory=run_directory
        )


async def serve_ledger(
    config: LedgerServerConfig,
    *,
    log: EventLog,
    stop: asyncio.Event | None = None,
    sock: socket.socket | None = None,
    dialects: Sequence[Dialect] = (),
) -> None:
    """Serve until `stop` is set or, without one, until SIGTERM or SIGINT. A second signal ends the process at once.

    `sock` is a listening socket of the caller. It stays open for a successor, and the caller decides who may reach it.
    """
    keys = keys_of(config, is_open=sock is not None or is_loopback(config.host))
    if sock is None:
        require_tokens(config.host, keys)
    own = _listening_socket(config.host, config.port) if sock is None else sock.dup()
    with own:
        async with (
            _stop_event(stop) as stopping,
            open_ledger_service(config.store, config.ledger, log=log, keys=keys, dialects=dialects) as service,
            service.serving(
                own.dup(),
                drain_s=config.drain_s,
                allowed=AllowedClients.of(config.allowed_hosts, config.allowed_origins),
            ),
        ):
            url = url_of(own)
            log.info("ledger.serving", url=url, roles=sorted(keys.roles))
            with _ready_file(config.ready_file, url):
                await stopping.wait()
            log.info("ledger.stopping", drain_s=config.drain_s)


def keys_of(config: LedgerServerConfig, *, is_open: bool = True) -> Keys:
    """`is_open`: without tokens by role, producers and viewers need no token."""
    by_role = {
        Role.PRODUCER: [token.get_secret_value() for token in config.producer_tokens],
        Role.TRAINER: [token.get_secret_value() for token in config.trainer_tokens],
        Role.VIEWER: [token.get_secret_value() for token in config.viewer_tokens],
        Role.OPERATOR: [token.get_secret_value() for token in config.operator_tokens],
    }
    if config.token_file is None:
        return Keys(by_role)
    token = read_or_create_token(config.token_file)
    if is_open and not any(by_role.values()):
        return steering_keys(token)
    return Keys({role: [token, *tokens] for role, tokens in by_role.items()})


def _listening_socket(host: str, port: int) -> socket.socket:
    try:
        return listening_socket(host, port)
    except OSError as error:
        raise RunError(
            f"the ledger cannot listen on {host}:{port}: {error.strerror}; choose another address"
        ) from error


def allow_many_connections() -> int:
    """Raise this process's limit of open files as far as the system allows. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


def keep_memory_for_bodies() -> None:
    """Make glibc keep freed memory for the next body, in one heap for all threads. Call it before threads are started.

    By default glibc returns a body of a few hundred kilobytes to the system at once, and the memory that the event loop allocates
    and the store's thread frees belongs to different heaps. This saves about 5 % of the CPU time of JSON posts of 266 KB.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in MALLOC_OPTIONS:
            mallopt(option, value)


@asynccontextmanager
async def _stop_event(stop: asyncio.Event | None) -> AsyncIterator[asyncio.Event]:
    """`stop`, or an event that SIGTERM and SIGINT set."""
    if stop is not None:
        yield stop
        return
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stopping
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextmanager
def _ready_file(path: Path | None, url: str) -> Iterator[None]:
    """A file with the address, present while the ledger serves. It is moved into place, so that it is never read half-written."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(f"{url}\n", encoding="utf-8")
    temporary.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
