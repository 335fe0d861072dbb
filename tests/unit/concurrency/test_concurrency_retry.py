"""Retries: growing waits, the peer's `retry_after_s`, and the deadline."""

import asyncio
import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.concurrency.clock import ManualClock
from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.concurrency.retry import backoff, retry
from rollbook.contracts.errors import RunError, TransientError


class Flaky:
    """Raises the given errors, in order, and then returns."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def ones() -> Iterator[float]:
    return itertools.repeat(1.0)


@given(seed=st.integers(0, 2**32), first=st.floats(0.001, 1.0), most=st.floats(1.0, 30.0))
def test_waits_grow_to_the_maximum_and_stay_in_the_upper_half_of_their_interval(
    seed: int, first: float, most: float
) -> None:
    waits = list(itertools.islice(backoff(first_s=first, max_s=most, rng=random.Random(seed)), 40))
    interval = first
    for wait in waits:
        assert interval / 2 <= wait <= interval
        interval = min(most, interval * 2)
    assert waits[-1] >= most / 2


async def test_a_call_that_fails_twice_returns_its_result_and_reports_both_retries() -> None:
    clock, flaky, reported = ManualClock(), Flaky(TransientError("503"), TransientError("503")), list[float]()
    task = asyncio.create_task(
        retry(
            flaky,
            on=TransientError,
            deadline=Deadline(60.0, "submit", clock=clock),
            clock=clock,
            waits=ones(),
            on_retry=lambda error, wait: reported.append(wait),
        )
    )
    await clock.advance(2.0)
    assert await task == "answer"
    assert flaky.calls == 3
    assert reported == [1.0, 1.0]


async def test_the_last_error_is_raised_when_the_next_wait_exceeds_the_deadline() -> None:
    clock = ManualClock()
    flaky = Flaky(*(TransientError(f"try {n}") for n in range(1, 100)))
    task = asyncio.create_task(
        retry(flaky, on=TransientError, deadline=Deadline(3.5, "submit", clock=clock), clock=clock, waits=ones())
    )
    await clock.advance(10.0)
    with pytest.raises(TransientError, match="try 4"):
        await task


async def test_when_the_budget_ends_within_an_attempt_the_error_before_it_is_raised() -> None:
    clock = ManualClock()
    wrapped = TransientError("the budget ran out")
    wrapped.__cause__ = DeadlineExceededError("connect")
    for end in (DeadlineExceededError("connect"), wrapped):
        task = asyncio.create_task(
            retry(
                Flaky(TimeoutError("the server is full"), end),
                on=TimeoutError,
                deadline=Deadline(60.0, "connect", clock=clock),
                clock=clock,
                waits=ones(),
            )
        )
        await clock.advance(2.0)
        with pytest.raises(TimeoutError, match="the server is full"):
            await task


async def test_another_error_is_not_retried() -> None:
    clock, flaky = ManualClock(), Flaky(RunError("schema mismatch"))
    with pytest.raises(RunError):
        await retry(flaky, on=TransientError, deadline=Deadline(60.0, "submit", clock=clock), clock=clock)
    assert flaky.calls == 1


async def test_a_longer_retry_after_of_the_peer_is_respected() -> None:
    clock, flaky = ManualClock(), Flaky(TransientError("429", retry_after_s=5.0))
    task = asyncio.create_task(
        retry(flaky, on=TransientError, deadline=Deadline(60.0, "submit", clock=clock), clock=clock, waits=ones())
    )
    await clock.advance(4.9)
    assert flaky.calls == 1
    await clock.advance(0.2)
    assert await task == "answer"


async def test_a_retry_after_beyond_the_deadline_ends_the_retries_at_once() -> None:
    clock, flaky = ManualClock(), Flaky(TransientError("429", retry_after_s=100.0))
    with pytest.raises(TransientError):
        await retry(flaky, on=TransientError, deadline=Deadline(60.0, "submit", clock=clock), clock=clock)
    assert flaky.calls == 1
