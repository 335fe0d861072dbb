"""MiniStackPool: simulators of AWS on consecutive ports, each lent to one session at a time.

async with open_ministack_pool(AwsCliConfig(pool_size=8), log=log) as pool:
    lease = await pool.acquire(Deadline(30.0, "session"))
    await lease.sandbox.run(["s3api", "create-bucket", "--bucket", "mine"])
    lease.release()                                     # wiped, checked, lent again
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollbook.envs.builtin.awscli.backend import SimulatedCloud
from rollbook.envs.builtin.awscli.config import AwsCliConfig
from rollbook.envs.sandboxes.pool import PoolLimits, SandboxPool
from rollbook.telemetry.events import EventLog


class MiniStackPool(SandboxPool[SimulatedCloud]):
    """A `SandboxPool` whose slot `i` listens on `base_port + i`. When all are lent: `RuntimeError("MiniStack pool exhausted…")`."""

    def __init__(self, config: AwsCliConfig, *, log: EventLog) -> None:
        async def start(slot: int) -> SimulatedCloud:
            return await SimulatedCloud.start(config, port=config.base_port and config.base_port + slot)

        super().__init__(
            name="MiniStack",
            limits=PoolLimits(size=config.pool_size, spares=config.spares, max_memory_bytes=config.max_memory_mb << 20),
            start=start,
            log=log,
        )


@asynccontextmanager
async def open_ministack_pool(config: AwsCliConfig, *, log: EventLog) -> AsyncIterator[MiniStackPool]:
    """The pool with every simulator up. Leaves nothing behind, however it ends."""
    pool = MiniStackPool(config, log=log)
    async with pool.open():
        yield pool
