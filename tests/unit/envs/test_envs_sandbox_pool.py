"""The rules of the sandbox pool, with fake sandboxes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import RunError
from rollbook.envs.sandboxes.pool import DoubleReleaseError, PoolExhaustedError, PoolLimits, SandboxPool, SlotState
from tests.parts.envs.aws import FakeFactory, FakeSandbox, quiet_log


@asynccontextmanager
async def opened_pool(
    factory: FakeFactory, *, size: int = 2, spares: int = 0, max_memory_bytes: int = 1000
) -> AsyncIterator[SandboxPool[FakeSandbox]]:
    limits = PoolLimits(size=size, spares=spares, max_memory_bytes=max_memory_bytes)
    pool = SandboxPool(name="fake", limits=limits, start=factory.start, log=quiet_log())
    async with pool.open():
        await run_keepers()
        yield pool


async def run_keepers() -> None:
    """Run every keeper until it waits; none of them waits for a clock."""
    for _ in range(50):
        await asyncio.sleep(0)


def soon() -> Deadline:
    return Deadline(5.0, "test")


async def test_every_slot_is_ready_when_the_pool_is_open() -> None:
    async with opened_pool(FakeFactory(), size=3, spares=1) as pool:
        assert pool.states == [SlotState.IDLE] * 4
        assert pool.capacity == 3


async def test_no_two_leases_share_a_sandbox() -> None:
    async with opened_pool(FakeFactory(), size=4) as pool:
        leases = [await pool.acquire(soon()) for _ in range(4)]
        assert len({lease.sandbox.name for lease in leases}) == 4


async def test_a_sandbox_is_cleaned_before_its_next_lease() -> None:
    async with opened_pool(FakeFactory(), size=1) as pool:
        first = await pool.acquire(soon())
        first.release()
        second = await pool.acquire(soon())
        assert second.sandbox is first.sandbox
        assert second.sandbox.cleaned == 1


async def test_a_second_release_is_refused_and_does_not_end_the_new_lease() -> None:
    async with opened_pool(FakeFactory(), size=1) as pool:
        first = await pool.acquire(soon())
        first.release()
        second = await pool.acquire(soon())
        with pytest.raises(DoubleReleaseError, match="already released"):
            first.release()
        with pytest.raises(PoolExhaustedError):
            await pool.acquire(Deadline(0.01, "impatient"))
        second.release()


async def test_waiting_ends_with_the_deadline_and_takes_no_slot() -> None:
    async with opened_pool(FakeFactory(), size=1) as pool:
        lease = await pool.acquire(soon())
        with pytest.raises(PoolExhaustedError, match="1 of 1 are leased"):
            await pool.acquire(Deadline(0.01, "impatient"))
        lease.release()
        (await pool.acquire(soon())).release()


async def test_waiting_sessions_are_served_in_order() -> None:
    async with opened_pool(FakeFactory(), size=1) as pool:
        lease = await pool.acquire(soon())
        order: list[int] = []

        async def acquire_and_release(number: int) -> None:
            mine = await pool.acquire(soon())
            order.append(number)
            mine.release()

        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(acquire_and_release(number))
                await asyncio.sleep(0)
            lease.release()
        assert order == [0, 1, 2, 3, 4]


async def test_a_sandbox_that_dies_while_idle_is_replaced_and_never_leased() -> None:
    factory = FakeFactory()
    async with opened_pool(factory, size=1) as pool:
        factory.made[0].die()
        await run_keepers()
        lease = await pool.acquire(soon())
        assert lease.sandbox is factory.made[1]
        assert pool.replaced == 1
    assert factory.leaked == []


async def test_a_sandbox_that_died_while_leased_is_replaced_after_its_release() -> None:
    factory = FakeFactory()
    async with opened_pool(factory, size=1) as pool:
        lease = await pool.acquire(soon())
        lease.sandbox.die()
        lease.release()
        assert (await pool.acquire(soon())).sandbox is factory.made[1]
        assert factory.made[0].is_removed


async def test_an_unhealthy_sandbox_is_never_leased() -> None:
    factory = FakeFactory()
    async with opened_pool(factory, size=1) as pool:
        factory.made[0].is_unhealthy = True
        assert (await pool.acquire(soon())).sandbox is factory.made[1]


async def test_a_sandbox_that_uses_too_much_memory_is_replaced() -> None:
    factory = FakeFactory()
    async with opened_pool(factory, size=1, max_memory_bytes=1000) as pool:
        lease = await pool.acquire(soon())
        lease.sandbox.size_bytes = 1001
        lease.release()
        assert (await pool.acquire(soon())).sandbox is factory.made[1]


async def test_a_suspect_sandbox_is_replaced_without_a_clean_up() -> None:
    factory = FakeFactory()
    async with opened_pool(factory, size=1) as pool:
        (await pool.acquire(soon())).release(is_suspect=True)
        assert (await pool.acquire(soon())).sandbox is factory.made[1]


async def test_a_spare_is_leased_while_a_sandbox_is_replaced() -> None:
    factory = FakeFactory()
    async with opened_pool(factory, size=1, spares=1) as pool:
        lease = await pool.acquire(soon())
        factory.failures_left = 1_000
        lease.release(is_suspect=True)
        assert (await pool.acquire(soon())).sandbox is factory.made[1]


async def test_spares_do_not_raise_the_number_of_leases() -> None:
    async with opened_pool(FakeFactory(), size=1, spares=2) as pool:
        await pool.acquire(soon())
        with pytest.raises(PoolExhaustedError):
            await pool.acquire(Deadline(0.01, "impatient"))


async def test_a_start_that_fails_is_tried_again() -> None:
    factory = FakeFactory()
    async with opened_pool(factory, size=1) as pool:
        lease = await pool.acquire(soon())
        factory.failures_left = 2
        lease.release(is_suspect=True)
        (await pool.acquire(soon())).release()


async def test_an_exhausted_pool_reports_why_the_last_start_failed() -> None:
    factory = FakeFactory()
    async with opened_pool(factory, size=1) as pool:
        lease = await pool.acquire(soon())
        factory.failures_left = 1_000
        lease.release(is_suspect=True)
        with pytest.raises(PoolExhaustedError, match="cannot start"):
            await pool.acquire(Deadline(0.05, "impatient"))


async def test_a_pool_that_cannot_open_removes_the_sandboxes_it_started() -> None:
    factory = FakeFactory()

    async def start(slot: int) -> FakeSandbox:
        if slot == 2:
            raise_after = FakeFactory()
            raise_after.failures_left = 1
            return await raise_after.start(slot)
        return await factory.start(slot)

    pool = SandboxPool(name="fake", limits=PoolLimits(size=3), start=start, log=quiet_log())
    with pytest.raises(RunError, match=r"does not start.*cannot start"):
        async with pool.open():
            pytest.fail("a pool that lacks a slot must not open")
    assert factory.leaked == []


async def test_closing_removes_every_sandbox_including_leased_ones() -> None:
    factory = FakeFactory()
    async with opened_pool(factory, size=3) as pool:
        lease = await pool.acquire(soon())
    assert factory.leaked == []
    lease.release()  # without effect after the close


async def test_an_error_of_the_block_is_passed_on_unchanged() -> None:
    factory = FakeFactory()
    with pytest.raises(ZeroDivisionError):
        async with opened_pool(factory):
            raise ZeroDivisionError
    assert factory.leaked == []


async def test_a_cancelled_acquire_takes_no_slot() -> None:
    async with opened_pool(FakeFactory(), size=1) as pool:
        lease = await pool.acquire(soon())
        waiter = asyncio.create_task(pool.acquire(soon()))
        await run_keepers()
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        lease.release()
        again = await pool.acquire(soon())
        assert pool.leased == 1
        again.release()


class GatedFactory(FakeFactory):
    """Once closed, it starts a sandbox only when the gate of its slot is open."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False
        self.gates = [asyncio.Event() for _ in range(2)]

    async def start(self, slot: int) -> FakeSandbox:
        if self.is_closed:
            await self.gates[slot].wait()
            self.made.append(FakeSandbox(f"fake-{slot}-{len(self.made)}"))
            return self.made[-1]
        return await super().start(slot)


async def test_a_cancelled_acquire_does_not_end_the_lease_of_another_session() -> None:
    factory = GatedFactory()
    async with opened_pool(factory, size=2) as pool:
        factory.is_closed = True
        for sandbox in factory.made[:2]:
            sandbox.die()
        await run_keepers()
        waiting = asyncio.create_task(pool.acquire(soon()))
        await run_keepers()
        # The other session takes the sandbox in the iteration of the event loop in which it becomes idle.
        factory.gates[1].set()
        other = await asyncio.create_task(pool.acquire(soon()))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await run_keepers()
        assert pool.states[1] is SlotState.LEASED
        assert other.sandbox.cleaned == 0
        other.release()


async def test_an_acquire_that_is_cancelled_at_any_moment_leaks_no_slot() -> None:
    async with opened_pool(FakeFactory(), size=1) as pool:
        for turns in range(12):
            waiter = asyncio.create_task(pool.acquire(soon()))
            for _ in range(turns):
                await asyncio.sleep(0)
            waiter.cancel()
            outcome = (await asyncio.gather(waiter, return_exceptions=True))[0]
            if not isinstance(outcome, BaseException):
                outcome.release()
            await run_keepers()
            assert pool.leased == 0
        (await pool.acquire(soon())).release()
