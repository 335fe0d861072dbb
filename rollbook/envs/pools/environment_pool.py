"""Where a session's world comes from: the seam between who serves worlds and who keeps them.

    async with open_worlds(config, size=8, log=log) as worlds:      # returns when every slot is ready
        world = await worlds.acquire(Deadline(30.0, "session"))     # waits its turn, first come first served
        ...
        await world.close()                                         # gives back what the world held; twice does no harm

Most worlds are objects and cost nothing; they are made on the spot, up to `size` at a time. A world that owns a process brings its
own pool: its class offers `open_pool`, and `acquire` hands out a world that holds one slot until it is closed.
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
from rollbook.envs.catalog import EnvironmentSource, world_class
from rollbook.envs.config import EnvConfig
from rollbook.telemetry.events import EventLog


class WorldsExhaustedError(TransientError):
    """Every world is taken, and none came back within the deadline."""


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


class WorldPool(Protocol):
    """Keeps worlds and lends them, one to a session."""

    @property
    def capacity(self) -> int | None:
        """How many worlds can be out at the same time; None when the pool sets no bound."""

    async def acquire(self, deadline: Deadline) -> Environment:
        """A world nobody else holds. Raises `WorldsExhaustedError` when none came free in time. `close()` gives it back."""

    def health(self) -> PoolHealth:
        """Asked often (every health check of the server): it waits for nothing."""


class PooledWorld(Protocol):
    """The class of a world that brings its own pool. `args` are the `[env] args` of the config."""

    @classmethod
    def open_pool(
        cls, *, size: int | None, log: EventLog, args: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[WorldPool]: ...


@asynccontextmanager
async def open_worlds(config: EnvConfig, *, size: int | None, log: EventLog) -> AsyncIterator[WorldPool]:
    """The pool behind a name of the catalog, ready to serve. `size` None: as many as the world itself allows."""
    kind = world_class(config.name)
    if callable(getattr(kind, "open_pool", None)):
        async with cast(PooledWorld, kind).open_pool(size=size, log=log, args=config.args) as pool:
            yield pool
        return
    source = EnvironmentSource(config)
    try:
        yield LightWorlds(source, size=size)
    finally:
        source.close()


class LightWorlds:
    """Worlds that are made on the spot. Satisfies `WorldPool`; `size` bounds how many are out at the same time."""

    def __init__(self, source: EnvironmentSource, *, size: int | None) -> None:
        if size is not None and size < 1:
            raise ValueError(f"a pool of {size} worlds serves nobody; size is at least 1, or None for no bound")
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
                async with deadline.limit("waiting for a free world"):
                    await self._places.acquire()
            except DeadlineExceededError as error:
                raise WorldsExhaustedError(f"all {self._size} worlds are taken: {error}") from error
        self._busy += 1
        try:
            return LentWorld(self._source(), self._given_back)
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


class LentWorld:
    """A world that tells its pool, once, when it is closed. Satisfies `Environment`."""

    def __init__(self, world: Environment, give_back: GiveBack) -> None:
        self._world = world
        self._give_back: GiveBack | None = give_back

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return await self._world.reset(task)

    async def step(self, action: str) -> Observation:
        return await self._world.step(action)

    async def close(self) -> None:
        give_back, self._give_back = self._give_back, None
        try:
            await self._world.close()
        finally:
            if give_back is not None:
                give_back()
