"""What an environment author writes, and the adapter that makes the `Environment` port of it.

An author writes a class with three methods, plain or async:

    class Coin:
        is_quick = True                                     # optional: never blocks, may run in the event loop

        def reset(self, task): ...                          # -> Observation: what the agent sees first
        def step(self, action: str): ...                    # -> Observation: the environment's answer, with reward and done
        def close(self): ...                                # give everything back

One object serves one episode. What an author's code raises never reaches the framework as it is: it becomes an `EpisodeError` that
names environment and method, so that a broken episode is data and not a crash.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Any, Protocol

from rollbook.contracts.environment import Observation
from rollbook.contracts.errors import EpisodeError, fenced


class UserEnvironment(Protocol):
    """The shape of an author's class. Methods may be plain or `async def`."""

    def reset(self, task: Mapping[str, Any]) -> Observation | Awaitable[Observation]: ...

    def step(self, action: str) -> Observation | Awaitable[Observation]: ...

    def close(self) -> Awaitable[None] | None: ...


class EnvironmentAdapter:
    """One environment for one episode. Satisfies `Environment`.

    Plain methods run in a thread, since they may block; an environment that declares `is_quick = True` runs in the event loop,
    which
    saves the hop. Calls to one environment never overlap, not even when a caller was cancelled while a thread was still at work.
    """

    def __init__(self, env: UserEnvironment, *, name: str, executor: Executor | None = None) -> None:
        self._env = env
        self._name = name
        self._executor = executor
        self._is_quick = bool(getattr(env, "is_quick", False))
        self._working: asyncio.Future[Any] | None = None
        self._is_closed = False

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return self._checked("reset", await self._call("reset", self._env.reset, task))

    async def step(self, action: str) -> Observation:
        return self._checked("step", await self._call("step", self._env.step, action))

    async def close(self) -> None:
        """Close the environment once; closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._call("close", self._env.close, is_closing=True)

    async def _call(self, method: str, function: Callable[..., Any], *args: Any, is_closing: bool = False) -> Any:
        if self._is_closed and not is_closing:
            raise EpisodeError(f"env {self._name}: {method} was called after close; this episode is given up")
        if self._working is not None and not self._working.done():
            # The thread of a cancelled call cannot be stopped; a second one beside it would see an environment in mid-move.
            await asyncio.wait({self._working})
        with fenced(f"env {self._name}.{method}"):
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            if self._is_quick:
                return await _settled(function(*args))
            self._working = asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
            self._working.add_done_callback(_retrieve)
            return await _settled(await asyncio.shield(self._working))

    def _checked(self, method: str, answer: Any) -> Observation:
        if not isinstance(answer, Observation):
            raise EpisodeError(
                f"env {self._name}: {method} returned {type(answer).__name__} where an Observation is due; "
                "this episode is given up"
            )
        return answer


async def _settled(answer: Any) -> Any:
    """A plain method may still hand back something to await (a decorator, a lambda around a coroutine)."""
    return await answer if inspect.isawaitable(answer) else answer


def _retrieve(work: asyncio.Future[Any]) -> None:
    """Look at the error of a call whose caller is gone, so that the loop does not complain about it at exit."""
    if not work.cancelled():
        work.exception()
