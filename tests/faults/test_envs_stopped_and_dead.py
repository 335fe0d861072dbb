"""A stopped server, a blocked event loop, and a simulator that is killed during an episode."""

import asyncio
import signal
import threading

import pytest

from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.task import Observation
from rollbook.envs.client.group import GrpoPool, MultiTurnEnvPool
from rollbook.envs.client.session import ClientOptions, EnvSession, SessionLostError
from tests.parts.concurrency.processes import descendants_running
from tests.parts.envs.environments import AWS_ARGS, GAME, served, until
from tests.parts.envs.server_process import process

SIMULATOR = "rollbook.envs.builtin.awscli.cloud.simulator_process"
SHORT_LIMITS = ClientOptions(request_s=0.5, close_s=0.3, connect_s=5)


async def test_closing_a_pool_of_a_stopped_server_ends() -> None:
    with process("serve", "number_guessing", "8", "0") as (server, url):
        pool = GrpoPool(url, size=4, options=SHORT_LIMITS)
        await pool.connect()
        await pool.reset_group(GAME)
        blocking = await asyncio.to_thread(MultiTurnEnvPool, url, 4, options=SHORT_LIMITS)
        server.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(30):
                outcomes = await pool.try_group(lambda session: session.step("5"))
                assert all(isinstance(outcome, SessionLostError) for outcome in outcomes)
                await pool.close()
                await asyncio.to_thread(blocking.close)
        finally:
            server.send_signal(signal.SIGCONT)
        assert not [thread for thread in threading.enumerate() if thread.name == "env-pool"]
        async with GrpoPool(url, size=8, first_task=GAME) as again:  # it continues, and every slot is free
            assert len(again.envs) == 8


async def test_closing_a_blocking_pool_ends_even_if_a_rollout_blocks_its_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollbook.envs.client.group.CLOSE_MARGIN_S", 0.1)
    began, released = threading.Event(), threading.Event()

    async def blocking_rollout(session: EnvSession, first: Observation) -> None:
        began.set()
        released.wait()

    async with served("number_guessing", size=1) as server:
        pool = await asyncio.to_thread(MultiTurnEnvPool, server.url, 1, options=ClientOptions(close_s=0.1))
        playing = asyncio.ensure_future(asyncio.to_thread(pool.try_group, GAME, blocking_rollout))
        try:
            await asyncio.to_thread(began.wait)
            await asyncio.to_thread(pool.close)
            assert "its event loop is blocked" in caplog.text
        finally:
            released.set()
            await asyncio.gather(playing, return_exceptions=True)
        await until(lambda: server.pool.health().busy == 0)


async def test_a_simulator_killed_during_an_episode_is_replaced_and_the_episode_is_not_scored() -> None:
    pytest.importorskip("ministack")
    pytest.importorskip("awscli")
    before = {child.pid for child in descendants_running(SIMULATOR)}
    async with served("aws", size=2, args=AWS_ARGS) as server:
        async with GrpoPool(server.url, size=2) as pool:
            task = {"id": "fan-out-two-queues"}
            await pool.reset_group(task)
            created = await pool.run_group_step(["aws s3api create-bucket --bucket mine"] * 2)
            assert all(seen.reward == 0.0 for seen in created)
            simulators = [child for child in descendants_running(SIMULATOR) if child.pid not in before]
            for simulator in simulators:  # both environments and every spare
                simulator.kill()
            outcomes = await pool.try_group(lambda session: session.step("aws s3api list-buckets"))
            assert [type(outcome) for outcome in outcomes] == [SessionLostError] * 2
            assert all(isinstance(outcome, EpisodeError) for outcome in outcomes)
            await pool.reset_group(task)
            seen = await pool.run_group_step(["aws s3api list-buckets --query Buckets[].Name"] * 2)
            assert [answer.text.strip() for answer in seen] == ["[]", "[]"]
        assert server.pool.health().replaced >= 2
