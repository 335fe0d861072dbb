"""In any order of events: no sandbox is shared, none is leased dirty or dead, and none leaks."""

import asyncio
from enum import StrEnum

from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.concurrency.deadline import Deadline
from rollbook.envs.sandboxes.pool import Lease, PoolLimits, SandboxPool
from tests.parts.envs.aws import FakeFactory, FakeSandbox, quiet_log


class Event(StrEnum):
    ACQUIRE = "a session acquires a sandbox"
    RELEASE = "the oldest lease is released"
    RELEASE_SUSPECT = "the oldest lease is released as suspect"
    CANCEL = "the newest waiting session is cancelled"
    DIE_LEASED = "the oldest leased sandbox dies"
    DIE_IDLE = "an idle sandbox dies"
    FAIL_IDLE = "an idle sandbox becomes unhealthy"
    GROW = "the oldest leased sandbox uses too much memory"
    WAIT = "time passes"


class Model:
    """Leases and waiting sessions of one pool."""

    def __init__(self, pool: SandboxPool[FakeSandbox], factory: FakeFactory) -> None:
        self.pool = pool
        self.factory = factory
        self.leases: list[Lease[FakeSandbox]] = []
        self.waiting: list[asyncio.Task[Lease[FakeSandbox]]] = []
        self.uses: dict[str, int] = {}

    async def do(self, event: Event) -> None:
        idle = [s for s in self.factory.made if s.is_alive and all(s is not lease.sandbox for lease in self.leases)]
        match event:
            case Event.ACQUIRE:
                self.waiting.append(asyncio.create_task(self.pool.acquire(Deadline(60.0, "model"))))
            case Event.CANCEL if self.waiting:
                cancelled = self.waiting.pop()
                cancelled.cancel()
                (outcome,) = await asyncio.gather(cancelled, return_exceptions=True)
                if isinstance(outcome, Lease):
                    self.check_lease(outcome)
            case Event.RELEASE | Event.RELEASE_SUSPECT if self.leases:
                self.leases.pop(0).release(is_suspect=event is Event.RELEASE_SUSPECT)
            case Event.DIE_LEASED if self.leases:
                self.leases[0].sandbox.die()
            case Event.GROW if self.leases:
                self.leases[0].sandbox.size_bytes = 10_000
            case Event.DIE_IDLE if idle:
                idle[0].die()
            case Event.FAIL_IDLE if idle:
                idle[0].is_unhealthy = True
            case Event.WAIT:
                await run_keepers()
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            self.check_lease(task.result())

    def check_lease(self, lease: Lease[FakeSandbox]) -> None:
        """A new lease is exclusive, and its sandbox was cleaned after every earlier use."""
        assert all(lease.sandbox is not other.sandbox for other in self.leases)
        assert lease.sandbox.cleaned == self.uses.get(lease.sandbox.name, 0)
        assert lease.sandbox.size_bytes == 0
        self.uses[lease.sandbox.name] = self.uses.get(lease.sandbox.name, 0) + 1
        self.leases.append(lease)


async def run_keepers() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


async def apply(events: list[Event], size: int, spares: int) -> None:
    factory = FakeFactory()
    limits = PoolLimits(size=size, spares=spares, max_memory_bytes=1_000)
    pool = SandboxPool(name="fake", limits=limits, start=factory.start, log=quiet_log())
    async with pool.open():
        model = Model(pool, factory)
        for event in events:
            await model.do(event)
            assert len(model.leases) <= size
        while model.leases or model.waiting:
            await model.do(Event.RELEASE)
            await model.do(Event.WAIT)
        await run_keepers()
        assert pool.leased == 0
        again = [await pool.acquire(Deadline(60.0, "model")) for _ in range(size)]
        assert len({lease.sandbox.name for lease in again}) == size
    assert factory.leaked == []


@settings(max_examples=80)
@given(st.lists(st.sampled_from(list(Event)), max_size=40), st.integers(1, 3), st.integers(0, 2))
def test_no_order_of_events_breaks_the_pool(events: list[Event], size: int, spares: int) -> None:
    asyncio.run(apply(events, size, spares))
