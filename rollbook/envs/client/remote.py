"""Opens environments for a rollout process: of one or several servers, or its own.

    async with open_environments(config) as open_environment:
        async with open_environment() as env:
            seen = await env.reset(row)

On a server each episode holds one session and never requests a second, so episodes cannot deadlock. With several servers, an
episode uses the one on which this process has the fewest sessions; if that one is full or gone, the next. If all are full, it waits
in the queues of all of them, and the first free session is used.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from aiohttp import ClientConnectorDNSError, ClientConnectorError, ClientError, ClientSession

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.concurrency.retry import retry
from rollbook.contracts.errors import TransientError
from rollbook.contracts.ports import Environment
from rollbook.envs.catalog import EnvironmentSource
from rollbook.envs.client.actions import ActionForm, TypedSession, read_form
from rollbook.envs.client.session import (
    DEFAULTS,
    QUEUE_SHARE,
    ClientOptions,
    EnvSession,
    ServerFullError,
    close_sessions,
    new_http,
    open_reserved,
)
from rollbook.envs.config import EnvConfig
from rollbook.envs.server.protocol import HEALTH_PATH, SCHEMA_PATH
from rollbook.telemetry.waits import WAITS

OpenEnvironment: TypeAlias = Callable[[], AbstractAsyncContextManager[Environment]]
ServerSource: TypeAlias = Callable[[], Awaitable[Sequence[str]]]
"""Lists the environment servers, where the list may change."""

ABSENT_S = 20.0
"""How long nothing may listen at the address of a server before an error."""
FOLLOW_S = 2.0
"""Interval at which the list of servers is read."""
TRY_S = 2.0
"""How long a server may take to respond before another one is tried."""
AVOID_S = 5.0
"""How long a server that did not respond is tried last. One that is lost is no longer listed after its lease."""
ROUND_PAUSE_S = 0.2
"""After all servers were tried."""


class NoEnvServerError(TransientError):
    """Nothing listens at the address, or its host is unknown."""


class _AbsentTooLongError(Exception):
    """Nothing listened at the address for `ABSENT_S`: do not try again."""


@asynccontextmanager
async def open_environments(
    config: EnvConfig, *, servers: ServerSource | None = None
) -> AsyncIterator[OpenEnvironment]:
    """`servers`: lists the servers, for an environment at `config.url`."""
    if config.url is not None:
        token = None if config.token is None else config.token.get_secret_value()
        options = ClientOptions(token=token)
        async with open_remote_environments(config.url, options, source=servers) as open_environment:
            yield open_environment
        return
    source = EnvironmentSource(config)
    try:
        yield source.open
    finally:
        source.close()


@asynccontextmanager
async def open_remote_environments(
    url: str, options: ClientOptions = DEFAULTS, *, source: ServerSource | None = None
) -> AsyncIterator[OpenEnvironment]:
    """Connect to a running server. Raises `TransientError` if it does not respond within `connect_s`."""
    url = url.rstrip("/")
    async with new_http(options) as http:
        await _until_healthy(http, url, options)
        deadline = Deadline(options.connect_s, f"reading the schema of {url}")
        form = await read_form(http, url, SCHEMA_PATH, deadline=deadline)
        if form is not None and set(form.fields) == {options.action_field}:
            form = None  # a server of ours
        servers = _Servers([url], form)
        following = [] if source is None else [asyncio.create_task(servers.follow(source), name="envs.follow")]
        try:
            yield partial(servers.session, http, options)
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)


class _Servers:
    """The environment servers, and the number of sessions that this process has on each."""

    def __init__(self, urls: Sequence[str], form: ActionForm | None) -> None:
        self._urls = list(urls)
        self._form = form
        self._sessions: Counter[str] = Counter()
        self._avoided: dict[str, float] = {}
        """Servers that did not respond, with the time until which others are tried first."""
        self._changed = asyncio.Event()

    async def follow(self, source: ServerSource) -> None:
        """Read the list of servers again and again. The last one is used while it is unknown. Ends: on cancellation."""
        while True:
            with suppress(TransientError):
                found = [url.rstrip("/") for url in await source()] or self._urls
                if found != self._urls:
                    self._urls = found
                    self._changed.set()
                    self._changed = asyncio.Event()
            await asyncio.sleep(FOLLOW_S)

    @asynccontextmanager
    async def session(self, http: ClientSession, options: ClientOptions) -> AsyncIterator[Environment]:
        if self._form is not None:
            options = replace(options, task_field=None)
        url, session = await self._open(http, options)
        self._sessions[url] += 1
        try:
            yield session if self._form is None else TypedSession(session, self._form)
        finally:
            self._sessions[url] -= 1
            await close_sessions([session], options)

    async def _open(self, http: ClientSession, options: ClientOptions) -> tuple[str, EnvSession]:
        """Raises the error of the last server that was tried."""
        deadline = Deadline(options.connect_s, "opening an environment")
        while True:
            last: Exception | None = None
            for url in self._in_order():
                try:
                    return url, await self._open_now(http, url, options, deadline)
                except ServerFullError as error:
                    last = error
                except (TransientError, DeadlineExceededError) as error:
                    last = error
                    self._avoided[url] = time.monotonic() + AVOID_S
            assert last is not None
            if len(self._urls) == 1 and not isinstance(last, ServerFullError):
                raise last
            if (found := await self._wait_in_queues(http, options, deadline)) is not None:
                return found
            await asyncio.sleep(ROUND_PAUSE_S)
            if deadline.is_over:
                raise last

    async def _open_now(self, http: ClientSession, url: str, options: ClientOptions, deadline: Deadline) -> EnvSession:
        """Without a wait. The first start of an environment may take long, so only the reservation has a short limit."""
        respond_s = TRY_S if len(self._urls) > 1 else None
        return (await open_reserved(http, url, 1, options, deadline=deadline, wait_s=0.0, respond_s=respond_s))[0]

    def _in_order(self) -> list[str]:
        now = time.monotonic()
        return sorted(self._urls, key=lambda url: (self._avoided.get(url, 0.0) > now, self._sessions[url]))

    async def _wait_in_queues(
        self, http: ClientSession, options: ClientOptions, deadline: Deadline
    ) -> tuple[str, EnvSession] | None:
        """Wait in the queue of every server; the first free session is used. None: there was none, or the list has changed."""
        wait_s = QUEUE_SHARE * deadline.remaining_s()
        changed = asyncio.create_task(self._changed.wait(), name="envs.changed")
        waits = {
            asyncio.create_task(
                open_reserved(http, url, 1, options, deadline=deadline, wait_s=wait_s), name=f"envs.wait {url}"
            ): url
            for url in self._urls
        }
        found: tuple[str, EnvSession] | None = None
        try:
            while found is None and not changed.done() and (left := {task for task in waits if not task.done()}):
                await asyncio.wait({changed, *left}, return_when=asyncio.FIRST_COMPLETED)
                opened = [task for task in waits if _is_open(task)]
                if opened:
                    found = waits[opened[0]], opened[0].result()[0]
            return found
        finally:
            for task in (changed, *waits):
                task.cancel()
            await asyncio.gather(changed, *waits, return_exceptions=True)
            # Another server may have granted a session at the same moment.
            granted = [task.result()[0] for task in waits if _is_open(task)]
            await close_sessions([s for s in granted if found is None or s is not found[1]], options)


def _is_open(task: "asyncio.Task[list[EnvSession]]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _until_healthy(http: ClientSession, url: str, options: ClientOptions) -> None:
    """Wait until the server responds. If nothing listens at its address, not long: it may be wrong."""
    what = f"the environment server at {url}"
    deadline, absent = (
        Deadline(seconds, f"connecting to {url}") for seconds in (options.connect_s, min(options.connect_s, ABSENT_S))
    )

    async def attempt() -> None:
        try:
            await _check_health(http, url, deadline=deadline)
        except NoEnvServerError as error:
            if absent.is_over:
                raise _AbsentTooLongError(
                    f"{error} Nothing listened there for {absent.seconds:g} s. Start the server, or correct env.url."
                ) from error
            raise

    def on_retry(error: Exception, _wait_s: float) -> None:
        WAITS.failing(what, str(error))

    try:
        await retry(attempt, on=TransientError, deadline=deadline, on_retry=on_retry)
    except _AbsentTooLongError as error:
        raise TransientError(str(error)) from error.__cause__
    WAITS.recovered(what)


async def _check_health(http: ClientSession, url: str, *, deadline: Deadline) -> None:
    try:
        async with deadline.limit(f"checking {url}"), http.get(f"{url}{HEALTH_PATH}") as reply:
            if reply.status != 200:
                raise TransientError(f"{url}{HEALTH_PATH} replied {reply.status}; the server is not ready")
    except DeadlineExceededError as error:
        raise TransientError(str(error)) from error
    except (ClientConnectorDNSError, ClientConnectorError) as error:
        is_absent = isinstance(error, ClientConnectorDNSError) or isinstance(error.os_error, ConnectionRefusedError)
        kind = NoEnvServerError if is_absent else TransientError
        raise kind(f"no reply from {url}: {error}; is the server running?") from error
    except (ClientError, OSError) as error:
        raise TransientError(f"no reply from {url}: {error}; is the server running?") from error
