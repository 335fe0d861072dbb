"""Loads environment classes by name, creates environments from them, and opens the pool that a server takes them from.

    async with open_environment_pool(config, size=8, log=log) as pool:      # returns when every slot is ready
        env = await pool.acquire(Deadline(30.0, "session"))                 # waits in FIFO order
        ...
        await env.close()                                                   # returns the slot; a second call does nothing

Most environments are plain objects: `InProcessPool` creates one for each `acquire`, at most `size` at a time. A class that defines
`open_pool` brings its own pool, whose slots outlive sessions.
"""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from rollbook.concurrency.blocking import DaemonThreads
from rollbook.concurrency.deadline import Deadline, finish
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_plugin
from rollbook.contracts.ports import Environment
from rollbook.envs.config import ENVIRONMENTS, EnvConfig
from rollbook.envs.environment import (
    EnvironmentAdapter,
    EnvironmentPool,
    EnvironmentSlots,
    OpensItsPool,
    PooledEnvironment,
)
from rollbook.telemetry.events import EventLog

# Closing a container or a connection may take seconds; longer means that it hangs.
CLOSE_WITHIN_S = 20.0
METHODS = ("reset", "step", "close")


class EnvironmentSource:
    """Creates an environment for each episode. Name and arguments are checked in the constructor."""

    def __init__(self, config: EnvConfig) -> None:
        if config.url is not None:
            raise RunError(f"env.url is {config.url}: environments are on that server; use rollbook.envs.client.remote")
        self._config = config
        self._kind = environment_class(config.name)
        try:
            self._kind(**config.args)
        except Exception as error:  # user code may raise anything
            raise RunError(
                f"env.args: {config.name} does not accept {config.args!r}: {type(error).__name__}: {error}; "
                f"its arguments are {inspect.signature(self._kind)}"
            ) from error
        # Threads start with the first call that needs one: quick and async environments use none.
        self._threads = DaemonThreads(config.max_threads, name=f"env-{config.name}")

    def __call__(self) -> EnvironmentAdapter:
        return EnvironmentAdapter(self._kind(**self._config.args), name=self._config.name, executor=self._threads)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[EnvironmentAdapter]:
        """An environment for one episode, always closed at the end."""
        env = self()
        try:
            yield env
        finally:
            # A failed or hanging close does not change the episode's result.
            await finish(env.close(), within_s=CLOSE_WITHIN_S, name=f"env {self._config.name}.close")

    def close(self) -> None:
        """Shut down the threads without waiting for running calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def environment_class(name: str) -> Callable[..., Any]:
    """The class of a built-in environment or of `module:Class`. Raises `RunError` with the known names."""
    kind = load_plugin(name, setting="env.name", builtin=ENVIRONMENTS)
    if not isinstance(kind, type):
        raise RunError(f"env.name = {name!r} is not a class")
    missing = [method for method in METHODS if not callable(getattr(kind, method, None))]
    if missing:
        raise RunError(f"env.name: {name} lacks {', '.join(missing)}; an environment has reset, step and close")
    return kind


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
        self._source = source
        self._slots = EnvironmentSlots(size)
        self.capacity = size
        self.health = self._slots.health

    async def acquire(self, deadline: Deadline) -> Environment:
        await self._slots.acquire(deadline)
        try:
            return PooledEnvironment(self._source(), self._slots.release)
        except BaseException:
            self._slots.release()
            raise
