"""Where a session's environment comes from: the seam between who serves environments and who keeps them.

    async with open_environment_pool(config, size=8, log=log) as environments:      # returns when every slot is ready
        environment = await environments.acquire(Deadline(30.0, "session"))     # waits its turn, first come first served
        ...
        await environment.close()                                         # gives back what the environment held; twice does no harm

Most environments are objects and cost nothing; they are made on the spot, up to `size` at a time. An environment that owns a
process brings its
own pool: its class offers `open_pool`, and `acquire` hands out an environment that holds one slot until it is closed.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.contracts.environment import Observation
from rollbook.contracts.errors import TransientError
from rollbook.contracts.ports import Environment
from rollbook.envs.catalog import EnvironmentSource, environment_class
from rollbook.envs.config import EnvConfig
from rollbook.telemetry.events import EventLog


class EnvironmentsExhaustedError(TransientError):
    """Every environment is taken, and none came back within the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHealth:
    """How a pool stands. `replaced` counts slots that died or leaked and were made anew since it was opened."""

    capacity: int | None
    busy: int
    replaced: int = 0
    is_ready: bool = True

    @property
    def free(self) -> int | None:
        return None if self.capacity is None else max(0, self.capacity - self.busy)


class EnvironmentPool(Protocol):
    """Keeps environments and lends them, one to a session."""

    @property
    def capacity(self) -> int | None:
        """How many environments can be out at the same time; None when the pool sets no bound."""

    async def acquire(self, deadline: Deadline) -> Environment:
        """An environment nobody else holds. Raises `EnvironmentsExhaustedError` when none came free in time. `close()` gives
        it back.
        """

    def health(self) -> PoolHealth:
        """Asked often (every health check of the server): it waits for nothing."""


class BringsItsPool(Protocol):
    """The class of an environment that brings its own pool. `args` are the `[env] args` of the config."""

    @classmethod
    def open_pool(
        cls, *, size: int | None, log: EventLog, args: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[EnvironmentPool]: ...


@asynccontextmanager
async def open_environment_pool(
    config: EnvConfig, *, size: int | None, log: EventLog
) -> AsyncIterator[EnvironmentPool]:
    """The pool behind a name of the catalog, ready to serve. `size` None: as many as the environment itself allows."""
    kind = environment_class(config.name)
    if callable(getattr(kind, "open_pool", None)):
        async with cast(BringsItsPool, kind).open_pool(size=size, log=log, args=config.args) as pool:
            yield pool
        return
    source = EnvironmentSource(config)
    try:
        yield InProcessPool(source, size=size)
    finally:
        source.close()


class InProcessPool:
    """Environments that are made on the spot. Satisfies `EnvironmentPool`; `size` bounds how many are out at the same time."""

    def __init__(self, source: EnvironmentSource, *, size: int | None) -> None:
        if size is not None and size < 1:
            raise ValueError(f"a pool of {size} environments serves nobody; size is at least 1, or None for no bound")
        self._source = source
        self._size = size
        self._busy = 0
        self._places = None if size is None else asyncio.Semaphore(size)

    @property
    def capacity(self) -> int | None:
        return self._size

    async def acquire(self, deadline: Deadline) -> Environment:
        if self._places is not None:
            try:
                async with deadline.limit("waiting for a free environment"):
                    await self._places.acquire()
            except DeadlineExceededError as error:
                raise EnvironmentsExhaustedError(f"all {self._size} environments are taken: {error}") from error
        self._busy += 1
        try:
            return PooledEnvironment(self._source(), self._given_back)
        except BaseException:
            self._given_back()
            raise

    def health(self) -> PoolHealth:
        return PoolHealth(capacity=self._size, busy=self._busy)

    def _given_back(self) -> None:
        self._busy -= 1
        if self._places is not None:
            self._places.release()


class GiveBack(Protocol):
    def __call__(self) -> None: ...


class PooledEnvironment:
    """An environment that tells its pool, once, when it is closed. Satisfies `Environment`."""

    def __init__(self, env: Environment, give_back: GiveBack) -> None:
        self._env = env
        self._give_back: GiveBack | None = give_back

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return await self._env.reset(task)

    async def step(self, action: str) -> Observation:
        return await self._env.step(action)

    async def close(self) -> None:
        give_back, self._give_back = self._give_back, None
        try:
            await self._env.close()
        finally:
            if give_back is not None:
                give_back()
