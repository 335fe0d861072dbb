"""One time budget for a whole operation, passed down, so that five retries cannot take five times as long; and clean-up in time."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from rollbook.concurrency.clock import Clock, SystemClock


class DeadlineExceededError(Exception):
    """Names the budget that ran out. Rooms translate it into their own errors."""


class Deadline:
    def __init__(self, seconds: float, name: str, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.name = name
        self.seconds = seconds
        self._until = self._clock.now() + seconds

    def remaining_s(self) -> float:
        return max(0.0, self._until - self._clock.now())

    @property
    def is_over(self) -> bool:
        return self.remaining_s() <= 0

    def require(self) -> float:
        """Seconds left. Raises `DeadlineExceededError` when there are none."""
        left = self.remaining_s()
        if left <= 0:
            raise DeadlineExceededError(f"{self.name}: the budget of {self.seconds:g} s ran out")
        return left

    @asynccontextmanager
    async def limit(self, what: str, *, at_most_s: float | None = None) -> AsyncIterator[None]:
        """Limit a block to the remaining time, or to `at_most_s` if that is less. The error names the budget that ran out."""
        left = self.require()
        budget, owner = left, f"{self.name} ({self.seconds:g} s)"
        if at_most_s is not None and at_most_s < left:
            budget, owner = at_most_s, f"{what} ({at_most_s:g} s)"
        try:
            async with asyncio.timeout(budget) as scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise  # a timeout inside the block, not of this budget
            raise DeadlineExceededError(f"{what} did not finish: the budget of {owner} ran out") from error


async def finish(cleanup: Coroutine[Any, Any, object], *, within_s: float, name: str = "cleanup") -> bool:
    """Run `cleanup` to its end or to its time limit. True when it completed.

    A cancellation that arrives meanwhile is raised after the clean-up.
    """
    task = asyncio.ensure_future(cleanup)
    is_cancelled = False
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while not task.done() and loop.time() < until:
        try:
            await asyncio.wait({task}, timeout=until - loop.time())
        except asyncio.CancelledError:
            is_cancelled = True
    is_complete = task.done() and not task.cancelled() and task.exception() is None
    if not task.done():
        task.cancel(f"{name}: not complete after {within_s:g} s")
    if is_cancelled:
        raise asyncio.CancelledError
    return is_complete
