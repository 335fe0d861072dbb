"""Backoff as a plain generator, and one bounded retry loop inside one deadline. Never nested."""

import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.deadline import Deadline, DeadlineExceededError

T = TypeVar("T")


def backoff(
    *, first_s: float = 0.05, factor: float = 2.0, most_s: float = 2.0, rng: random.Random | None = None
) -> Iterator[float]:
    """Waits that grow exponentially, each drawn from the upper half of its interval so that clients do not march in step."""
    rng = rng or random.Random()
    interval = first_s
    while True:
        yield interval * (0.5 + rng.random() / 2)
        interval = min(most_s, interval * factor)


async def retry(
    attempt: Callable[[], Awaitable[T]],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    deadline: Deadline,
    clock: Clock | None = None,
    waits: Iterator[float] | None = None,
    noticed: Callable[[Exception, float], None] | None = None,
) -> T:
    """Call `attempt` until it succeeds, raises something else, or the deadline is over; then the last error is raised.

    An error with a `retry_after_s` attribute is obeyed when that is longer than our own wait.
    """
    clock = clock or SystemClock()
    waits = waits or backoff()
    while True:
        try:
            return await attempt()
        except on as error:
            advised = getattr(error, "retry_after_s", None) or 0.0
            wait = max(next(waits), advised)
            if deadline.remaining_s() <= wait:
                raise
            if noticed is not None:
                noticed(error, wait)
        except DeadlineExceededError:
            raise
        await clock.sleep(wait)
