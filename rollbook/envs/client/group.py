"""Groups of sessions: `GrpoPool` for asynchronous code. For trainers that cannot await, `blocking_pool.py` has `MultiTurnEnvPool`.

    async with GrpoPool("http://localhost:8000", size=8) as pool:
        seen = await pool.reset_group(task)
        rewards = await pool.run_group(rollout)            # one call for each session, at the same time
        pool.record_group_result(task, rewards)

A group is whole or it is not there: its places are taken by one ticket, every session has answered before the pool is handed out,
and whatever fails on the way closes all of them and raises the first error. Two groups can never hold half of what they need.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from aiohttp import ClientError, ClientSession

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.concurrency.retry import retry
from rollbook.concurrency.shield import finish
from rollbook.contracts.environment import Observation
from rollbook.contracts.errors import EpisodeError, RollbookError, RunError, TransientError
from rollbook.envs.client.session import DEFAULTS, ClientOptions, EnvSession, ServerFullError, connect, new_http
from rollbook.envs.server.protocol import TICKETS_PATH

T = TypeVar("T")
Task = Mapping[str, Any]


class GroupTooLargeError(RunError):
    """The pool asks for more sessions than the server has. The message names both numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """What a group earned. A reward is None where the episode could not be scored."""

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
        url: str,
        size: int = 8,
        *,
        first_task: Task | None = None,
        on_result: Callable[[GroupResult], None] | None = None,
        options: ClientOptions = DEFAULTS,
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool of {size} sessions plays nothing; size is at least 1")
        self.url = url.rstrip("/")
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
    def sessions(self) -> tuple[EnvSession, ...]:
        """All of them, or none before `connect` and after `close`."""
        return self._sessions

    async def connect(self) -> None:
        """Open every session, and play the first reset where a `first_task` was given. All or nothing."""
        if self._sessions:
            return
        http = new_http(self._options)
        try:
            sessions = await self._open(http, self.size)
            try:
                last: list[Observation | None] = [None] * self.size
                if self._first_task is not None:
                    task = self._first_task
                    last = list(await all_or_first_error([session.reset(task) for session in sessions]))
            except BaseException:
                await self._leave(sessions)
                raise
        except BaseException:
            await http.close()
            raise
        # Published only now, when it is complete.
        self._http, self._sessions, self._last = http, tuple(sessions), last

    async def reset_group(self, task: Task) -> list[Observation]:
        """Begin the same task in every session. Lost sessions are replaced first; if any reset fails, all sessions are closed."""
        await self._mend()
        sessions = self._sessions
        try:
            seen = await all_or_first_error([session.reset(task) for session in sessions])
        except BaseException:
            await self.close()
            raise
        self._last = list(seen)
        return seen

    async def run_group(self, rollout_fn: Callable[[EnvSession], Awaitable[T]]) -> list[T]:
        """Call `rollout_fn` once for each session, concurrently. All are awaited; then the first error, if any, is raised."""
        outcomes = await self.try_group(rollout_fn)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]

    async def try_group(self, rollout_fn: Callable[[EnvSession], Awaitable[T]]) -> list[T | Exception]:
        """Like `run_group`, but a sibling's failure is an entry of the answer: the others keep what they played."""
        await self._mend()
        return await asyncio.gather(*(_outcome(rollout_fn, session) for session in self._sessions))

    async def run_group_step(self, actions: Sequence[str | Mapping[str, Any] | None]) -> list[Observation]:
        """One step in each session. None where an episode is over: its last observation is repeated."""
        sessions = self._connected()
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
            return last if action is None else await sessions[index].step(action)

        answers = await asyncio.gather(*(act(i, action) for i, action in enumerate(actions)), return_exceptions=True)
        for index, answer in enumerate(answers):
            if isinstance(answer, Observation):
                self._last[index] = answer
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if failed:
            raise failed[0]
        return [answer for answer in answers if isinstance(answer, Observation)]

    def record_group_result(self, task: Task, rewards: Sequence[float | None]) -> GroupResult:
        """Tell `on_result` (a curriculum) what the group earned. NaN and None mean: could not be scored, which is not a zero."""
        if len(rewards) != self.size:
            raise ValueError(
                f"{len(rewards)} rewards for a group of {self.size}; give one each, None where there is none"
            )
        known = tuple(None if reward is None or not math.isfinite(reward) else float(reward) for reward in rewards)
        result = GroupResult(task=task, rewards=known)
        if self._on_result is not None:
            self._on_result(result)
        return result

    async def close(self) -> None:
        """Close every session, within `close_s`. Twice does no harm."""
        sessions, self._sessions = self._sessions, ()
        http, self._http = self._http, None
        self._last = []
        try:
            await self._leave(sessions)
        finally:
            if http is not None:
                await finish(http.close(), within_s=self._options.close_s, name="closing connections")

    def _connected(self) -> tuple[EnvSession, ...]:
        if not self._sessions:
            raise RunError("this pool is not connected; use `async with GrpoPool(…)`, or await connect() first")
        return self._sessions

    async def _mend(self) -> None:
        """Replace sessions whose environment or connection was lost. A pool that a failure has closed is connected again."""
        if not self._sessions:
            await self.connect()
        lost = [index for index, session in enumerate(self._sessions) if session.is_lost]
        if not lost:
            return
        assert self._http is not None  # set together with the sessions
        await self._leave([self._sessions[index] for index in lost])
        try:
            fresh = dict(zip(lost, await self._open(self._http, len(lost)), strict=True))
        except BaseException:
            await self.close()
            raise
        self._sessions = tuple(fresh.get(index, session) for index, session in enumerate(self._sessions))
        self._last = [None if index in fresh else seen for index, seen in enumerate(self._last)]

    async def _open(self, http: ClientSession, count: int) -> list[EnvSession]:
        """`count` sessions that have all answered. A full server is asked again until `connect_s` is over."""
        deadline = Deadline(self._options.connect_s, f"connecting {count} sessions to {self.url}")

        async def attempt() -> list[EnvSession]:
            ticket = await take_ticket(http, self.url, count, deadline=deadline)
            opened: list[EnvSession] = []

            async def one() -> None:
                opened.append(await connect(http, self.url, self._options, deadline=deadline, ticket=ticket))

            try:
                await all_or_first_error([one() for _ in range(count)])
            except BaseException as error:
                await self._leave(opened)
                if ticket is not None:
                    await drop_ticket(http, self.url, ticket, within_s=self._options.close_s)
                if isinstance(error, ServerFullError) and error.capacity is not None and error.capacity < count:
                    raise _too_large(count, error.capacity, self.url) from error
                raise
            return opened

        return await retry(attempt, on=ServerFullError, deadline=deadline)

    async def _leave(self, sessions: Sequence[EnvSession]) -> None:
        # Each goodbye has its own budget; twice that bounds all of them together, whatever a server does.
        goodbyes = _gather([session.close() for session in sessions])
        await finish(goodbyes, within_s=2 * self._options.close_s, name="closing sessions")


