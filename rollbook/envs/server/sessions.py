"""Sessions: one environment for each connection, from the reservation of a slot until the environment is returned.

An environment serves one session at a time. A closed session (idle, too slow, closed, client gone) is never reopened, and its slot
is free only when its environment is back in the pool. Exceptions of an environment end the call, never the server.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from rollbook.concurrency.clock import Clock
from rollbook.concurrency.deadline import Deadline, finish
from rollbook.contracts.errors import EpisodeError, RollbookError, RunError, fenced
from rollbook.contracts.ports import Environment
from rollbook.contracts.task import Observation
from rollbook.envs.config import EnvServerConfig
from rollbook.envs.environment import EnvironmentPool, EnvironmentsExhaustedError
from rollbook.envs.server.protocol import EpisodeState
from rollbook.envs.server.reservations import CapacityReachedError, ReservationId, Reservations, SessionSlot
from rollbook.sandbox.sandbox import SandboxDiedError
from rollbook.telemetry.events import EventLog

# For pools without a limit: the environments are cheap, but each session still holds a connection.
DEFAULT_MAX_SESSIONS = 1024
# The sweep interval for idle sessions and unclaimed reservations: a fraction of the shorter time limit, within bounds.
SWEEPS_PER_LIMIT = 4
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
    """The session is closed; the client needs a new one."""


class EnvironmentStartError(EpisodeError):
    """A slot was free, but the pool could not create an environment."""


class Session:
    """One environment in use. Calls are sequential; `close` may be called at any time and more than once."""

    def __init__(
        self, env: Environment, slot: SessionSlot, config: EnvServerConfig, *, clock: Clock, log: EventLog
    ) -> None:
        self.id = uuid.uuid4().hex
        self.state = SessionState.OPEN
        self.episode = EpisodeState()
        self.end_reason: str | None = None
        self.on_end: Callable[[], None] | None = None
        """Called once when the session closes, so that the connection can notify its client."""
        self.failure: str | None = None
        """A call timed out, or the sandbox died. The session must be closed, and refuses later calls."""
        self._env = env
        self._slot = slot
        self._config = config
        self._clock = clock
        self._log = log
        self._last_used = clock.now()
        self._closed = asyncio.Event()

    async def reset(self, task: Mapping[str, Any], *, episode_id: str | None = None) -> Observation:
        seen = await self._call("reset", self._config.reset_s, lambda: self._env.reset(task))
        self.episode = EpisodeState(episode_id=episode_id or uuid.uuid4().hex, done=seen.done, last=seen)
        return seen

    async def step(self, action: str) -> Observation:
        if self.episode.last is None:
            raise EpisodeError("step before reset: there is no episode yet; send a reset first")
        if self.episode.done:
            raise EpisodeError(
                f"step after the end: the episode was over after {self.episode.step_count} steps; send a reset first"
            )
        seen = await self._call("step", self._config.step_s, lambda: self._env.step(action))
        count = self.episode.step_count + 1
        if self._config.max_steps is not None and count >= self._config.max_steps and not seen.done:
            seen = replace(seen, done=True, facts={**seen.facts, "cut_after_steps": count})
        self.episode = replace(self.episode, step_count=count, done=seen.done, last=seen)
        return seen

    def idle_s(self) -> float:
        """Seconds since the last message; 0 while the environment is working."""
        return 0.0 if self.state is not SessionState.OPEN else self._clock.now() - self._last_used

    def touch(self) -> None:
        self._last_used = self._clock.now()

    async def close(self, reason: str) -> None:
        """Return the environment, then the slot. Later calls wait for the first and keep its reason."""
        if self.state in (SessionState.CLOSING, SessionState.CLOSED):
            await self._closed.wait()
            return
        self._move(SessionState.CLOSING)
        self.end_reason = reason
        if self.on_end is not None:
            self.on_end()

        async def close_environment() -> None:
            with fenced("closing the environment"):
                await self._env.close()

        try:
            in_time = await finish(close_environment(), within_s=self._config.close_s, name=f"session {self.id}")
            if not in_time:
                self._log.warning(
                    "envs.environment_not_closed", session=self.id, within_s=self._config.close_s, reason=reason
                )
        finally:
            self._slot.release()
            self._move(SessionState.CLOSED)
            self._closed.set()

    async def _call(self, name: str, within_s: float, call: Callable[[], Any]) -> Observation:
        if self.failure is not None:
            raise SessionEndedError(f"{name}: {self.failure}")
        if self.state is not SessionState.OPEN:
            raise SessionEndedError(f"{name}: this session is {self.state} ({self.end_reason or 'a call is running'})")
        self._move(SessionState.WORKING)
        try:
            async with asyncio.timeout(within_s):
                with fenced(name):
                    seen: Observation = await call()
                    return seen
        except SandboxDiedError as error:
            # The pool replaces the sandbox; only a new session gets the replacement.
            self.failure = f"{error}; this session is closed, connect again"
            raise SessionEndedError(self.failure) from error
        except TimeoutError:
            # The environment may still be running the call, so it must not be used again.
            self.failure = f"{name} took longer than {within_s:g} s; this session is closed, connect again"
            raise SessionEndedError(self.failure) from None
        finally:
            self._finish_call()

    def _finish_call(self) -> None:
        self.touch()
        if self.state is SessionState.WORKING:  # it may have been closed during the call
            self._move(SessionState.OPEN)

    def _move(self, to: SessionState) -> None:
        if to not in MOVES[self.state]:
            raise RuntimeError(f"session {self.id} cannot go from {self.state} to {to}")
        self.state = to


class SessionManager:
    """Opens sessions within the capacity, closes idle ones, and closes all when the server stops."""

    def __init__(self, pool: EnvironmentPool, config: EnvServerConfig, *, clock: Clock, log: EventLog) -> None:
        self.capacity = session_capacity(pool.capacity, config.max_sessions)
        self.reservations = Reservations(self.capacity, hold_s=config.reservation_hold_s, clock=clock)
        self._pool = pool
        self._config = config
        self._clock = clock
        self._log = log
        self._sessions: dict[str, Session] = {}

    async def take_slot(self, reservation: str | None) -> SessionSlot:
        """A slot of the reservation, or the next free one. Called before the connection is accepted."""
        claimed = (
            ReservationId(reservation)
            if reservation is not None
            else await self.reservations.reserve(1, wait_s=self._config.connect_wait_s)
        )
        return self.reservations.claim(claimed)

    async def open(self, slot: SessionSlot) -> Session:
        """A session with an environment of the pool. On failure the slot is released."""
        try:
            with fenced("creating an environment"):
                env = await self._pool.acquire(Deadline(self._config.acquire_s, "session start"))
        except EnvironmentsExhaustedError as error:
            slot.release()
            active = self.reservations.slots.in_use
            raise CapacityReachedError(str(error), active=active, capacity=self.capacity) from error
        except RollbookError as error:
            slot.release()
            raise EnvironmentStartError(str(error)) from error
        except BaseException:
            slot.release()
            raise
        session = Session(env, slot, self._config, clock=self._clock, log=self._log)
        self._sessions[session.id] = session
        self._log.info("envs.session_opened", session=session.id, active=self.reservations.slots.in_use)
        return session

    def find(self, session_id: object) -> Session:
        session = self._sessions.get(session_id) if isinstance(session_id, str) else None
        if session is None:
            raise SessionEndedError(f"there is no session {session_id!r}; it was closed, or never opened")
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
        """Close idle sessions and cancel unclaimed reservations, at regular intervals. Ends: on cancellation."""
        low, high = SWEEP_BOUNDS_S
        limit_s = min(self._config.idle_s, self._config.reservation_hold_s)
        while True:
            await self._clock.sleep(min(high, max(low, limit_s / SWEEPS_PER_LIMIT)))
            await self.sweep()

    async def sweep(self) -> None:
        for reservation in self.reservations.expire():
            self._log.warning(
                "envs.reservation_expired", reservation=reservation, hold_s=self._config.reservation_hold_s
            )
        idle = [session for session in self._sessions.values() if session.idle_s() >= self._config.idle_s]
        await asyncio.gather(*(self.close(session, f"idle for {self._config.idle_s:g} s") for session in idle))

    async def close_all(self) -> None:
        closing = (self.close(session, "the server stops") for session in list(self._sessions.values()))
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, RollbookError):
                self._log.warning("envs.session_not_closed", error=str(outcome))


def session_capacity(pool_capacity: int | None, max_sessions: int | None) -> int:
    """The number of concurrent sessions. Raises `RunError` if `max_sessions` exceeds the pool."""
    if pool_capacity is None:
        return max_sessions or DEFAULT_MAX_SESSIONS
    if max_sessions is not None and max_sessions > pool_capacity:
        raise RunError(
            f"max_sessions is {max_sessions}, but the pool has {pool_capacity} environments; "
            f"lower it to {pool_capacity}, or enlarge the pool to {max_sessions}"
        )
    return max_sessions or pool_capacity
