"""Waiting out policy servers that are away: one that is being restarted must not cost the trainer its step."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollbook.concurrency.clock import Clock
from rollbook.concurrency.deadline import Deadline
from rollbook.concurrency.retry import retry
from rollbook.contracts.errors import TransientError
from rollbook.telemetry.events import EventLog

T = TypeVar("T")


class Patience:
    """Tries a call again while it fails for a passing reason, for at most `within_s`; then the last error is raised."""

    def __init__(self, *, clock: Clock, log: EventLog, within_s: float) -> None:
        self._clock = clock
        self._log = log
        self._within_s = within_s

    async def call(self, attempt: Callable[[], Awaitable[T]], *, what: str) -> T:
        # One warning a call, however often it is tried: the second says nothing that the first did not.
        has_told = False

        def noticed(error: Exception, wait_s: float) -> None:
            nonlocal has_told
            if not has_told:
                self._log.warning("trainer.waiting_for_peer", what=what, cause=str(error), within_s=self._within_s)
                has_told = True

        deadline = Deadline(self._within_s, what, clock=self._clock)
        return await retry(attempt, on=TransientError, deadline=deadline, clock=self._clock, noticed=noticed)
