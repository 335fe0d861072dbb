"""The cloud behind the command line: one simulator for each session. A real account (`account.py`) has the same interface.

An error *inside* the cloud is part of the agent's observation. A failure *of* the cloud raises `SandboxDiedError`, and the episode
is not scored.

    async with open_cloud_pool(AwsCliConfig(pool_size=8), log=log) as pool:
        lease = await pool.acquire(Deadline(30.0, "session"))
        await lease.sandbox.run(["s3api", "create-bucket", "--bucket", "mine"])
        lease.release()                                     # wiped, checked, lent again
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from rollbook.envs.builtin.awscli.cloud.simulator import Simulator
from rollbook.envs.builtin.awscli.cloud.worker import ApiAnswer, ApiCall, AwsWorker, CommandResult, WorkerSettings
from rollbook.envs.builtin.awscli.config import AwsCliConfig
from rollbook.envs.sandboxes.pool import PoolLimits, SandboxPool
from rollbook.sandbox.sandbox import SandboxDiedError
from rollbook.telemetry.events import EventLog

# The CLI must use no configuration, credentials or instance metadata except these, and must not retry.
SEALED = {
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "1",
    "AWS_PAGER": "",
    "PYTHONWARNINGS": "ignore",
}
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# Error messages of a command after which the health of the simulator is checked.
UNREACHABLE = ("Could not connect to the endpoint URL", "Connection was closed", "Read timeout", "Connection reset")


class Backend(Protocol):
    """The operations of a cloud that the environment uses."""

    @property
    def scratch(self) -> Path:
        """The working directory of commands."""

    async def run(self, argv: Sequence[str]) -> CommandResult:
        """Run one command. Raises `SandboxDiedError` if the cloud is down."""

    async def call_api(self, calls: Sequence[ApiCall]) -> list[ApiAnswer]: ...

    async def clean(self) -> None: ...

    async def remove(self) -> None: ...


class SimulatedCloud:
    """One MiniStack and one warm command line: a slot of the pool. Satisfies `Backend` and `PoolSlot`."""

    def __init__(self, simulator: Simulator, worker: AwsWorker) -> None:
        self._simulator = simulator
        self._worker = worker

    @classmethod
    async def start(cls, config: AwsCliConfig, *, port: int) -> "SimulatedCloud":
        simulator = await Simulator.start(port)
        try:
            # The simulator uses a 12-digit key id as the account number.
            credentials = {"AWS_ACCESS_KEY_ID": config.account, "AWS_SECRET_ACCESS_KEY": "simulated"}
            worker = await AwsWorker.start(
                worker_settings(
                    config, name=f"ministack-{simulator.port}", endpoint=simulator.endpoint, extra=credentials
                )
            )
        except BaseException:
            await simulator.stop()
            raise
        return cls(simulator, worker)

    @property
    def name(self) -> str:
        return f"ministack:{self._simulator.port}"

    @property
    def port(self) -> int:
        return self._simulator.port

    @property
    def pids(self) -> tuple[int, int]:
        """The process ids of the simulator and of the command line."""
        return self._simulator.pid, self._worker.pid

    @property
    def scratch(self) -> Path:
        return self._worker.scratch

    @property
    def is_alive(self) -> bool:
        return self._simulator.is_alive and self._worker.is_alive

    async def is_healthy(self) -> bool:
        return self._worker.is_alive and await self._simulator.is_healthy()

    def memory_bytes(self) -> int:
        return self._simulator.memory_bytes() + self._worker.memory_bytes()

    async def run(self, argv: Sequence[str]) -> CommandResult:
        result = await self._worker.run(argv)
        is_doubtful = result.is_timeout or (result.rc != 0 and any(text in result.stderr for text in UNREACHABLE))
        if not self._simulator.is_alive or (is_doubtful and not await self._simulator.is_healthy()):
            raise SandboxDiedError(
                f"{self.name} died while it ran `aws {' '.join(argv[:2])}`; this episode is not scored"
            )
        return result

    async def call_api(self, calls: Sequence[ApiCall]) -> list[ApiAnswer]:
        return await self._worker.call_api(calls)

    async def clean(self) -> None:
        await self._simulator.reset()
        await self._worker.clean()

    async def died(self) -> None:
        async with asyncio.TaskGroup() as group:
            ends = {
                group.create_task(self._simulator.ended(), name=f"{self.name}.simulator_ended"),
                group.create_task(self._worker.ended(), name=f"{self.name}.worker_ended"),
            }
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()

    async def remove(self) -> None:
        await self._worker.stop()
        await self._simulator.stop()


class CloudPool(SandboxPool[SimulatedCloud]):
    """A `SandboxPool` whose slot `i` listens on `base_port + i`. Raises `RuntimeError("MiniStack pool exhausted…")` if all are
    lent.
    """

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
async def open_cloud_pool(config: AwsCliConfig, *, log: EventLog) -> AsyncIterator[CloudPool]:
    """The pool with every simulator started. All processes and directories are removed at the end."""
    pool = CloudPool(config, log=log)
    async with pool.open():
        yield pool


def worker_settings(config: AwsCliConfig, *, name: str, endpoint: str | None, extra: dict[str, str]) -> WorkerSettings:
    return WorkerSettings(
        name=name,
        endpoint=endpoint,
        environment={**SEALED, "AWS_DEFAULT_REGION": config.region, **extra},
        command_s=config.command_s,
        # The observation is later cut to max_output_chars; a character takes at most four bytes.
        max_output_bytes=4 * config.max_output_chars,
    )
