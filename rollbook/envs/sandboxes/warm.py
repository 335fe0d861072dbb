"""A pool of started sandboxes for environments that run code of a model, so that an episode does not wait for a start.

A sandbox serves one lease. When it is returned, it is closed and another one is started in its place, so nothing of an episode is
left for the next.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

from rollbook.concurrency.deadline import Deadline
from rollbook.envs.sandboxes.pool import PoolExhaustedError, PoolLimits, SandboxPool
from rollbook.envs.sandboxes.sandbox import SandboxStartError
from rollbook.sandbox.bubblewrap import Kind, start
from rollbook.sandbox.sandbox import Limits, Sandbox, SandboxError, SandboxUnavailableError
from rollbook.telemetry.events import EventLog

LEASE_S = 60.0
"""How long an environment waits for a sandbox. There is at least one for each session, so only starts delay it."""
SPARE_SHARE = 4
"""One spare for this many sandboxes: those that are being replaced delay no session."""

OpenSandbox: TypeAlias = Callable[[], AbstractAsyncContextManager[Sandbox]]


class WarmSandbox:
    """A started sandbox in a slot of the pool, and then its successors. Satisfies `PoolSlot`."""

    def __init__(self, sandbox: Sandbox, limits: Limits, *, kind: Kind, slot: int) -> None:
        self.name = f"sandbox {slot}"
        self.current = sandbox
        self._limits = limits
        self._kind: Kind = kind

    @classmethod
    async def start(cls, limits: Limits, *, kind: Kind, slot: int) -> "WarmSandbox":
        try:
            return cls(await start(limits=limits, kind=kind), limits, kind=kind, slot=slot)
        except (SandboxError, SandboxUnavailableError) as error:
            raise SandboxStartError(str(error)) from error

    @property
    def is_alive(self) -> bool:
        return True  # a sandbox that died is replaced by `clean`, like every other

    async def is_healthy(self) -> bool:
        try:
            await self.current.end_processes()  # there are none: a request that the guest answers at once
        except SandboxError:
            return False
        return True

    def memory_bytes(self) -> int:
        return 0  # it has limits of its own

    async def clean(self) -> None:
        await self.current.close()
        self.current = await start(limits=self._limits, kind=self._kind)

    async def died(self) -> None:
        await self.current.ended()

    async def remove(self) -> None:
        await self.current.close()


@asynccontextmanager
async def open_warm_sandboxes(limits: Limits, *, size: int, kind: Kind, log: EventLog) -> AsyncIterator[OpenSandbox]:
    """Yields what opens a sandbox of the pool. At most `size` are open at the same time."""

    async def start_slot(slot: int) -> WarmSandbox:
        return await WarmSandbox.start(limits, kind=kind, slot=slot)

    pool = SandboxPool[WarmSandbox](
        name="sandbox",
        limits=PoolLimits(size=size, spares=-(-size // SPARE_SHARE)),
        start=start_slot,
        log=log,
    )

    @asynccontextmanager
    async def lease() -> AsyncIterator[Sandbox]:
        try:
            leased = await pool.acquire(Deadline(LEASE_S, "sandbox"))
        except PoolExhaustedError as error:
            raise SandboxError(str(error)) from error
        try:
            yield leased.sandbox.current
        finally:
            leased.release()

    async with pool.open():
        yield lease
