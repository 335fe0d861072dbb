"""The pool's own rules, with sandboxes of paper."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import RunError
from rollbook.envs.sandboxes.pool import DoubleReleaseError, PoolExhaustedError, PoolLimits, SandboxPool, SlotState
from tests.parts.envs.aws import FakeSandbox, FakeSandboxFactory, quiet_log


@asynccontextmanager
async def opened(
    factory: FakeSandboxFactory, *, size: int = 2, spares: int = 0, max_memory_bytes: int = 1000
) -> AsyncIterator[SandboxPool[FakeSandbox]]:
    limits = PoolLimits(size=size, spares=spares, max_memory_bytes=max_memory_bytes)
    pool = SandboxPool(name="paper", limits=limits, start=factory.start, log=quiet_log())
    async with pool.open():
        await settled()
        yield pool


async def settled() -> None:
    """Let every keeper come to rest; none of them waits for a clock."""
    for _ in range(50):
        await asyncio.sleep(0)


def soon() -> Deadline:
    return Deadline(5.0, "test")


async def test_every_slot_is_ready_before_the_pool_is_handed_out() -> None:
    async with opened(FakeSandboxFactory(), size=3, spares=1) as pool:
        assert pool.states == [SlotState.IDLE] * 4
        assert pool.capacity == 3


async def test_no_two_holders_share_a_sandbox() -> None:
    async with opened(FakeSandboxFactory(), size=4) as pool:
        leases = [await pool.acquire(soon()) for _ in range(4)]
        assert len({lease.sandbox.name for lease in leases}) == 4


async def test_a_sandbox_is_cleaned_before_it_is_lent_again() -> None:
    async with opened(FakeSandboxFactory(), size=1) as pool:
        first = await pool.acquire(soon())
        first.release()
        second = await pool.acquire(soon())
        assert second.sandbox is first.sandbox
        assert second.sandbox.cleaned == 1


async def test_giving_back_twice_is_refused_and_does_not_disturb_the_new_holder() -> None:
    async with opened(FakeSandboxFactory(), size=1) as pool:
        first = await pool.acquire(soon())
        first.release()
        second = await pool.acquire(soon())
        with pytest.raises(DoubleReleaseError, match="given back already"):
            first.release()
        with pytest.raises(PoolExhaustedError):
            await pool.acquire_now()
        second.release()


async def test_a_full_pool_says_so_at_once_to_whoever_does_not_want_to_wait() -> None:
    async with opened(FakeSandboxFactory(), size=1) as pool:
        lease = await pool.acquire_now()
        with pytest.raises(RuntimeError, match="paper pool exhausted"):
            await pool.acquire_now()
        lease.release()
        (await pool.acquire_now()).release()


async def test_waiting_ends_with_the_deadline_and_leaves_the_place_to_others() -> None:
    async with opened(FakeSandboxFactory(), size=1) as pool:
        lease = await pool.acquire(soon())
        with pytest.raises(PoolExhaustedError, match="1 of 1 are lent"):
            await pool.acquire(Deadline(0.01, "impatient"))
        lease.release()
        (await pool.acquire(soon())).release()


async def test_who_asked_first_is_served_first() -> None:
    async with opened(FakeSandboxFactory(), size=1) as pool:
        lease = await pool.acquire(soon())
        order: list[int] = []

        async def wait_in_line(number: int) -> None:
            mine = await pool.acquire(soon())
            order.append(number)
            mine.release()

        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(wait_in_line(number))
                await asyncio.sleep(0)
            lease.release()
        assert order == [0, 1, 2, 3, 4]


async def test_a_sandbox_that_dies_idle_is_replaced_before_anybody_gets_it() -> None:
    factory = FakeSandboxFactory()
    async with opened(factory, size=1) as pool:
        factory.made[0].die()
        await settled()
        lease = await pool.acquire(soon())
        assert lease.sandbox is factory.made[1]
        assert pool.replaced == 1
    assert factory.leaked == []


async def test_a_sandbox_that_died_under_its_holder_is_replaced_when_it_comes_back() -> None:
    factory = FakeSandboxFactory()
    async with opened(factory, size=1) as pool:
        lease = await pool.acquire(soon())
        lease.sandbox.die()
        lease.release()
        assert (await pool.acquire(soon())).sandbox is factory.made[1]
        assert factory.made[0].is_removed


async def test_a_sandbox_that_does_not_answer_is_never_lent() -> None:
    factory = FakeSandboxFactory()
    async with opened(factory, size=1) as pool:
        factory.made[0].is_ill = True
        assert (await pool.acquire(soon())).sandbox is factory.made[1]


async def test_a_sandbox_that_grew_too_big_is_replaced() -> None:
    factory = FakeSandboxFactory()
    async with opened(factory, size=1, max_memory_bytes=1000) as pool:
        lease = await pool.acquire(soon())
        lease.sandbox.size_bytes = 1001
        lease.release()
        assert (await pool.acquire(soon())).sandbox is factory.made[1]


async def test_a_suspect_sandbox_is_replaced_without_being_asked() -> None:
    factory = FakeSandboxFactory()
    async with opened(factory, size=1) as pool:
        (await pool.acquire(soon())).release(is_suspect=True)
        assert (await pool.acquire(soon())).sandbox is factory.made[1]


async def test_a_spare_serves_while_the_dead_one_is_replaced() -> None:
    factory = FakeSandboxFactory()
    async with opened(factory, size=1, spares=1) as pool:
        lease = await pool.acquire(soon())
        factory.failures_left = 1_000
        lease.release(is_suspect=True)
        assert (await pool.acquire(soon())).sandbox is factory.made[1]


async def test_spares_do_not_raise_the_number_of_holders() -> None:
    async with opened(FakeSandboxFactory(), size=1, spares=2) as pool:
        await pool.acquire(soon())
        with pytest.raises(PoolExhaustedError):
            await pool.acquire_now()


async def test_a_start_that_fails_is_tried_again() -> None:
    factory = FakeSandboxFactory()
    async with opened(factory, size=1) as pool:
        lease = await pool.acquire(soon())
        factory.failures_left = 2
        lease.release(is_suspect=True)
        (await pool.acquire(soon())).release()


async def test_an_exhausted_pool_tells_why_nothing_starts() -> None:
    factory = FakeSandboxFactory()
    async with opened(factory, size=1) as pool:
        lease = await pool.acquire(soon())
        factory.failures_left = 1_000
        lease.release(is_suspect=True)
        with pytest.raises(PoolExhaustedError, match="start failed"):
            await pool.acquire(Deadline(0.05, "impatient"))


async def test_a_pool_that_cannot_open_removes_what_it_had_started() -> None:
    factory = FakeSandboxFactory()

    async def start(slot: int) -> FakeSandbox:
        if slot == 2:
            raise_after = FakeSandboxFactory()
            raise_after.failures_left = 1
            return await raise_after.start(slot)
        return await factory.start(slot)

    pool = SandboxPool(name="paper", limits=PoolLimits(size=3), start=start, log=quiet_log())
    with pytest.raises(RunError, match=r"does not start.*start failed"):
        async with pool.open():
            pytest.fail("a pool that lacks a slot must not open")
    assert factory.leaked == []


async def test_closing_removes_every_sandbox_also_those_that_are_lent() -> None:
    factory = FakeSandboxFactory()
    async with opened(factory, size=3) as pool:
        lease = await pool.acquire(soon())
    assert factory.leaked == []
    lease.release()  # late, and harmless


async def test_what_the_user_of_the_pool_raises_comes_out_as_it_was() -> None:
    factory = FakeSandboxFactory()
    with pytest.raises(ZeroDivisionError):
        async with opened(factory):
            raise ZeroDivisionError
    assert factory.leaked == []


async def test_a_cancelled_waiter_takes_nothing_with_it() -> None:
    async with opened(FakeSandboxFactory(), size=1) as pool:
        lease = await pool.acquire(soon())
        waiter = asyncio.create_task(pool.acquire(soon()))
        await settled()
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        lease.release()
        again = await pool.acquire(soon())
        assert pool.lent == 1
        again.release()


async def test_a_waiter_cancelled_at_any_moment_leaks_no_place() -> None:
    async with opened(FakeSandboxFactory(), size=1) as pool:
        for turns in range(12):
            waiter = asyncio.create_task(pool.acquire(soon()))
            for _ in range(turns):
                await asyncio.sleep(0)
            waiter.cancel()
            outcome = (await asyncio.gather(waiter, return_exceptions=True))[0]
            if not isinstance(outcome, BaseException):
                outcome.release()
            await settled()
            assert pool.lent == 0
        (await pool.acquire(soon())).release()
