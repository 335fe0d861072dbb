"""Kill the parts of the AWS environment, and the process that owns them: nothing is blamed on the agent, and nothing is left
behind.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import EpisodeError
from rollbook.envs.builtin.awscli.cloud.worker import ApiCall
from rollbook.envs.sandboxes.orphans import sweep_orphans
from rollbook.envs.sandboxes.process import DIRECTORY_PREFIX
from rollbook.envs.sandboxes.sandbox import SandboxDiedError
from rollbook.telemetry.events import read_json_lines
from tests.parts.envs.aws import LONG_S, aws_pool, bucket_task, ministack_pool, one_environment, play

ROOT = Path(__file__).parents[2]
OWNER = """
import asyncio, sys
from tests.parts.envs.aws import ministack_pool

async def main():
    async with ministack_pool(pool_size=2) as pool:
        leases = [await pool.acquire_now() for _ in range(2)]
        print(*(pid for lease in leases for pid in lease.sandbox.pids), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def our_children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def our_directories() -> set[str]:
    mark = f"{DIRECTORY_PREFIX}{os.getpid()}-"
    return {path.name for path in Path(tempfile.gettempdir()).glob(f"{mark}*")}


def wait_until_gone(pids: list[int], *, within_s: float = 20.0) -> list[int]:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return []
        time.sleep(0.05)
    return alive


async def test_a_simulator_killed_mid_episode_gives_up_the_episode_and_is_replaced(tmp_path: Path) -> None:
    async with aws_pool(1, tmp_path / "log.jsonl") as environments:
        async with one_environment(environments) as env:
            await play(env, bucket_task(), ["aws s3 ls"])
            os.kill(environments.simulators.sandboxes[0].pids[0], signal.SIGKILL)
            with pytest.raises(EpisodeError, match=r"died|cannot be reached"):
                await env.step("aws s3 mb s3://wanted")
        async with one_environment(environments) as env:
            seen = await play(env, bucket_task(), ["aws s3 mb s3://wanted"])
        assert seen[-1].solved
        assert environments.health().replaced == 1
    assert [event["event"] for event in read_json_lines(tmp_path / "log.jsonl")] == ["envs.sandbox_replaced"]


async def test_a_simulator_killed_before_the_environment_is_looked_at_is_no_verdict_on_the_agent() -> None:
    async with ministack_pool(pool_size=1) as pool:
        lease = await pool.acquire_now()
        assert (await lease.sandbox.call_api([ApiCall(service="s3", operation="list_buckets")]))[0].code is None
        os.kill(lease.sandbox.pids[0], signal.SIGKILL)
        with pytest.raises(SandboxDiedError, match="cannot be reached"):
            await lease.sandbox.call_api([ApiCall(service="s3", operation="list_buckets")])


async def test_a_command_line_killed_mid_episode_gives_up_the_episode_and_is_replaced() -> None:
    async with aws_pool(1) as environments:
        async with one_environment(environments) as env:
            await play(env, bucket_task(), ["aws s3 ls"])
            os.kill(environments.simulators.sandboxes[0].pids[1], signal.SIGKILL)
            with pytest.raises(EpisodeError, match="CLI worker died"):
                await env.step("aws s3 mb s3://wanted")
        async with one_environment(environments) as env:
            assert (await play(env, bucket_task(), ["aws s3 mb s3://wanted"]))[-1].solved


async def test_a_simulator_that_stands_still_is_not_lent() -> None:
    async with ministack_pool(pool_size=1) as pool:
        lease = await pool.acquire_now()
        stopped = lease.sandbox.pids[0]
        lease.release()
        await asyncio.sleep(0.2)
        os.kill(stopped, signal.SIGSTOP)
        fresh = await pool.acquire(Deadline(LONG_S, "test"))
        assert fresh.sandbox.pids[0] != stopped
        assert not psutil.pid_exists(stopped)


async def test_a_simulator_that_dies_idle_is_replaced_without_being_asked() -> None:
    async with ministack_pool(pool_size=1) as pool:
        lease = await pool.acquire_now()
        dead = lease.sandbox.pids[0]
        lease.release()
        await asyncio.sleep(0.2)
        os.kill(dead, signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert pool.replaced == 1
        assert (await pool.acquire(Deadline(LONG_S, "test"))).sandbox.pids[0] != dead


async def test_a_player_who_leaves_in_the_middle_of_a_command_leaves_a_clean_slot() -> None:
    async with aws_pool(1) as environments:
        env = await environments.acquire(Deadline(LONG_S, "test"))
        await play(env, bucket_task(), ["aws s3 mb s3://left-over"])
        move = asyncio.create_task(env.step("aws cloudformation wait stack-create-complete --stack-name x"))
        await asyncio.sleep(0.3)
        move.cancel()
        await asyncio.gather(move, return_exceptions=True)
        await env.close()
        async with one_environment(environments) as next_env:
            assert "left-over" not in (await play(next_env, bucket_task(), ["aws s3 ls"]))[-1].text


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_process_that_owns_the_pool(sign: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 4
    finally:
        owner.send_signal(sign)
        owner.communicate(timeout=30)
    assert wait_until_gone(pids) == []
    sweep_orphans()  # the directories of a killed owner; a new pool does this when it opens
    assert list(Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}{owner.pid}-*")) == []


def test_a_stopped_orphan_is_swept_by_the_next_start() -> None:
    """A child that was stopped cannot notice the end of its parent."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        os.kill(pids[0], signal.SIGSTOP)
    finally:
        owner.kill()
        owner.communicate(timeout=30)
    assert wait_until_gone(pids[1:]) == []
    # A pool that another test starts at this moment sweeps too: who of the two takes it does not matter.
    sweep_orphans()
    assert wait_until_gone(pids) == []


@pytest.mark.slow
async def test_two_hundred_sessions_leak_no_process_port_file_or_memory() -> None:
    async with ministack_pool(pool_size=2) as pool:

        async def cycle(number: int) -> None:
            lease = await pool.acquire(Deadline(LONG_S, "test"))
            try:
                await lease.sandbox.run(["sqs", "create-queue", "--queue-name", f"q{number}"])
            finally:
                lease.release()

        for number in range(40):
            await cycle(number)
        await asyncio.sleep(0.3)
        children, memory = our_children(), pool.memory_bytes
        fds = len(list(Path("/proc/self/fd").iterdir()))
        for start in range(40, 240, 4):
            await asyncio.gather(*(cycle(start + number) for number in range(4)))
        await asyncio.sleep(0.3)
        assert our_children() == children
        assert len(list(Path("/proc/self/fd").iterdir())) <= fds + 2
        assert pool.memory_bytes < memory * 1.25 + 8 * 2**20
        assert pool.replaced == 0
    assert our_children() & children == set()
    assert our_directories() == set()


async def test_a_storm_of_fifty_on_a_pool_of_two_is_served_completely() -> None:
    async with aws_pool(2) as environments:

        async def visitor() -> bool | None:
            async with one_environment(environments) as env:
                return (await play(env, bucket_task(), ["aws s3api create-bucket --bucket wanted"]))[-1].solved

        assert await asyncio.gather(*(visitor() for _ in range(50))) == [True] * 50
        assert environments.health().busy == 0
