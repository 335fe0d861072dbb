"""Opens environments for a rollout process: of one or several servers, or its own.

    async with open_environments(config) as open_environment:
        async with open_environment() as env:
            seen = await env.reset(row)

On a server each episode holds one session and never requests a second, so episodes cannot deadlock. With several servers, an
episode uses the one on which this process has the fewest sessions; if that one is full or gone, the next.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from aiohttp import ClientError, ClientSession

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.concurrency.retry import retry
from rollbook.contracts.errors import TransientError
from rollbook.contracts.ports import Environment
from rollbook.envs.catalog import EnvironmentSource
from rollbook.envs.client.session import DEFAULTS, ClientOptions, EnvSession, close_sessions, new_http, open_sessions
from rollbook.envs.config import EnvConfig
from rollbook.envs.server.protocol import HEALTH_PATH

OpenEnvironment: TypeAlias = Callable[[], AbstractAsyncContextManager[Environment]]
ServerSource: TypeAlias = Callable[[], Awaitable[Sequence[str]]]
"""Lists the environment servers, where the list may change."""

FOLLOW_S = 2.0
"""Interval at which the list of servers is read."""
TRY_S = 2.0
"""How long a session waits for a full server before it tries another one."""
ROUND_PAUSE_S = 0.2
"""After all servers were tried."""


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
        deadline = Deadline(options.connect_s, f"connecting to {url}")
        await retry(lambda: _check_health(http, url, deadline=deadline), on=TransientError, deadline=deadline)
        servers = _Servers([url])
        following = [] if source is None else [asyncio.create_task(servers.follow(source), name="envs.follow")]
        try:
            yield partial(servers.session, http, options)
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)


class _Servers:
    """The environment servers, and the number of sessions that this process has on each."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)
        self._sessions: Counter[str] = Counter()

    async def follow(self, source: ServerSource) -> None:
        """Read the list of servers again and again. The last one is used while it is unknown. Ends: on cancellation."""
        while True:
            with suppress(TransientError):
                self._urls = [url.rstrip("/") for url in await source()] or self._urls
            await asyncio.sleep(FOLLOW_S)

    @asynccontextmanager
    async def session(self, http: ClientSession, options: ClientOptions) -> AsyncIterator[EnvSession]:
        url, session = await self._open(http, options)
        self._sessions[url] += 1
        try:
            yield session
        finally:
            self._sessions[url] -= 1
            await close_sessions([session], options)

    async def _open(self, http: ClientSession, options: ClientOptions) -> tuple[str, EnvSession]:
        """Raises the error of the last server that was tried."""
        deadline = Deadline(options.connect_s, "opening an environment")
        while True:
            urls = sorted(self._urls, key=lambda url: self._sessions[url])
            for url in urls:
                wait_s = options.connect_s if len(urls) == 1 else TRY_S
                try:
                    return url, (await open_sessions(http, url, 1, replace(options, connect_s=wait_s)))[0]
                except (TransientError, DeadlineExceededError):
                    if len(urls) == 1 or deadline.is_over:
                        raise
            await asyncio.sleep(ROUND_PAUSE_S)


async def _check_health(http: ClientSession, url: str, *, deadline: Deadline) -> None:
    try:
        async with deadline.limit(f"checking {url}"), http.get(f"{url}{HEALTH_PATH}") as reply:
            if reply.status != 200:
                raise TransientError(f"{url}{HEALTH_PATH} replied {reply.status}; the server is not ready")
    except DeadlineExceededError as error:
        raise TransientError(str(error)) from error
    except (ClientError, OSError) as error:
        raise TransientError(f"no reply from {url}: {error}; is the server running?") from error
