"""Sessions: one environment for each connection, from the moment it has a place until the environment is given back.

The promise: an environment serves one session at a time, a session ends for good (idle, too slow, closed, its client dead), and
its place
is free again only when its environment is back in the pool. What an environment raises ends the call, never the server.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from rollbook.concurrency.clock import Clock
from rollbook.concurrency.deadline import Deadline
from rollbook.concurrency.shield import finish
from rollbook.contracts.environment import Observation
from rollbook.contracts.errors import EpisodeError, RollbookError, RunError, fenced
from rollbook.contracts.ports import Environment
from rollbook.envs.config import EnvServerConfig
from rollbook.envs.environment import EnvironmentPool, EnvironmentsExhaustedError
from rollbook.envs.pools.reservations import CapacityReachedError, Place, TicketId, Tickets
from rollbook.envs.sandboxes.sandbox import SandboxDiedError
from rollbook.envs.server.protocol import EpisodeState
from rollbook.telemetry.events import EventLog

# Environments that are plain objects cost little, but each session still holds a connection.
LIGHT_SESSIONS = 1024
# How often idle sessions and unclaimed tickets are looked for: a fraction of the shortest budget, within sense.
SWEEPS_PER_BUDGET = 4
SWEEP_BOUNDS_S = (0.05, 5.0)


class SessionState(StrEnum):
    OPEN = "open"
    WORKING = "working"
    CLOSING = "closing"
    CLOSED = "closed"


MOVES: dict[SessionState, frozenset[SessionState]] = {
    SessionState.OPEN: frozenset({SessionState.WORKING, SessionState.CLOSING}),
    SessionState.WORKING: frozenset({SessionState.OPEN, SessionState.CLOSING}),
    SessionState.CLOSING: frozenset({SessionState.CLOSED}),
    SessionState.CLOSED: frozenset(),
}


class SessionEndedError(EpisodeError):
    """The session is over for good; what follows needs a new one."""


class EnvironmentStartError(EpisodeError):
    """The pool had a place, but no environment could be made."""


class Session:
    """One environment in use. Calls come one after the other; `close` may come at any moment, and more than once."""

    def __init__(self, env: Environment, place: Place, config: EnvServerConfig, *, clock: Clock, log: EventLog) -> None:
        self.id = uuid.uuid4().hex
        self.state = SessionState.OPEN
        self.episode = EpisodeState()
        self.end_reason: str | None = None
        self.on_end: Callable[[], None] | None = None
        """Told once, when the session is ended from inside the server; the connection then says so to its client."""
        self._env = env
        self._place = place
        self._config = config
        self._clock = clock
        self._log = log
        self._last_used = clock.now()
        self._has_begun = False
        self._closed = asyncio.Event()

    async def reset(self, task: Mapping[str, Any], *, episode_id: str | None = None) -> Observation:
        answer = await self._work("reset", self._config.reset_s, lambda: self._env.reset(task))
        self._has_begun = True
        self.episode = EpisodeState(episode_id=episode_id or uuid.uuid4().hex, done=answer.done, last=answer)
        return answer

    async def step(self, action: str) -> Observation:
        if not self._has_begun:
            raise EpisodeError("step before reset: there is no episode yet; send a reset first")
        if self.episode.done:
            raise EpisodeError(
                f"step after the end: the episode was over after {self.episode.step_count} steps; send a reset first"
            )
        answer = await self._work("step", self._config.step_s, lambda: self._env.step(action))
        count = self.episode.step_count + 1
        if self._config.max_steps is not None and count >= self._config.max_steps and not answer.done:
            answer = replace(answer, done=True, facts={**answer.facts, "cut_after_steps": count})
        self.episode = replace(self.episode, step_count=count, done=answer.done, last=answer)
        return answer

    def idle_s(self) -> float:
        """Seconds since the last message; nothing while the environment is at work."""
        return 0.0 if self.state is not SessionState.OPEN else self._clock.now() - self._last_used

    def touch(self) -> None:
        self._last_used = self._clock.now()

    async def close(self, reason: str) -> None:
        """Give the environment back, then the place. The first reason counts; whoever comes later waits for the same end."""
        if self.state in (SessionState.CLOSING, SessionState.CLOSED):
            await self._closed.wait()
            return
        self._move(SessionState.CLOSING)
        self.end_reason = reason
        if self.on_end is not None:
            self.on_end()
        try:
            in_time = await finish(self._close_environment(), within_s=self._config.close_s, name=f"session {self.id}")
            if not in_time:
                self._log.warning(
                    "envs.environment_not_closed", session=self.id, within_s=self._config.close_s, reason=reason
                )
        finally:
            self._place.release()
            self._move(SessionState.CLOSED)
            self._closed.set()

    async def _close_environment(self) -> None:
        with fenced("closing the environment"):
            await self._env.close()

    async def _work(self, what: str, within_s: float, call: Callable[[], Any]) -> Observation:
        if self.state is not SessionState.OPEN:
            raise SessionEndedError(
                f"{what}: this session is {self.state} ({self.end_reason or 'a call is under way'})"
            )
        self._move(SessionState.WORKING)
        try:
            async with asyncio.timeout(within_s):
                with fenced(what):
                    answer: Observation = await call()
                    return answer
        except SandboxDiedError as error:
            # The pool replaces what died, and only a new session gets the replacement.
            raise SessionEndedError(f"{error}; this session is ended, connect again") from error
        except TimeoutError:
            # The environment may still be at work: nobody may use it again, so the session is over.
            raise SessionEndedError(
                f"{what} took longer than {within_s:g} s; this session is ended, connect again"
            ) from None
        finally:
            self.touch()
            self._rest()

    def _rest(self) -> None:
        if self.state is SessionState.WORKING:  # and not being closed meanwhile
            self._move(SessionState.OPEN)

    def _move(self, to: SessionState) -> None:
        if to not in MOVES[self.state]:
            raise RuntimeError(f"session {self.id} cannot go from {self.state} to {to}")
        self.state = to


class SessionKeeper:
    """Opens sessions within the capacity, ends the idle ones, and ends all of them when the server stops."""

    def __init__(self, pool: EnvironmentPool, config: EnvServerConfig, *, clock: Clock, log: EventLog) -> None:
        self.capacity = session_capacity(pool.capacity, config.max_sessions)
        self.tickets = Tickets(self.capacity, hold_s=config.ticket_hold_s, clock=clock)
        self._pool = pool
        self._config = config
        self._clock = clock
        self._log = log
        self._sessions: dict[str, Session] = {}

    @property
    def num_active(self) -> int:
        return self.tickets.book.taken

    async def take_place(self, ticket: str | None) -> Place:
        """Before the connection is accepted: a place, of a ticket or of the queue."""
        if ticket is not None:
            return self.tickets.claim(TicketId(ticket))
        return await self.tickets.place(wait_s=self._config.connect_wait_s)

    async def open(self, place: Place) -> Session:
        """An environment for a place. On any failure the place is free again."""
        try:
            with fenced("making an environment"):
                env = await self._pool.acquire(Deadline(self._config.acquire_s, "session start"))
        except EnvironmentsExhaustedError as error:
            place.release()
            raise CapacityReachedError(str(error), active=self.num_active, capacity=self.capacity) from error
        except RollbookError as error:
            place.release()
            raise EnvironmentStartError(str(error)) from error
        except BaseException:
            place.release()
            raise
        session = Session(env, place, self._config, clock=self._clock, log=self._log)
        self._sessions[session.id] = session
        self._log.info("envs.session_opened", session=session.id, active=self.num_active)
        return session

    async def close(self, session: Session, reason: str) -> None:
        try:
            await session.close(reason)
        finally:
            if self._sessions.pop(session.id, None) is not None:
                self._log.info(
                    "envs.session_closed",
                    session=session.id,
                    reason=session.end_reason,
                    steps=session.episode.step_count,
                )

    async def run(self) -> None:
        """End sessions that nobody uses, and take back tickets that nobody claimed.

        Takes:  the sessions and tickets of this keeper.
        Waits:  for the next sweep.
        Ends:   on cancellation.
        """
        least, most = SWEEP_BOUNDS_S
        every_s = min(most, max(least, min(self._config.idle_s, self._config.ticket_hold_s) / SWEEPS_PER_BUDGET))
        while True:
            await self._clock.sleep(every_s)
            await self.sweep()

    async def sweep(self) -> None:
        for ticket in self.tickets.expire():
            self._log.warning("envs.ticket_expired", ticket=ticket, hold_s=self._config.ticket_hold_s)
        idle = [session for session in self._sessions.values() if session.idle_s() >= self._config.idle_s]
        await asyncio.gather(*(self.close(session, f"idle for {self._config.idle_s:g} s") for session in idle))

    async def close_all(self) -> None:
        closing = (self.close(session, "the server stops") for session in list(self._sessions.values()))
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, RollbookError):
                self._log.warning("envs.session_not_closed", error=str(outcome))


def session_capacity(pool_capacity: int | None, max_sessions: int | None) -> int:
    """How many sessions at once. More than there are environments is a mistake of the operator, told before anything starts."""
    if pool_capacity is None:
        return max_sessions or LIGHT_SESSIONS
    if max_sessions is not None and max_sessions > pool_capacity:
        raise RunError(
            f"max_sessions is {max_sessions}, but the pool has {pool_capacity} environments; "
            f"lower it to {pool_capacity}, or give the pool {max_sessions} environments"
        )
    return max_sessions or pool_capacity
