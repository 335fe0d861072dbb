"""Backoff as a generator, and a retry loop within one deadline. Retry loops are never nested."""

import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.deadline import Deadline, DeadlineExceededError

T = TypeVar("T")


def backoff(*, first_s: float = 0.05, max_s: float = 2.0, rng: random.Random | None = None) -> Iterator[float]:
    """Exponentially growing waits, each drawn from the upper half of its interval so that clients do not retry in step."""
    rng = rng or random.Random()
    interval = first_s
    while True:
        yield interval * (0.5 + rng.random() / 2)
        interval = min(max_s, interval * 2)


async def retry(
    attempt: Callable[[], Awaitable[T]],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    deadline: Deadline,
    clock: Clock | None = None,
    waits: Iterator[float] | None = None,
    on_retry: Callable[[Exception, float], None] | None = None,
) -> T:
    """Call `attempt` until it succeeds or raises another error. Raises the last error when the deadline does not allow a retry.

    An attempt in which the deadline ends reports only that: the error of the attempt before names the cause, and is raised.
    Waits at least `retry_after_s` of an error that has this attribute.
    """
    clock = clock or SystemClock()
    cause: Exception | None = None
    while True:
        try:
            return await attempt()
        except on as error:
            cause = error
            waits = waits or backoff()
            wait = max(next(waits), getattr(error, "retry_after_s", None) or 0.0)
            if deadline.remaining_s() <= wait:
                raise
            if on_retry is not None:
                on_retry(error, wait)
        except Exception as error:
            is_end_of_budget = isinstance(error, DeadlineExceededError) or isinstance(
                error.__cause__, DeadlineExceededError
            )
            if cause is None or not is_end_of_budget:
                raise
            raise cause from error
        await clock.sleep(wait)
