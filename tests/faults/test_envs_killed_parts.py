"""Killed clients and servers of environments: no environment is lost, and no call waits forever."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import EpisodeError, RollbookError, TransientError
from rollbook.envs.client.group import GrpoPool
from rollbook.envs.client.session import (
    ClientOptions,
    EnvSession,
    ServerFullError,
    SessionLostError,
    connect,
    new_http,
    open_session,
)
from tests.parts.envs.environments import GAME, Notebook, Sleeper, Waiter, served, until
from tests.parts.envs.server_process import process


async def test_the_environments_of_a_killed_client_return_to_the_pool_at_once(tmp_path: Path) -> None:
    async with served(Waiter, size=4) as server:
        for number in range(2):
            marks = tmp_path / str(number)
            marks.mkdir()
            with ExitStack() as stack:
                # In a thread: this process serves the client that it waits for.
                hold = process("hold", server.url, "4", str(marks))
                client, _ = await asyncio.to_thread(stack.enter_context, hold)
                assert server.pool.health().busy == 4
                client.kill()
                await until(lambda: server.pool.health().busy == 0)
        async with GrpoPool(server.url, size=4, first_task={}) as pool:
            assert len(pool.envs) == 4


async def test_a_killed_server_is_an_episode_error_and_the_pool_connects_to_its_successor() -> None:
    with process("serve", "number_guessing", "4", "0") as (first, url):
        pool = GrpoPool(url, size=4, options=ClientOptions(close_s=1))
        await pool.connect()
        await pool.reset_group(GAME)
        first.kill()
        first.wait()
        outcomes = await pool.try_group(lambda session: session.step("3"))
        assert all(isinstance(outcome, RollbookError) for outcome in outcomes)
        with pytest.raises(TransientError):
            await pool.reset_group(GAME)
        with process("serve", "number_guessing", "4", url.rpartition(":")[2]):
            assert len(await pool.reset_group(GAME)) == 4
            assert [seen.text for seen in await pool.run_group_step(["5"] * 4)] == ["correct"] * 4
            await pool.close()


async def test_a_server_that_dies_during_a_step_ends_the_wait(tmp_path: Path) -> None:
    with process("serve", "tests.parts.envs.environments:Waiter", "1", "0") as (server, url):
        async with open_session(url, ClientOptions(close_s=1)) as env:
            await env.reset({"marks": str(tmp_path)})
            step = asyncio.ensure_future(env.step("600"))
            await until(lambda: any(tmp_path.iterdir()))
            server.kill()
            with pytest.raises(SessionLostError):
                await step


async def test_fifty_concurrent_clients_of_eight_environments_are_all_served_or_refused() -> None:
    most = 0

    async def play() -> str:
        nonlocal most
        async with new_http() as connections:
            try:
                env = await connect(connections, server.url, deadline=Deadline(30, "test"))
            except ServerFullError:
                return "refused"
            await env.reset({"owner": "w"})
            most = max(most, server.pool.health().busy)
            text = (await env.step("end")).text
            await env.close()
            return text

    async with served(Notebook, size=8, connect_wait_s=0.0) as server:
        outcomes = await asyncio.gather(*(play() for _ in range(50)))
        assert server.pool.health().busy == 0
        assert set(outcomes) <= {"refused", "w|end"}
        assert outcomes.count("w|end") >= 8
    assert most <= 8

    async with served(Notebook, size=8, connect_wait_s=30.0) as server:  # with waiting allowed, all are served
        assert await asyncio.gather(*(play() for _ in range(50))) == ["w|end"] * 50
    assert most <= 8


async def test_a_hanging_environment_affects_only_its_own_session() -> None:
    Sleeper.unblock.clear()
    try:
        async with served(Sleeper, size=3, step_s=2.0, close_s=0.2) as server, GrpoPool(server.url, size=3) as pool:
            await pool.reset_group({})

            async def play(session: EnvSession) -> str:
                return (await session.step("stuck" if session is pool.envs[0] else "0.01")).text

            outcomes = await pool.try_group(play)
            assert isinstance(outcomes[0], EpisodeError)
            assert outcomes[1:] == ["awake", "awake"]
            assert len(await pool.reset_group({})) == 3
    finally:
        Sleeper.unblock.set()


async def test_two_hundred_connections_leak_no_descriptor_and_no_memory() -> None:
    with process("serve", "number_guessing", "8", "0") as (server, url):

        async def cycle(times: int) -> None:
            for _ in range(times):
                async with GrpoPool(url, size=8, first_task=GAME) as pool:
                    await pool.run_group_step(["5"] * 8)

        await cycle(5)
        descriptors, memory, threads = server.num_fds(), server.memory_info().rss, server.num_threads()
        await cycle(25)  # 25 groups of 8: 200 sessions
        async with new_http() as http, http.get(f"{url}/health") as reply:
            health = await reply.json()
        assert (health["active"], health["reserved"], health["environments_busy"]) == (0, 0, 0)
        await until(lambda: server.num_fds() <= descriptors + 1)  # the health check above may still be open
        assert server.num_threads() <= threads
        assert server.memory_info().rss - memory < 8 * 2**20
