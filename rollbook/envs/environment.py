"""The interface an environment author implements, its adapter to the `Environment` port, and the pool interface.

An author writes a class with three methods, plain or async:

    class Coin:
        is_quick = True                                     # optional: never blocks, may run in the event loop

        def reset(self, task): ...                          # -> Observation: the agent's first observation
        def step(self, action: str): ...                    # -> Observation: the response, with reward and done
        def close(self): ...                                # release all resources

One object serves one episode. Exceptions of the author's code become an `EpisodeError` that names environment and method: the
episode fails, the process continues.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.contracts.errors import EpisodeError, TransientError, fenced
from rollbook.contracts.ports import Environment
from rollbook.contracts.task import Observation
from rollbook.telemetry.events import EventLog


class UserEnvironment(Protocol):
    """The interface of an author's class. Methods may be plain or `async def`."""

    def reset(self, task: Mapping[str, Any]) -> Observation | Awaitable[Observation]: ...

    def step(self, action: str) -> Observation | Awaitable[Observation]: ...

    def close(self) -> Awaitable[None] | None: ...


class EnvironmentAdapter:
    """One author's environment for one episode. Satisfies `Environment`.

    Plain methods run in a thread, since they may block. If the class sets `is_quick = True`, they run in the event loop, which is
    faster. Calls to one environment never overlap, even if a caller was cancelled while its thread was still running.
    """

    def __init__(self, env: UserEnvironment, *, name: str, executor: Executor | None = None) -> None:
        self._env = env
        self._name = name
        self._executor = executor
        self._is_quick = bool(getattr(env, "is_quick", False))
        self._running: asyncio.Future[Any] | None = None
        self._late_close: asyncio.Future[Any] | None = None
        self._is_closed = False

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return self._checked("reset", await self._call("reset", self._env.reset, task))

    async def step(self, action: str) -> Observation:
        return self._checked("step", await self._call("step", self._env.step, action))

    async def close(self) -> None:
        """Close the environment. Further calls do nothing. If this is cancelled while a call runs, the close follows that call."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._call("close", self._env.close, is_closing=True)

    async def _call(self, method: str, function: Callable[..., Any], *args: Any, is_closing: bool = False) -> Any:
        if self._is_closed and not is_closing:
            raise EpisodeError(f"env {self._name}: {method} was called after close; this episode is dropped")
        if self._running is not None and not self._running.done():
            # The thread of a cancelled call cannot be stopped. A concurrent second call would see a half-changed environment.
            try:
                await asyncio.wait({self._running})
            except asyncio.CancelledError:
                if is_closing:
                    self._running.add_done_callback(self._close_late)
                raise
        with fenced(f"env {self._name}.{method}"):
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            if self._is_quick:
                result = function(*args)
            else:
                self._running = asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
                self._running.add_done_callback(_retrieve_error)
                result = await asyncio.shield(self._running)
            # A plain method may still return an awaitable (a decorator, a lambda around a coroutine).
            return await result if inspect.isawaitable(result) else result

    def _close_late(self, _: asyncio.Future[Any]) -> None:
        """Close the environment after a call that took longer than its caller waited for `close`."""
        self._late_close = asyncio.ensure_future(self._call("close", self._env.close, is_closing=True))
        self._late_close.add_done_callback(_retrieve_error)

    def _checked(self, method: str, result: Any) -> Observation:
        if not isinstance(result, Observation):
            raise EpisodeError(
                f"env {self._name}: {method} returned {type(result).__name__} instead of an Observation; "
                "this episode is dropped"
            )
        return result


def _retrieve_error(call: asyncio.Future[Any]) -> None:
    """Read the exception of a call whose caller was cancelled, so that asyncio does not report it as never retrieved."""
    if not call.cancelled():
        call.exception()


class EnvironmentsExhaustedError(TransientError):
    """All environments of a pool are in use, and none was returned before the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHealth:
    """The state of a pool. `replaced` counts the slots that died or leaked memory and were recreated since the pool opened."""

    capacity: int | None
    busy: int
    replaced: int = 0
    is_ready: bool = True


class EnvironmentSlots:
    """Limits how many environments of a pool are in use; with capacity None it only counts them."""

    def __init__(self, capacity: int | None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"the pool size is {capacity}; it must be at least 1, or None for no limit")
        self.capacity = capacity
        self._busy = 0
        self._free = None if capacity is None else asyncio.Semaphore(capacity)

    async def acquire(self, deadline: Deadline) -> None:
        if self._free is not None:
            try:
                async with deadline.limit("waiting for a free environment"):
                    await self._free.acquire()
            except DeadlineExceededError as error:
                raise EnvironmentsExhaustedError(f"all {self.capacity} environments are in use: {error}") from error
        self._busy += 1

    def release(self) -> None:
        self._busy -= 1
        if self._free is not None:
            self._free.release()

    def health(self) -> PoolHealth:
        return PoolHealth(capacity=self.capacity, busy=self._busy)


class EnvironmentPool(Protocol):
    """Owns environments and lends each to one session at a time."""

    @property
    def capacity(self) -> int | None:
        """The number of environments that can be in use at the same time; None if the pool sets no limit."""

    async def acquire(self, deadline: Deadline) -> Environment:
        """An environment for exclusive use; `close()` returns it. Raises `EnvironmentsExhaustedError` at the deadline."""

    def health(self) -> PoolHealth:
        """Never waits: every health check of the server calls it."""


class OpensItsPool(Protocol):
    """An environment class with its own kind of pool, for environments that own a process. `args` is `env.args` of the config."""

    @classmethod
    def open_pool(
        cls, *, size: int | None, log: EventLog, args: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[EnvironmentPool]: ...


class PooledEnvironment:
    """An environment that notifies its pool once, when it is closed. Satisfies `Environment`."""

    def __init__(self, env: Environment, on_close: Callable[[], None]) -> None:
        self._env = env
        self._on_close: Callable[[], None] | None = on_close

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return await self._env.reset(task)

    async def step(self, action: str) -> Observation:
        return await self._env.step(action)

    async def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        try:
            await self._env.close()
        finally:
            if on_close is not None:
                on_close()
