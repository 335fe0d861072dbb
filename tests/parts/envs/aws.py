"""Pools of real simulators, and fake sandboxes for tests of the sandbox pool."""

import asyncio
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.ports import Environment
from rollbook.contracts.task import Observation
from rollbook.envs.builtin.awscli.cloud.backend import CloudPool, open_cloud_pool
from rollbook.envs.builtin.awscli.config import AwsCliConfig
from rollbook.envs.builtin.awscli.environment import AwsCliEnvironment, AwsCliPool
from rollbook.envs.builtin.awscli.solution import ReferencePolicy
from rollbook.envs.sandboxes.sandbox import SandboxStartError
from rollbook.sandbox.sandbox import SandboxDiedError
from rollbook.telemetry.events import EventLog

LONG_S = 120.0


@asynccontextmanager
async def aws_pool(size: int, log_path: Path | None = None, **args: Any) -> AsyncIterator[AwsCliPool]:
    """A pool on free ports."""
    log = quiet_log(log_path)
    try:
        async with AwsCliEnvironment.open_pool(size=size, log=log, args={"base_port": 0, **args}) as pool:
            assert isinstance(pool, AwsCliPool)
            yield pool
    finally:
        log.close()


@asynccontextmanager
async def ministack_pool(**config: Any) -> AsyncIterator[CloudPool]:
    async with open_cloud_pool(AwsCliConfig(**{"base_port": 0, **config}), log=quiet_log()) as pool:
        yield pool


@asynccontextmanager
async def one_environment(pool: AwsCliPool) -> AsyncIterator[Environment]:
    env = await pool.acquire(Deadline(LONG_S, "test"))
    try:
        yield env
    finally:
        await env.close()


async def play(env: Environment, task: dict[str, Any], moves: Sequence[str]) -> list[Observation]:
    """Reset and play the moves, until the last one or the end of the episode."""
    seen = [await env.reset(task)]
    for move in moves:
        seen.append(await env.step(move))
        if seen[-1].done:
            break
    return seen


def bucket_task(**changes: Any) -> dict[str, Any]:
    """A task: create the bucket `wanted`."""
    return {
        "id": "make-a-bucket",
        "tier": "beginner",
        "services": ["s3"],
        "goal": "Create an S3 bucket named wanted.",
        "checks": [{"says": "it exists", "call": "s3.list_buckets", "query": "Buckets[].Name", "contains": "wanted"}],
        "solution": ["aws s3api create-bucket --bucket wanted"],
        "hints": ["It is about s3.", "The operation is create-bucket.", "Run aws s3api create-bucket --bucket wanted."],
        **changes,
    }


def quiet_log(path: Path | None = None) -> EventLog:
    """Events go to a file or nowhere, so that expected warnings do not reach the terminal."""
    return EventLog("test", path, echo=io.StringIO())


class FakeSandbox:
    """A fake sandbox: the test decides when it dies, grows or becomes unhealthy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_unhealthy = False
        self.size_bytes = 0
        self.cleaned = 0
        self.is_removed = False
        self._death = asyncio.Event()

    async def is_healthy(self) -> bool:
        await asyncio.sleep(0)
        return self.is_alive and not self.is_unhealthy

    def memory_bytes(self) -> int:
        return self.size_bytes

    async def clean(self) -> None:
        await asyncio.sleep(0)
        if not self.is_alive:
            raise SandboxDiedError(f"{self.name} is dead")
        self.cleaned += 1

    def die(self) -> None:
        self.is_alive = False
        self._death.set()

    async def died(self) -> None:
        await self._death.wait()

    async def remove(self) -> None:
        self.is_removed = True
        self.die()


class FakeFactory:
    """Starts fake sandboxes, records them, and fails `failures_left` times."""

    def __init__(self) -> None:
        self.made: list[FakeSandbox] = []
        self.failures_left = 0

    async def start(self, slot: int) -> FakeSandbox:
        await asyncio.sleep(0)
        if self.failures_left > 0:
            self.failures_left -= 1
            raise SandboxStartError(f"slot {slot}: cannot start")
        self.made.append(FakeSandbox(f"fake-{slot}-{len(self.made)}"))
        return self.made[-1]

    @property
    def leaked(self) -> list[str]:
        return [sandbox.name for sandbox in self.made if not sandbox.is_removed]


async def play_reference(env: Environment, row: Mapping[str, Any]) -> list[Observation]:
    """Reset and play to the end. Returns all observations, including the first."""
    policy = ReferencePolicy(row)
    seen = [await env.reset(row)]
    while not seen[-1].done:
        line = policy.next_line(seen[-1])
        if line is None:
            break
        seen.append(await env.step(line))
    return seen
