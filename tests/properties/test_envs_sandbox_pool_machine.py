"""Whatever holders and sandboxes do, and in whatever order: nobody shares, nobody gets a dirty or a dead one, nothing leaks."""

import asyncio
from enum import StrEnum

from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.concurrency.deadline import Deadline
from rollbook.envs.sandboxes.pool import Lease, PoolLimits, SandboxPool
from tests.parts.envs.aws import FakeSandbox, FakeSandboxFactory, quiet_log


class Deed(StrEnum):
    ASK = "somebody asks for a sandbox"
    GIVE_BACK = "the oldest holder gives back"
    GIVE_BACK_SUSPECT = "the oldest holder gives back a suspect"
    LEAVE = "the newest who waits leaves"
    DIE_LENT = "the oldest lent sandbox dies"
    DIE_IDLE = "a sandbox that nobody holds dies"
    FALL_ILL = "a sandbox that nobody holds stops answering"
    GROW = "the oldest lent sandbox grows"
    REST = "time passes"


class Model:
    """Holders and waiters around one pool."""

    def __init__(self, pool: SandboxPool[FakeSandbox], factory: FakeSandboxFactory) -> None:
        self.pool = pool
        self.factory = factory
        self.held: list[Lease[FakeSandbox]] = []
        self.waiting: list[asyncio.Task[Lease[FakeSandbox]]] = []
        self.uses: dict[str, int] = {}

    async def do(self, deed: Deed) -> None:
        idle = [s for s in self.factory.made if s.is_alive and all(s is not lease.sandbox for lease in self.held)]
        match deed:
            case Deed.ASK:
                self.waiting.append(asyncio.create_task(self.pool.acquire(Deadline(60.0, "model"))))
            case Deed.LEAVE if self.waiting:
                leaver = self.waiting.pop()
                leaver.cancel()
                (outcome,) = await asyncio.gather(leaver, return_exceptions=True)
                if isinstance(outcome, Lease):
                    self.took(outcome)
            case Deed.GIVE_BACK | Deed.GIVE_BACK_SUSPECT if self.held:
                self.held.pop(0).release(is_suspect=deed is Deed.GIVE_BACK_SUSPECT)
            case Deed.DIE_LENT if self.held:
                self.held[0].sandbox.die()
            case Deed.GROW if self.held:
                self.held[0].sandbox.size_bytes = 10_000
            case Deed.DIE_IDLE if idle:
                idle[0].die()
            case Deed.FALL_ILL if idle:
                idle[0].is_ill = True
            case Deed.REST:
                await rest()
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            self.took(task.result())

    def took(self, lease: Lease[FakeSandbox]) -> None:
        """A holder got a sandbox: nobody else has it, and it was cleaned after each use before."""
        assert all(lease.sandbox is not other.sandbox for other in self.held)
        assert lease.sandbox.cleaned == self.uses.get(lease.sandbox.name, 0)
        assert lease.sandbox.size_bytes == 0
        self.uses[lease.sandbox.name] = self.uses.get(lease.sandbox.name, 0) + 1
        self.held.append(lease)


async def rest() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


async def live(deeds: list[Deed], size: int, spares: int) -> None:
    factory = FakeSandboxFactory()
    limits = PoolLimits(size=size, spares=spares, max_memory_bytes=1_000)
    pool = SandboxPool(name="paper", limits=limits, start=factory.start, log=quiet_log())
    async with pool.open():
        model = Model(pool, factory)
        for deed in deeds:
            await model.do(deed)
            assert len(model.held) <= size
        while model.held or model.waiting:
            await model.do(Deed.GIVE_BACK)
            await model.do(Deed.REST)
        await rest()
        assert pool.lent == 0
        again = [await pool.acquire(Deadline(60.0, "model")) for _ in range(size)]
        assert len({lease.sandbox.name for lease in again}) == size
    assert factory.leaked == []


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(list(Deed)), max_size=40), st.integers(1, 3), st.integers(0, 2))
def test_no_order_of_deeds_breaks_the_pool(deeds: list[Deed], size: int, spares: int) -> None:
    asyncio.run(live(deeds, size, spares))
