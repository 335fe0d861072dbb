"""One budget for a whole deed, handed down, so that five retries cannot take five times as long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollbook.concurrency.clock import Clock, SystemClock


class DeadlineExceededError(Exception):
    """Says which budget ran out. Rooms translate it into their own verdict."""


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
        """Seconds left; raises when there are none."""
        left = self.remaining_s()
        if left <= 0:
            raise DeadlineExceededError(f"{self.name}: its {self.seconds:g} s are over")
        return left

    @asynccontextmanager
    async def limit(self, what: str, *, at_most_s: float | None = None) -> AsyncIterator[None]:
        """Bound a block by what is left, or by `at_most_s` if that is less. The error names the budget that ran out."""
        left = self.require()
        budget, owner = left, f"{self.name} ({self.seconds:g} s)"
        if at_most_s is not None and at_most_s < left:
            budget, owner = at_most_s, f"{what} ({at_most_s:g} s)"
        try:
            async with asyncio.timeout(budget) as scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise  # the block's own: blaming it on this budget would send the reader to the wrong setting
            raise DeadlineExceededError(f"{what} did not finish: the budget of {owner} ran out") from error
