"""Clean-up completes within its budget, also while its caller is being cancelled."""

import asyncio

import pytest

from rollbook.concurrency.shield import finish


async def test_a_cleanup_that_completes_says_so() -> None:
    removed = list[str]()

    async def remove() -> None:
        await asyncio.sleep(0)
        removed.append("sandbox")

    assert await finish(remove(), within_s=5.0)
    assert removed == ["sandbox"]


async def test_a_cleanup_that_hangs_is_given_up_after_its_budget() -> None:
    was_cancelled = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            was_cancelled.set()
            raise

    assert not await finish(hang(), within_s=0.01, name="remove sandbox")
    await asyncio.wait_for(was_cancelled.wait(), 5)


async def test_a_cleanup_that_raises_is_not_complete_and_does_not_raise() -> None:
    async def break_down() -> None:
        raise OSError("gone already")

    assert not await finish(break_down(), within_s=5.0)


async def test_cancelling_the_caller_lets_the_cleanup_complete_and_is_then_passed_on() -> None:
    started, removed = asyncio.Event(), list[str]()

    async def remove() -> None:
        started.set()
        await asyncio.sleep(0.02)
        removed.append("sandbox")

    caller = asyncio.create_task(finish(remove(), within_s=5.0))
    await started.wait()
    caller.cancel()
    await asyncio.sleep(0)
    caller.cancel()  # impatience changes nothing
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert removed == ["sandbox"]
