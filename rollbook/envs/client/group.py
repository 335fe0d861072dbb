"""Groups of sessions: `GrpoPool` for asynchronous code, and `MultiTurnEnvPool` for trainers that cannot await.

    async with GrpoPool(base_url="http://localhost:8000", size=8) as pool:
        seen = await pool.reset_group(task)
        rewards = await pool.run_group(rollout)            # one call for each session, concurrently
        pool.record_group_result(task, rewards)

A group is connected completely or not at all: one reservation covers all of its sessions, and every session has replied before
`connect` returns. Any failure closes all of them and raises the first error. Two groups can never block each other halfway.

    with MultiTurnEnvPool(base_url="http://localhost:8000", size=8) as pool:
        rewards = pool.run_group(task, play)               # play(session, first_observation), plain or async

`MultiTurnEnvPool` runs a `GrpoPool` in an event loop in its own thread. The loop answers pings while the trainer computes, so a
long generation loses no connection. `close` ends within its time limit even if the server or a rollout hangs.
"""

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from aiohttp import ClientSession

from rollbook.concurrency.blocking import DaemonThreads, LoopStoppedError, LoopThread
from rollbook.concurrency.deadline import finish
from rollbook.concurrency.tasks import results_of
from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.task import Observation
from rollbook.envs.client.session import (
    DEFAULTS,
    ClientOptions,
    EnvSession,
    all_or_first_error,
    close_sessions,
    new_http,
    open_sessions,
)

T = TypeVar("T")
Task = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """The rewards of a group. A reward is None if the episode could not be scored."""

    task: Task
    rewards: tuple[float | None, ...]

    @property
    def scored(self) -> tuple[float, ...]:
        return tuple(reward for reward in self.rewards if reward is not None)

    @property
    def mean(self) -> float | None:
        return sum(self.scored) / len(self.scored) if self.scored else None


