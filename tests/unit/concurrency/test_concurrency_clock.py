"""The manual clock: sleepers wake in order, and only when the time reaches them."""

import asyncio
import time

import pytest

from rollbook.concurrency.clock import ManualClock, SystemClock


async def test_sleepers_wake_in_the_order_of_their_times() -> None:
    clock, woken = ManualClock(), list[str]()

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    async with asyncio.TaskGroup() as group:
        for name, seconds in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
            group.create_task(sleeper(name, seconds))
        await clock.advance(2.0)
        assert woken == ["early", "middle"]
        await clock.advance(1.0)
    assert woken == ["early", "middle", "late"]


async def test_a_sleeper_that_sleeps_again_wakes_again_within_one_advance() -> None:
    clock, seen = ManualClock(100.0), list[float]()

    async def ticking() -> None:
        for _ in range(3):
            await clock.sleep(1.0)
            seen.append(clock.now())

    task = asyncio.create_task(ticking())
    await clock.advance(10.0)
    await task
    assert seen == [101.0, 102.0, 103.0]
    assert clock.now() == 110.0


async def test_a_cancelled_sleeper_does_not_delay_others() -> None:
    clock = ManualClock()
    gone = asyncio.create_task(clock.sleep(1.0))
    stays = asyncio.create_task(clock.sleep(2.0))
    await clock.advance(0.0)
    gone.cancel()
    await clock.advance(2.0)
    assert gone.cancelled()
    assert stays.done()


async def test_time_never_moves_back_for_a_sleeper_that_a_jump_passed() -> None:
    clock, woken_at = ManualClock(0.0), list[float]()

    async def sleeper() -> None:
        await clock.sleep(1.0)
        woken_at.append(clock.now())

    task = asyncio.create_task(sleeper())
    await clock.advance(0.0)
    clock.jump(50.0)
    assert not task.done()
    await clock.advance(1.0)
    assert woken_at == [50.0]
    assert clock.now() == 51.0


async def test_the_system_clock_moves_forward_over_a_sleep() -> None:
    clock = SystemClock()
    before = clock.now()
    await clock.sleep(0.001)
    assert clock.now() > before
    assert clock.wall() > 1_600_000_000


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_the_wall_time_of_a_process_does_not_follow_a_jump_of_the_systems_clock(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    clock = SystemClock()
    before, system = clock.wall(), time.time
    monkeypatch.setattr(time, "time", lambda: system() + jump_s)
    assert 0 <= clock.wall() - before < 3600
