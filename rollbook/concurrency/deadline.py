"""One time budget for a whole operation, passed down, so that five retries cannot take five times as long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