class GrpoPool:
    """`size` sessions of one server that play the same task."""

    def __init__(
        self,
        base_url: str,
        size: int = 8,
        *,
        first_task: Task | None = None,
        on_result: Callable[[GroupRewards], None] | None = None,
        options: ClientOptions = DEFAULTS,
    ) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; a pool needs at least 1 session")
        self.base_url = base_url.rstrip("/")
        self.size = size
        self._first_task = first_task
        self._on_result = on_result
        self._options = options
        self._http: ClientSession | None = None
        self._sessions: tuple[EnvSession, ...] = ()
        self._last: list[Observation | None] = []

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def envs(self) -> tuple[EnvSession, ...]:
        """All sessions; empty before `connect` and after `close`."""
        return self._sessions

    async def connect(self) -> None:
        """Open every session, and reset to `first_task` if it was given. All or nothing."""
        if self._sessions:
            return
        http = new_http(self._options)
        try:
            sessions = await open_sessions(http, self.base_url, self.size, self._options)
            try:
                last: list[Observation | None] = [None] * self.size
                if self._first_task is not None:
                    task = self._first_task
                    last = list(await all_or_first_error([session.reset(task) for session in sessions]))
            except BaseException:
                await close_sessions(sessions, self._options)
                raise
        except BaseException:
            await http.close()
            raise
        self._http, self._sessions, self._last = http, tuple(sessions), last

    async def reset_group(self, task: Task) -> list[Observation]:
        """Reset every session to the task. Lost sessions are replaced first; if any reset fails, all sessions are closed."""
        await self._replace_lost()
        sessions = self._sessions
        try:
            seen = await all_or_first_error([session.reset(task) for session in sessions])
        except BaseException:
            await self.close()
            raise
        self._last = list(seen)
        return seen

    async def run_group(self, rollout_fn: Callable[[EnvSession], Awaitable[T]]) -> list[T]:
        """Call `rollout_fn` once for each session, concurrently. Waits for all, then raises the first error, if any."""
        return results_of(await self.try_group(rollout_fn))

    async def try_group(self, rollout_fn: Callable[[EnvSession], Awaitable[T]]) -> list[T | Exception]:
        """Like `run_group`, but an exception is returned in place of the result: the other sessions keep theirs."""
        await self._replace_lost()

        async def outcome(session: EnvSession) -> T | Exception:
            try:
                return await rollout_fn(session)
            except Exception as error:  # the caller's code may raise anything
                return error

        return await asyncio.gather(*(outcome(session) for session in self._sessions))

    async def run_group_step(self, actions: Sequence[str | Mapping[str, Any] | None]) -> list[Observation]:
        """One step in each session. None for an episode that is over; its last observation is repeated."""
        if not self._sessions:
            raise RunError("this pool is not connected; use `async with GrpoPool(…)`, or await connect() first")
        sessions = self._sessions
        if len(actions) != self.size:
            raise ValueError(
                f"{len(actions)} actions for {self.size} sessions; give one each, None where the episode is over"
            )

        async def act(index: int, action: str | Mapping[str, Any] | None) -> Observation:
            last = self._last[index]
            if last is None:
                raise EpisodeError(f"session {index} has no episode yet; call reset_group first")
            if action is None and not last.done:
                raise ValueError(f"session {index} is not done, but its action is None")
            seen = last if action is None else await sessions[index].step(action)
            self._last[index] = seen
            return seen

        outcomes = await asyncio.gather(*(act(i, action) for i, action in enumerate(actions)), return_exceptions=True)
        return results_of(outcomes)

    def record_group_result(self, task: Task, rewards: Sequence[float | None]) -> GroupRewards:
        """Report the rewards to `on_result` (a curriculum). NaN and None mean "could not be scored", not 0."""
        if len(rewards) != self.size:
            raise ValueError(
                f"{len(rewards)} rewards for a group of {self.size}; give one each, None where there is none"
            )
        known = tuple(None if reward is None or not math.isfinite(reward) else float(reward) for reward in rewards)
        result = GroupRewards(task=task, rewards=known)
        if self._on_result is not None:
            self._on_result(result)
        return result

    async def close(self) -> None:
        """Close every session, within a time limit. A second call does nothing."""
        sessions, self._sessions = self._sessions, ()
        http, self._http = self._http, None
        self._last = []
        try:
            await close_sessions(sessions, self._options)
        finally:
            if http is not None:
                await finish(http.close(), within_s=self._options.close_s, name="closing connections")

    async def _replace_lost(self) -> None:
        """Replace lost sessions. Reconnect a pool that was closed by a failure."""
        if not self._sessions:
            await self.connect()
        lost = [index for index, session in enumerate(self._sessions) if session.is_lost]
        if not lost:
            return
        assert self._http is not None  # set together with the sessions
        await close_sessions([self._sessions[index] for index in lost], self._options)
        try:
            opened = await open_sessions(self._http, self.base_url, len(lost), self._options)
        except BaseException:
            await self.close()
            raise
        fresh = dict(zip(lost, opened, strict=True))
        self._sessions = tuple(fresh.get(index, session) for index, session in enumerate(self._sessions))
        self._last = [None if index in fresh else seen for index, seen in enumerate(self._last)]


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
        base_url: str,
        size: int = 8,
        *,
        first_task: Task | None = None,
        on_result: Callable[[GroupRewards], None] | None = None,
        options: ClientOptions = DEFAULTS,
    ) -> None:
        self._pool = GrpoPool(base_url, size, first_task=first_task, on_result=on_result, options=options)
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
            first = dict(zip(map(id, self._pool.envs), seen, strict=True))
            return await self._pool.try_group(lambda session: self._play(rollout_fn, session, first[id(session)]))

        return self._call(play())

    def record_group_result(self, task: Task, rewards: Sequence[float | None]) -> GroupRewards:
        return self._pool.record_group_result(task, rewards)

    def close(self) -> None:
        """Close every session and end the thread, within a time limit. A second call does nothing."""
        if not self._loop.stop(within_s=self._close_s):
            # An async rollout blocks the loop. Its sockets close with the process, which frees the server's slots.
            logging.getLogger("rollbook.envs").warning(
                "the pool of %s did not close within %g s: its event loop is blocked",
                self._pool.base_url,
                self._close_s,
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
