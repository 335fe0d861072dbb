"""Environments of a server elsewhere, one connection for each episode: what a rollout process uses in place of environments of
its own.

    async with open_remote_pool("http://env-server:8000") as environments:
        async with environments.open() as environment:                  # waits for a place in the server's queue
            seen = await environment.reset(row)

Each episode holds one session and asks for no second, so episodes of different groups never wait for each other in a circle.
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
from rollbook.envs.client.group import drop_ticket, take_ticket
from rollbook.envs.client.session import DEFAULTS, ClientOptions, EnvSession, ServerFullError, connect, new_http
from rollbook.envs.config import EnvConfig
from rollbook.envs.environment import EnvironmentsExhaustedError, PooledEnvironment, PoolHealth
from rollbook.envs.server.protocol import HEALTH_PATH

OpenEnvironment: TypeAlias = Callable[[], AbstractAsyncContextManager[Environment]]


@asynccontextmanager
async def open_remote_pool(url: str, options: ClientOptions = DEFAULTS) -> AsyncIterator["RemotePool"]:
    """Connect to a server that is up. Raises `TransientError` when it does not answer within `connect_s`."""
    url = url.rstrip("/")
    async with new_http(options) as http:
        deadline = Deadline(options.connect_s, f"asking {url} for its capacity")
        capacity = await retry(lambda: ask_capacity(http, url, deadline=deadline), on=TransientError, deadline=deadline)
        yield RemotePool(http, url, options, capacity=capacity)


@asynccontextmanager
async def open_environments(config: EnvConfig) -> AsyncIterator[OpenEnvironment]:
    """How a rollout process opens an environment for an episode: of the server at `url`, or one of its own."""
    if config.url is not None:
        token = None if config.token is None else config.token.get_secret_value()
        async with open_remote_pool(config.url, ClientOptions(token=token)) as environments:
            yield environments.open
        return
    source = EnvironmentSource(config)
    try:
        yield source.open
    finally:
        source.close()


async def ask_capacity(http: ClientSession, url: str, *, deadline: Deadline) -> int | None:
    """How many sessions a server has; None from one that does not tell."""
    try:
        async with deadline.limit(f"asking {url}"), http.get(f"{url}{HEALTH_PATH}") as reply:
            if reply.status != 200:
                raise TransientError(f"{url}{HEALTH_PATH} answered {reply.status}; the server is not ready")
            body = await reply.json(content_type=None)
    except DeadlineExceededError as error:
        raise TransientError(str(error)) from error
    except (ClientError, OSError, ValueError) as error:
        raise TransientError(f"no answer from {url}: {error}; is the server running?") from error
    capacity = body.get("capacity") if isinstance(body, dict) else None
    return capacity if isinstance(capacity, int) else None


class RemotePool:
    """Satisfies `EnvironmentPool`; `open` is the way rollouts open an environment."""

    def __init__(self, http: ClientSession, url: str, options: ClientOptions, *, capacity: int | None) -> None:
        self._http = http
        self._url = url
        self._options = options
        self._capacity = capacity
        self._busy = 0

    @property
    def capacity(self) -> int | None:
        return self._capacity

    async def acquire(self, deadline: Deadline) -> PooledEnvironment:
        """A session of its own. Raises `EnvironmentsExhaustedError` when no place came free in time."""
        try:
            session = await retry(lambda: self._connect(deadline), on=ServerFullError, deadline=deadline)
        except ServerFullError as error:
            raise EnvironmentsExhaustedError(str(error)) from error
        self._busy += 1
        return PooledEnvironment(session, self._given_back)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[PooledEnvironment]:
        """An environment for one episode, given back at its end however it ends."""
        env = await self.acquire(Deadline(self._options.connect_s, f"a session of {self._url}"))
        try:
            yield env
        finally:
            await env.close()

    def health(self) -> PoolHealth:
        return PoolHealth(capacity=self._capacity, busy=self._busy)

    async def _connect(self, deadline: Deadline) -> EnvSession:
        ticket = await take_ticket(self._http, self._url, 1, deadline=deadline)
        try:
            return await connect(self._http, self._url, self._options, deadline=deadline, ticket=ticket)
        except BaseException:
            if ticket is not None:
                await drop_ticket(self._http, self._url, ticket, within_s=self._options.close_s)
            raise

    def _given_back(self) -> None:
        self._busy -= 1
