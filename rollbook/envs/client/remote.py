"""Opens environments for a rollout process: of a server at `env.url`, or its own.

    async with open_environments(config) as open_environment:
        async with open_environment() as env:
            seen = await env.reset(row)

On a server each episode holds one session and never requests a second, so episodes cannot deadlock.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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


@asynccontextmanager
async def open_environments(config: EnvConfig) -> AsyncIterator[OpenEnvironment]:
    if config.url is not None:
        token = None if config.token is None else config.token.get_secret_value()
        async with open_remote_environments(config.url, ClientOptions(token=token)) as open_environment:
            yield open_environment
        return
    source = EnvironmentSource(config)
    try:
        yield source.open
    finally:
        source.close()


@asynccontextmanager
async def open_remote_environments(url: str, options: ClientOptions = DEFAULTS) -> AsyncIterator[OpenEnvironment]:
    """Connect to a running server. Raises `TransientError` if it does not respond within `connect_s`."""
    url = url.rstrip("/")
    async with new_http(options) as http:
        deadline = Deadline(options.connect_s, f"connecting to {url}")
        await retry(lambda: _check_health(http, url, deadline=deadline), on=TransientError, deadline=deadline)

        @asynccontextmanager
        async def open_environment() -> AsyncIterator[EnvSession]:
            sessions = await open_sessions(http, url, 1, options)
            try:
                yield sessions[0]
            finally:
                await close_sessions(sessions, options)

        yield open_environment


async def _check_health(http: ClientSession, url: str, *, deadline: Deadline) -> None:
    try:
        async with deadline.limit(f"checking {url}"), http.get(f"{url}{HEALTH_PATH}") as reply:
            if reply.status != 200:
                raise TransientError(f"{url}{HEALTH_PATH} replied {reply.status}; the server is not ready")
    except DeadlineExceededError as error:
        raise TransientError(str(error)) from error
    except (ClientError, OSError) as error:
        raise TransientError(f"no reply from {url}: {error}; is the server running?") from error
