"""Clean-up completes within its time limit, also while its caller is cancelled."""

import asyncio

import pytest

from rollbook.concurrency.deadline import finish


async def test_a_cleanup_that_completes_returns_true() -> None:
    removed = list[str]()

    async def remove() -> None:
        await asyncio.sleep(0)
        removed.append("sandbox")

    assert await finish(remove(), within_s=5.0)
    assert removed == ["sandbox"]


async def test_a_cleanup_that_hangs_is_cancelled_after_its_limit() -> None:
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
    async def fail() -> None:
        raise OSError("gone already")

    assert not await finish(fail(), within_s=5.0)


async def test_a_cancelled_caller_waits_for_the_cleanup_and_then_raises() -> None:
    started, removed = asyncio.Event(), list[str]()

    async def remove() -> None:
        started.set()
        await asyncio.sleep(0.02)
        removed.append("sandbox")

    caller = asyncio.create_task(finish(remove(), within_s=5.0))
    await started.wait()
    caller.cancel()
    await asyncio.sleep(0)
    caller.cancel()  # a second cancellation changes nothing
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert removed == ["sandbox"]