async def take_ticket(http: ClientSession, url: str, count: int, *, deadline: Deadline) -> str | None:
    """One ticket for `count` sessions, waited for in the server's queue; None from a server that knows no tickets."""
    wait_s = deadline.require()
    try:
        async with (
            deadline.limit(f"a ticket for {count} sessions"),
            http.post(f"{url}{TICKETS_PATH}", json={"sessions": count, "wait_s": 0.9 * wait_s}) as reply,
        ):
            if reply.status in (404, 405):
                return None
            body = await reply.json(content_type=None)
    except DeadlineExceededError as error:
        raise TransientError(str(error)) from error
    except (ClientError, OSError, ValueError) as error:
        raise TransientError(f"no ticket from {url}: {error}; is the server running?") from error
    if reply.status == 200:
        return str(body["ticket"])
    message = body.get("data", {}).get("message", body) if isinstance(body, Mapping) else body
    if reply.status == 409:
        raise GroupTooLargeError(f"{url}: {message}")
    if reply.status == 503:
        raise ServerFullError(f"{url}: {message}")
    raise RunError(f"{url} answered {reply.status} to a request for {count} sessions: {message}")


async def drop_ticket(http: ClientSession, url: str, ticket: str, *, within_s: float) -> None:
    """Give back what is left of a ticket. If that fails, the server takes it back by itself when its hold is over."""

    async def drop() -> None:
        async with http.delete(f"{url}{TICKETS_PATH}/{ticket}"):
            pass

    await finish(drop(), within_s=within_s, name="dropping a ticket")


def _too_large(size: int, capacity: int, url: str) -> GroupTooLargeError:
    return GroupTooLargeError(
        f"{url}: {size} sessions were asked for, but this server has {capacity}; "
        f"ask for at most {capacity}, or start the server with a pool of at least {size}"
    )


async def all_or_first_error(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result, in order; or the error that came first, with the others cancelled and ended."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        first = next((error for error in failed if error is not None), None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if first is not None:
        raise first
    return [task.result() for task in tasks]


async def _outcome(rollout_fn: Callable[[EnvSession], Awaitable[T]], session: EnvSession) -> T | Exception:
    try:
        return await rollout_fn(session)
    except RollbookError as error:
        return error
    except Exception as error:  # the caller's own code: it decides what this means
        return error


async def _gather(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*calls, return_exceptions=True)
