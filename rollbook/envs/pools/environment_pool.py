"""Opens the pool that a server takes its environments from.

    async with open_environment_pool(config, size=8, log=log) as pool:      # returns when every slot is ready
        env = await pool.acquire(Deadline(30.0, "session"))                 # waits in FIFO order
        ...
        await env.close()                                                   # returns the slot; a second call does nothing

Most environments are plain objects: `InProcessPool` creates one for each `acquire`, at most `size` at a time. A class that defines
`open_pool` brings its own pool, whose slots outlive sessions.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.contracts.ports import Environment
from rollbook.envs.catalog import EnvironmentSource, environment_class
from rollbook.envs.config import EnvConfig
from rollbook.envs.environment import (
    EnvironmentPool,
    EnvironmentsExhaustedError,
    OpensItsPool,
    PooledEnvironment,
    PoolHealth,
)
from rollbook.telemetry.events import EventLog


@asynccontextmanager
async def open_environment_pool(
    config: EnvConfig, *, size: int | None, log: EventLog
) -> AsyncIterator[EnvironmentPool]:
    """The pool for `config.name`, ready to serve. `size` None: the default of the environment's class."""
    kind = environment_class(config.name)
    if callable(getattr(kind, "open_pool", None)):
        async with cast(OpensItsPool, kind).open_pool(size=size, log=log, args=config.args) as pool:
            yield pool
        return
    source = EnvironmentSource(config)
    try:
        yield InProcessPool(source, size=size)
    finally:
        source.close()


class InProcessPool:
    """Creates an environment object for each `acquire`. Satisfies `EnvironmentPool`; `size` limits how many are in use."""

    def __init__(self, source: EnvironmentSource, *, size: int | None) -> None:
        if size is not None and size < 1:
            raise ValueError(f"the pool size is {size}; it must be at least 1, or None for no limit")
        self._source = source
        self._size = size
        self._busy = 0
        self._slots = None if size is None else asyncio.Semaphore(size)

    @property
    def capacity(self) -> int | None:
        return self._size

    async def acquire(self, deadline: Deadline) -> Environment:
        if self._slots is not None:
            try:
                async with deadline.limit("waiting for a free environment"):
                    await self._slots.acquire()
            except DeadlineExceededError as error:
                raise EnvironmentsExhaustedError(f"all {self._size} environments are in use: {error}") from error
        self._busy += 1
        try:
            return PooledEnvironment(self._source(), self._release)
        except BaseException:
            self._release()
            raise

    def health(self) -> PoolHealth:
        return PoolHealth(capacity=self._size, busy=self._busy)

    def _release(self) -> None:
        self._busy -= 1
        if self._slots is not None:
            self._slots.release()
