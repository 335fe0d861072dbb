"""One time budget for a whole operation; the error names the budget that ran out."""

import asyncio

import pytest

from rollbook.concurrency.clock import ManualClock
from rollbook.concurrency.deadline import Deadline, DeadlineExceededError


def test_the_remaining_time_shrinks_with_the_clock_and_is_never_negative() -> None:
    clock = ManualClock()
    deadline = Deadline(10.0, "group 7", clock=clock)
    clock.jump(4.0)
    assert deadline.remaining_s() == pytest.approx(6.0)
    assert not deadline.is_over
    clock.jump(60.0)
    assert deadline.remaining_s() == 0.0
    assert deadline.is_over


def test_requiring_time_after_the_deadline_names_the_budget() -> None:
    clock = ManualClock()
    deadline = Deadline(2.5, "episode of guess-7@0", clock=clock)
    clock.jump(3.0)
    with pytest.raises(DeadlineExceededError, match=r"episode of guess-7@0: the budget of 2.5 s ran out"):
        deadline.require()


async def test_a_block_that_outlasts_the_deadline_blames_the_deadline() -> None:
    # Not shorter: on a busy machine it would be over before the block begins.
    deadline = Deadline(0.5, "the whole episode")
    with pytest.raises(DeadlineExceededError, match=r"policy request did not finish: .* the whole episode \(0.5 s\)"):
        async with deadline.limit("policy request"):
            await asyncio.sleep(30)


async def test_a_block_that_outlasts_its_own_limit_blames_that_limit() -> None:
    deadline = Deadline(30.0, "the whole episode")
    with pytest.raises(DeadlineExceededError, match=r"the budget of policy request \(0.02 s\) ran out"):
        async with deadline.limit("policy request", at_most_s=0.02):
            await asyncio.sleep(30)
    assert not deadline.is_over


async def test_a_timeout_raised_inside_a_block_is_passed_on() -> None:
    with pytest.raises(TimeoutError, match="the socket gave up"):
        async with Deadline(30.0, "the whole episode").limit("connect"):
            raise TimeoutError("the socket gave up")


async def test_no_block_starts_after_the_deadline() -> None:
    clock = ManualClock()
    deadline = Deadline(1.0, "startup", clock=clock)
    clock.jump(1.0)
    entered = False
    with pytest.raises(DeadlineExceededError):
        async with deadline.limit("first try"):
            entered = True
    assert not entered


async def test_cancellation_passes_through_a_limit_unchanged() -> None:
    async def work() -> None:
        async with Deadline(30.0, "work").limit("sleep"):
            await asyncio.sleep(30)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
