"""Loads environment classes by name, creates environments from them, and opens the pool that a server takes them from.

    async with open_environment_pool(config, size=8, log=log) as pool:      # returns when every slot is ready
        env = await pool.acquire(Deadline(30.0, "session"))                 # waits in FIFO order
        ...
        await env.close()                                                   # returns the slot; a second call does nothing

Most environments are plain objects: `InProcessPool` creates one for each `acquire`, at most `size` at a time. A class with
`warm_limits` opens its sandboxes by `self.open_sandbox()`; a pool with a size gives it sandboxes that have been started. A class
that defines `open_pool` brings its own pool, whose slots outlive sessions.
"""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
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
from rollbook.envs.sandboxes.warm import OpenSandbox, open_warm_sandboxes
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

    def __call__(self, open_sandbox: OpenSandbox | None = None) -> EnvironmentAdapter:
        """`open_sandbox`: replaces the environment's own."""
        env = self._kind(**self._config.args)
        if open_sandbox is not None:
            env.open_sandbox = open_sandbox
        return EnvironmentAdapter(env, name=self._config.name, executor=self._threads)

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
    warm_limits = getattr(kind, "warm_limits", None)
    async with AsyncExitStack() as stack:
        stack.callback(source.close)
        opens: OpenSandbox | None = None
        if size is not None and warm_limits is not None:
            sandbox = config.args.get("sandbox", "bubblewrap")
            opens = await stack.enter_async_context(open_warm_sandboxes(warm_limits, size=size, kind=sandbox, log=log))
        yield InProcessPool(source, size=size, open_sandbox=opens)


class InProcessPool:
    """Creates an environment object for each `acquire`. Satisfies `EnvironmentPool`; `size` limits how many are in use."""

    def __init__(self, source: EnvironmentSource, *, size: int | None, open_sandbox: OpenSandbox | None = None) -> None:
        self._source = source
        self._open_sandbox = open_sandbox
        self._slots = EnvironmentSlots(size)
        self.capacity = size
        self.health = self._slots.health

    async def acquire(self, deadline: Deadline) -> Environment:
        await self._slots.acquire(deadline)
        try:
            return PooledEnvironment(self._source(self._open_sandbox), self._slots.release)
        except BaseException:
            self._slots.release()
            raise
