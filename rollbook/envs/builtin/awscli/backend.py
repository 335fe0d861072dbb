"""The cloud behind the command line: a simulator of its own for each session, or a real account. One interface.

Whatever goes wrong *in* the cloud is an answer to the agent; whatever goes wrong *with* it is a `SandboxDiedError`, which nobody
scores.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rollbook.contracts.errors import RunError
from rollbook.envs.builtin.awscli.config import AwsCliConfig
from rollbook.envs.builtin.awscli.simulator import Simulator
from rollbook.envs.builtin.awscli.worker import ApiAnswer, ApiCall, AwsWorker, CommandResult, WorkerSettings
from rollbook.envs.sandboxes.sandbox import SandboxDiedError

# The CLI must find no configuration, no credentials and no instance metadata but what stands here, and must not retry by itself.
SEALED = {
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "1",
    "AWS_PAGER": "",
    "PYTHONWARNINGS": "ignore",
}
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# Signs in a failed command that the cloud itself may be gone; then it is asked.
UNREACHABLE = ("Could not connect to the endpoint URL", "Connection was closed", "Read timeout", "Connection reset")


class Backend(Protocol):
    """What the environment needs of a cloud."""

    @property
    def name(self) -> str: ...

    @property
    def scratch(self) -> Path:
        """The working directory of commands."""

    async def run(self, argv: Sequence[str]) -> CommandResult:
        """Play one command. Raises `SandboxDiedError` when the cloud is gone."""

    async def ask(self, calls: Sequence[ApiCall]) -> list[ApiAnswer]: ...

    async def clean(self) -> None: ...

    async def remove(self) -> None: ...


class SimulatedCloud:
    """One MiniStack and one warm command line: a slot of the pool. Satisfies `Backend` and `Sandbox`."""

    def __init__(self, simulator: Simulator, worker: AwsWorker) -> None:
        self._simulator = simulator
        self._worker = worker

    @classmethod
    async def start(cls, config: AwsCliConfig, *, port: int) -> "SimulatedCloud":
        simulator = await Simulator.start(port)
        try:
            # The simulator takes a 12-digit key id for the number of the account.
            credentials = {"AWS_ACCESS_KEY_ID": config.account, "AWS_SECRET_ACCESS_KEY": "simulated"}
            worker = await AwsWorker.start(
                _worker_settings(
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
        """The simulator's process and the command line's."""
        return self._simulator.pid, self._worker.pid

    @property
    def scratch(self) -> Path:
        return self._worker.scratch

    @property
    def is_alive(self) -> bool:
        return self._simulator.is_alive and self._worker.is_alive

    async def is_well(self) -> bool:
        return self._worker.is_alive and await self._simulator.is_well()

    def memory_bytes(self) -> int:
        return self._simulator.memory_bytes() + self._worker.memory_bytes()

    async def run(self, argv: Sequence[str]) -> CommandResult:
        result = await self._worker.run(argv)
        is_doubtful = result.is_timeout or (result.rc != 0 and any(sign in result.stderr for sign in UNREACHABLE))
        if not self._simulator.is_alive or (is_doubtful and not await self._simulator.is_well()):
            raise SandboxDiedError(
                f"{self.name} died while it ran `aws {' '.join(argv[:2])}`; this episode is not scored"
            )
        return result

    async def ask(self, calls: Sequence[ApiCall]) -> list[ApiAnswer]:
        return await self._worker.ask(calls)

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


class AccountCloud:
    """A real account. There is one, it is never wiped, and only the confirmed one is touched. Satisfies `Backend`."""

    def __init__(self, worker: AwsWorker, account: str) -> None:
        self._worker = worker
        self._account = account

    @classmethod
    async def start(cls, config: AwsCliConfig) -> "AccountCloud":
        credentials = {name: os.environ[name] for name in CREDENTIALS if name in os.environ}
        if "AWS_ACCESS_KEY_ID" not in credentials:
            raise RunError(f"backend `aws` needs credentials in the environment: {', '.join(CREDENTIALS)}")
        worker = await AwsWorker.start(_worker_settings(config, name="aws-account", endpoint=None, extra=credentials))
        try:
            (identity,) = await _who_am_i(worker)
            found = (identity.result or {}).get("Account")
            if found != config.confirm_account:
                raise RunError(
                    f"the credentials belong to account {found or 'unknown'} and confirm_account says {config.confirm_account}: "
                    f"nothing was touched. {identity.message}"
                )
        except BaseException:
            await worker.stop()
            raise
        return cls(worker, str(found))

    @property
    def name(self) -> str:
        return f"aws:{self._account}"

    @property
    def scratch(self) -> Path:
        return self._worker.scratch

    async def run(self, argv: Sequence[str]) -> CommandResult:
        return await self._worker.run(argv)

    async def ask(self, calls: Sequence[ApiCall]) -> list[ApiAnswer]:
        return await self._worker.ask(calls)

    async def clean(self) -> None:
        """Local files only: what agents did to the account stays."""
        await self._worker.clean()

    async def remove(self) -> None:
        await self._worker.stop()


async def _who_am_i(worker: AwsWorker) -> list[ApiAnswer]:
    try:
        return await worker.ask([ApiCall(service="sts", operation="get_caller_identity")])
    except SandboxDiedError as error:
        raise RunError(
            f"backend `aws`: the account cannot be asked who it is, so nothing was touched: {error}"
        ) from error


def _worker_settings(config: AwsCliConfig, *, name: str, endpoint: str | None, extra: dict[str, str]) -> WorkerSettings:
    return WorkerSettings(
        name=name,
        endpoint=endpoint,
        environment={**SEALED, "AWS_DEFAULT_REGION": config.region, **extra},
        command_s=config.command_s,
        # Cut by characters later, with a remark; four bytes are the most a character takes.
        max_output_bytes=4 * config.max_output_chars,
    )
