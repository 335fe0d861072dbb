"""`MultiTurnEnvPool`: a group of sessions for trainers that cannot await. It has a thread and a loop of its own.

    with MultiTurnEnvPool("http://localhost:8000", size=8) as pool:
        rewards = pool.run_group(task, play)               # play(session, first_observation), plain or async

The invariants are those of `GrpoPool`, which does the work. The loop answers pings and messages while the trainer computes, so a
long generation never costs a connection. `close` ends within its budget whatever the server or a rollout does.
"""

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from rollbook.contracts.environment import Observation
from rollbook.contracts.errors import RunError
from rollbook.envs.client.group import GroupResult, GrpoPool, Task
from rollbook.envs.client.session import DEFAULTS, ClientOptions, EnvSession

T = TypeVar("T")
# Beyond the goodbyes themselves: for the loop to notice, and for the thread to end.
CLOSE_MARGIN_S = 5.0


class BlockingSession:
    """A session as plain code sees it. Safe to use from any thread but the pool's own."""

    def __init__(self, session: EnvSession, loop: asyncio.AbstractEventLoop) -> None:
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
    """`size` sessions, connected when the constructor returns; what it raises is the first error, and then nothing is left open."""

    def __init__(
        self,
        url: str,
        size: int = 8,
        *,
        first_task: Task | None = None,
        on_result: Callable[[GroupResult], None] | None = None,
        options: ClientOptions = DEFAULTS,
    ) -> None:
        self._pool = GrpoPool(url, size, first_task=first_task, on_result=on_result, options=options)
        self._close_s = 3 * options.close_s + CLOSE_MARGIN_S
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        # A daemon: a rollout that never returns must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run_loop, name="env-pool", daemon=True)
        self._thread.start()
        try:
            self._call(self._pool.connect())
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

        A plain function runs in a thread of its own with a `BlockingSession`; an `async def` runs in the pool's loop. All are
        awaited; then the first error, if there was one, is raised.
        """
        for outcome in (outcomes := self.try_group(task, rollout_fn)):
            if isinstance(outcome, Exception):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]

    def try_group(self, task: Task, rollout_fn: PlainRollout[T] | AsyncRollout[T]) -> list[T | Exception]:
        """Like `run_group`, but a sibling's failure is an entry of the answer."""

        async def play() -> list[T | Exception]:
            seen = await self._pool.reset_group(task)
            first = dict(zip(map(id, self._pool.sessions), seen, strict=True))
            return await self._pool.try_group(lambda session: self._play(rollout_fn, session, first[id(session)]))

        return self._call(play())

    def record_group_result(self, task: Task, rewards: Sequence[float | None]) -> GroupResult:
        return self._pool.record_group_result(task, rewards)

    def close(self) -> None:
        """Close every session and end the thread, within a budget. Twice does no harm."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._pool.close(), self._loop).result(self._close_s)
        except TimeoutError:
            # Somebody's async rollout blocks the loop. Its sockets close with the process, and the server then has its places back.
            logging.getLogger("rollbook.envs").warning(
                "the pool of %s did not close within %g s: something blocks its event loop",
                self._pool.url,
                self._close_s,
            )
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_MARGIN_S)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._end(asyncio.all_tasks(self._loop)))
            self._loop.close()

    async def _end(self, left: set[asyncio.Task[Any]]) -> None:
        """What still runs is cancelled. If the loop was blocked, the goodbye of `close` never began: it is said here."""
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=self._close_s)
        await self._pool.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_closed:
            work.close()
            raise RunError("this pool is closed; make a new one")
        if threading.current_thread() is self._thread:
            work.close()
            raise RunError(
                "an async rollout runs in the pool's own loop: await the session there, and do not call the pool"
            )
        return _wait(work, self._loop)

    async def _play(self, rollout_fn: PlainRollout[T] | AsyncRollout[T], session: EnvSession, first: Observation) -> T:
        if inspect.iscoroutinefunction(rollout_fn):
            return await cast(AsyncRollout[T], rollout_fn)(session, first)
        return await _in_thread(cast(PlainRollout[T], rollout_fn), BlockingSession(session, self._loop), first)


async def _in_thread(rollout_fn: PlainRollout[T], session: BlockingSession, first: Observation) -> T:
    """One daemon thread for one rollout: an executor's threads would be waited for when the interpreter ends."""
    done: Future[T] = Future()

    def work() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(rollout_fn(session, first))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, name="env-rollout", daemon=True).start()
    return await asyncio.wrap_future(done)


def _wait(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """The result of a coroutine in another thread's loop. An interrupt here cancels it there."""
    if loop.is_closed():
        work.close()
        raise RunError("this pool is closed; make a new one")
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except FutureCancelledError:
        raise RunError("this pool was closed while the call was under way") from None
    except BaseException:
        future.cancel()
        raise
