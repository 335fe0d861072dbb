"""Kills parts of the AWS environment and its owner: no episode is scored for it, and no process or file is left behind."""

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
from rollbook.envs.builtin.awscli.cloud.simulator import KEEP_ALIVE_S
from rollbook.envs.builtin.awscli.cloud.worker import ApiCall
from rollbook.envs.sandboxes.process import DIRECTORY_PREFIX, sweep_orphans
from rollbook.sandbox.sandbox import SandboxDiedError
from rollbook.telemetry.events import read_json_lines
from tests.parts.envs.aws import LONG_S, aws_pool, bucket_task, ministack_pool, one_environment, play
from tests.parts.envs.environments import until

MAX_DESCRIPTORS = 64
"""Of a simulator or command line that has served a hundred sessions."""
ROOT = Path(__file__).parents[2]
OWNER = """
import asyncio, sys
from rollbook.concurrency.deadline import Deadline
from tests.parts.envs.aws import LONG_S, ministack_pool

async def main():
    async with ministack_pool(pool_size=2) as pool:
        leases = [await pool.acquire(Deadline(LONG_S, "test")) for _ in range(2)]
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


async def test_a_simulator_killed_during_an_episode_fails_the_episode_and_is_replaced(tmp_path: Path) -> None:
    async with aws_pool(1, tmp_path / "log.jsonl") as pool:
        async with one_environment(pool) as env:
            await play(env, bucket_task(), ["aws s3 ls"])
            os.kill(pool.simulators.sandboxes[0].pids[0], signal.SIGKILL)
            with pytest.raises(EpisodeError, match=r"died|cannot be reached"):
                await env.step("aws s3 mb s3://wanted")
        async with one_environment(pool) as env:
            seen = await play(env, bucket_task(), ["aws s3 mb s3://wanted"])
        assert seen[-1].solved
        assert pool.health().replaced == 1
    assert [event["event"] for event in read_json_lines(tmp_path / "log.jsonl")] == ["envs.sandbox_replaced"]


async def test_a_simulator_killed_before_the_checks_raises_an_error_instead_of_a_result() -> None:
    async with ministack_pool(pool_size=1) as pool:
        lease = await pool.acquire(Deadline(LONG_S, "test"))
        assert (await lease.sandbox.call_api([ApiCall(service="s3", operation="list_buckets")]))[0].code is None
        os.kill(lease.sandbox.pids[0], signal.SIGKILL)
        with pytest.raises(SandboxDiedError, match="cannot be reached"):
            await lease.sandbox.call_api([ApiCall(service="s3", operation="list_buckets")])


async def test_a_command_line_killed_during_an_episode_fails_the_episode_and_is_replaced() -> None:
    async with aws_pool(1) as pool:
        async with one_environment(pool) as env:
            await play(env, bucket_task(), ["aws s3 ls"])
            os.kill(pool.simulators.sandboxes[0].pids[1], signal.SIGKILL)
            with pytest.raises(EpisodeError, match="CLI worker died"):
                await env.step("aws s3 mb s3://wanted")
        async with one_environment(pool) as env:
            assert (await play(env, bucket_task(), ["aws s3 mb s3://wanted"]))[-1].solved


async def test_a_stopped_simulator_is_not_lent() -> None:
    async with ministack_pool(pool_size=1) as pool:
        lease = await pool.acquire(Deadline(LONG_S, "test"))
        stopped = lease.sandbox.pids[0]
        lease.release()
        await asyncio.sleep(0.2)
        os.kill(stopped, signal.SIGSTOP)
        fresh = await pool.acquire(Deadline(LONG_S, "test"))
        assert fresh.sandbox.pids[0] != stopped
        assert not psutil.pid_exists(stopped)


async def test_a_simulator_that_dies_while_idle_is_replaced() -> None:
    async with ministack_pool(pool_size=1) as pool:
        lease = await pool.acquire(Deadline(LONG_S, "test"))
        dead = lease.sandbox.pids[0]
        lease.release()
        await asyncio.sleep(0.2)
        os.kill(dead, signal.SIGKILL)
        await until(lambda: pool.replaced == 1)
        assert (await pool.acquire(Deadline(LONG_S, "test"))).sandbox.pids[0] != dead


async def test_a_client_that_leaves_during_a_command_leaves_a_clean_slot() -> None:
    async with aws_pool(1) as pool:
        env = await pool.acquire(Deadline(LONG_S, "test"))
        await play(env, bucket_task(), ["aws s3 mb s3://left-over"])
        move = asyncio.create_task(env.step("aws cloudformation wait stack-create-complete --stack-name x"))
        await asyncio.sleep(0.3)
        move.cancel()
        await asyncio.gather(move, return_exceptions=True)
        await env.close()
        async with one_environment(pool) as next_env:
            assert "left-over" not in (await play(next_env, bucket_task(), ["aws s3 ls"]))[-1].text


@pytest.mark.parametrize("sent_signal", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_owner_of_the_pool(sent_signal: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 4
    finally:
        owner.send_signal(sent_signal)
        owner.communicate(timeout=30)
    assert wait_until_gone(pids) == []
    sweep_orphans()  # removes the directories of a killed owner, as a new pool does when it opens
    assert list(Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}{owner.pid}-*")) == []


def test_a_stopped_orphan_is_removed_by_the_next_start() -> None:
    """A stopped child cannot detect the end of its parent."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        os.kill(pids[0], signal.SIGSTOP)
    finally:
        owner.kill()
        owner.communicate(timeout=30)
    assert wait_until_gone(pids[1:]) == []
    # A pool that another test starts concurrently may remove it first.
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
        async with asyncio.timeout(KEEP_ALIVE_S + LONG_S):
            while max(psutil.Process(pid).num_fds() for pid in children) > MAX_DESCRIPTORS:  # noqa: ASYNC110 - another process
                await asyncio.sleep(1)
    assert our_children() & children == set()
    assert our_directories() == set()


async def test_fifty_concurrent_sessions_on_a_pool_of_two_are_all_served() -> None:
    async with aws_pool(2) as pool:

        async def visitor() -> bool | None:
            async with one_environment(pool) as env:
                return (await play(env, bucket_task(), ["aws s3api create-bucket --bucket wanted"]))[-1].solved

        assert await asyncio.gather(*(visitor() for _ in range(50))) == [True] * 50
        assert pool.health().busy == 0
