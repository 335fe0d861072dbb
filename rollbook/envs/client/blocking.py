"""`MultiTurnEnvPool`: a group of sessions for trainers that cannot await. It runs an event loop in its own thread.

    with MultiTurnEnvPool("http://localhost:8000", size=8) as pool:
        rewards = pool.run_group(task, play)               # play(session, first_observation), plain or async

`GrpoPool` does the work and keeps the invariants. The loop answers pings while the trainer computes, so a long generation loses no
connection. `close` ends within its time limit even if the server or a rollout hangs.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from rollbook.concurrency.blocking import LoopStoppedError, LoopThread
from rollbook.contracts.errors import RunError
from rollbook.contracts.task import Observation
from rollbook.envs.client.group import GroupRewards, GrpoPool, Task, results_of
from rollbook.envs.client.session import DEFAULTS, ClientOptions, EnvSession
from rollbook.envs.daemon_threads import DaemonThreads

T = TypeVar("T")
# Added to the time limits of the sessions: for the loop to react and the thread to end.
CLOSE_MARGIN_S = 5.0


class BlockingSession:
    """A session with blocking methods, for any thread except the pool's own."""

    def __init__(self, session: EnvSession, loop: LoopThread) -> None:
        self._session = session
        self._loop = loop

    def reset(self, task: Task) -> Observation:
        return _wait(self._session.reset(task), self._loop)

    def step(self, action: str | Mapping[str, Any]) -> Observation:
        return _wait(self._session.step(action), self._loop)

    def state(self) -> dict[str, Any]:
        return _wait(self._session.state(), self._loop)


PlainRollout = Callable[[BlockingSession, Observation], T]
AsyncRollout = Callable[[EnvSession, Observation], Awaitable[T]]


class MultiTurnEnvPool:
    """`size` sessions, connected when the constructor returns. If it raises, no session is left open."""

    def __init__(
        self,
        url: str,
        size: int = 8,
        *,
        first_task: Task | None = None,
        on_result: Callable[[GroupRewards], None] | None = None,
        options: ClientOptions = DEFAULTS,
    ) -> None:
        self._pool = GrpoPool(url, size, first_task=first_task, on_result=on_result, options=options)
        self._close_s = 3 * options.close_s + CLOSE_MARGIN_S
        self._loop = LoopThread("env-pool")
        try:
            self._loop.enter(self._pool)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def size(self) -> int:
        return self._pool.size

    def reset_group(self, task: Task) -> list[Observation]:
        return self._call(self._pool.reset_group(task))

    def run_group_step(self, actions: Sequence[str | Mapping[str, Any] | None]) -> list[Observation]:
        return self._call(self._pool.run_group_step(actions))

    def run_group(self, task: Task, rollout_fn: PlainRollout[T] | AsyncRollout[T]) -> list[T]:
        """Reset every session to `task`, then call `rollout_fn(session, first_observation)` for each, concurrently.

        A plain function runs in its own thread with a `BlockingSession`; an `async def` runs in the pool's loop. Waits for all,
        then raises the first error, if any.
        """
        return results_of(self.try_group(task, rollout_fn))

    def try_group(self, task: Task, rollout_fn: PlainRollout[T] | AsyncRollout[T]) -> list[T | Exception]:
        """Like `run_group`, but an exception is returned in place of the result."""

        async def play() -> list[T | Exception]:
            seen = await self._pool.reset_group(task)
            first = dict(zip(map(id, self._pool.sessions), seen, strict=True))
            return await self._pool.try_group(lambda session: self._play(rollout_fn, session, first[id(session)]))

        return self._call(play())

    def record_group_result(self, task: Task, rewards: Sequence[float | None]) -> GroupRewards:
        return self._pool.record_group_result(task, rewards)

    def close(self) -> None:
        """Close every session and end the thread, within a time limit. A second call does nothing."""
        if not self._loop.stop(within_s=self._close_s):
            # An async rollout blocks the loop. Its sockets close with the process, which frees the server's slots.
            logging.getLogger("rollbook.envs").warning(
                "the pool of %s did not close within %g s: its event loop is blocked", self._pool.url, self._close_s
            )

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_current_thread:
            work.close()
            raise RunError(
                "an async rollout runs in the pool's own loop: await the session there, and do not call the pool"
            )
        return _wait(work, self._loop)

    async def _play(self, rollout_fn: PlainRollout[T] | AsyncRollout[T], session: EnvSession, first: Observation) -> T:
        if inspect.iscoroutinefunction(rollout_fn):
            return await cast(AsyncRollout[T], rollout_fn)(session, first)
        # One thread for each rollout: a hanging one must not delay others.
        thread = DaemonThreads(1, name="env-rollout")
        try:
            return await asyncio.get_running_loop().run_in_executor(
                thread, cast(PlainRollout[T], rollout_fn), BlockingSession(session, self._loop), first
            )
        finally:
            thread.shutdown(wait=False)


def _wait(work: Coroutine[Any, Any, T], loop: LoopThread) -> T:
    try:
        return loop.run(work)
    except LoopStoppedError as error:
        raise RunError(f"the pool is closed; make a new one ({error})") from None
