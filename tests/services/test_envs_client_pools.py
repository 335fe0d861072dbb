"""Groups of sessions connect completely or not at all, in asynchronous and in blocking code."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.task import Observation
from rollbook.envs.client.group import BlockingSession, GroupRewards, GrpoPool, MultiTurnEnvPool
from rollbook.envs.client.session import ClientOptions, EnvSession, GroupTooLargeError
from tests.parts.envs.environments import GAME, FailsOneReset, Notebook, Waiter, served, until


async def bisect(env: EnvSession) -> float:
    """Play number guessing optimally."""
    low, high = 0, 15
    while True:
        guess = (low + high) // 2
        seen = await env.step(str(guess))
        if seen.done:
            return seen.reward
        low, high = (guess + 1, high) if seen.text == "higher" else (low, guess - 1)


def bisect_blocking(env: BlockingSession, first: Observation) -> float:
    assert first.text == "guess a number from 0 to 15"
    low, high = 0, 15
    while True:
        guess = (low + high) // 2
        seen = env.step(str(guess))
        if seen.done:
            return seen.reward
        low, high = (guess + 1, high) if seen.text == "higher" else (low, guess - 1)


@pytest.fixture
async def counting_resets() -> AsyncIterator[None]:
    FailsOneReset.resets, FailsOneReset.fails_on = 0, 0
    yield
    FailsOneReset.resets, FailsOneReset.fails_on = 0, 0


async def test_a_group_plays_the_same_task_concurrently() -> None:
    results: list[GroupRewards] = []
    async with served("number_guessing", size=8) as server:
        async with GrpoPool(server.url, size=8, on_result=results.append) as pool:
            for _ in range(3):
                seen = await pool.reset_group(GAME)
                assert [first.text for first in seen] == ["guess a number from 0 to 15"] * 8
                rewards = await pool.run_group(bisect)
                pool.record_group_result(GAME, rewards)
            assert server.pool.health().busy == 8
        assert server.pool.health().busy == 0
    assert [result.mean for result in results] == pytest.approx([0.84] * 3)


async def test_a_group_steps_together_and_a_finished_sibling_repeats_its_last_observation() -> None:
    async with served("number_guessing", size=3) as server, GrpoPool(server.url, size=3) as pool:
        await pool.reset_group(GAME)
        seen = await pool.run_group_step(["5", "1", "9"])
        assert [answer.text for answer in seen] == ["correct", "higher", "lower"]
        seen = await pool.run_group_step([None, "5", "5"])
        assert [answer.done for answer in seen] == [True, True, True]
        with pytest.raises(ValueError, match="2 actions for 3 sessions"):
            await pool.run_group_step(["1", "2"])
        await pool.reset_group(GAME)
        with pytest.raises(ValueError, match="session 1 is not done"):
            await pool.run_group_step(["1", None, "2"])


async def test_a_group_larger_than_the_server_is_refused_with_both_numbers() -> None:
    async with served("number_guessing", size=4) as server:
        with pytest.raises(GroupTooLargeError, match=r"5 sessions .* has 4"):
            await GrpoPool(server.url, size=5).connect()
        with pytest.raises(GroupTooLargeError, match=r"5 sessions .* has 4"):
            await asyncio.to_thread(MultiTurnEnvPool, server.url, 5)
        assert server.pool.health().busy == 0


@pytest.mark.parametrize("failing", [1, 3, 8])
@pytest.mark.usefixtures("counting_resets")
async def test_a_connect_whose_first_reset_fails_leaves_no_session_open(failing: int) -> None:
    FailsOneReset.fails_on = failing
    async with served(FailsOneReset, size=8) as server:
        pool = GrpoPool(server.url, size=8, first_task={})
        with pytest.raises(EpisodeError, match=f"reset {failing} failed"):
            await pool.connect()
        assert pool.envs == ()
        await until(lambda: server.pool.health().busy == 0)
        async with GrpoPool(server.url, size=8, first_task={}) as again:  # every slot is free
            assert len(again.envs) == 8


@pytest.mark.usefixtures("counting_resets")
async def test_a_failed_group_reset_closes_the_group_and_the_next_one_reconnects() -> None:
    FailsOneReset.fails_on = 6
    async with served(FailsOneReset, size=4) as server, GrpoPool(server.url, size=4) as pool:
        await pool.reset_group({})
        with pytest.raises(EpisodeError, match="reset 6 failed"):
            await pool.reset_group({})
        assert pool.envs == ()
        await until(lambda: server.pool.health().busy == 0)
        assert [seen.text for seen in await pool.reset_group({})] == ["ready"] * 4


async def test_a_lost_session_is_replaced_before_the_next_group() -> None:
    async with served(Waiter, size=3, step_s=1.0) as server, GrpoPool(server.url, size=3) as pool:
        await pool.reset_group({})
        outcomes = await pool.try_group(lambda env: env.step("30" if env is pool.envs[1] else "0"))
        assert [isinstance(outcome, EpisodeError) for outcome in outcomes] == [False, True, False]
        before = pool.envs
        assert len(await pool.reset_group({})) == 3
        assert [old is new for old, new in zip(before, pool.envs, strict=True)] == [True, False, True]


async def test_a_failed_sibling_does_not_end_the_others() -> None:
    finished: list[str] = []

    async def play(env: EnvSession) -> str:
        owner = (await env.state())["episode_id"]
        if env is pool.envs[0]:
            raise ZeroDivisionError("my own bug")
        finished.append(owner)
        return str(owner)

    async with served(Notebook, size=4) as server, GrpoPool(server.url, size=4) as pool:
        await pool.reset_group({"owner": "a"})
        with pytest.raises(ZeroDivisionError, match="my own bug"):
            await pool.run_group(play)
        assert len(finished) == 3


async def test_groups_that_need_more_than_half_each_are_all_served() -> None:
    async def play(pool: GrpoPool) -> float:
        async with pool:
            await pool.reset_group(GAME)
            return sum(await pool.run_group(bisect))

    async with served("number_guessing", size=8) as server:
        earned = await asyncio.gather(*(play(GrpoPool(server.url, size=6)) for _ in range(5)))
        assert earned == pytest.approx([6 * 0.84] * 5)
        assert server.pool.health().busy == 0


async def test_missing_rewards_are_none_and_not_zero() -> None:
    pool = GrpoPool("http://127.0.0.1:9", size=3)
    result = pool.record_group_result(GAME, [1.0, None, float("nan")])
    assert (result.rewards, result.scored, result.mean) == ((1.0, None, None), (1.0,), 1.0)
    assert pool.record_group_result(GAME, [None] * 3).mean is None
    with pytest.raises(ValueError, match="2 rewards for a group of 3"):
        pool.record_group_result(GAME, [1.0, 0.0])


async def test_a_missing_server_and_a_missing_connect_are_reported() -> None:
    with pytest.raises(TransientError, match="is the server running"):
        await GrpoPool("http://127.0.0.1:9", size=2).connect()
    with pytest.raises(RunError, match="not connected"):
        await GrpoPool("http://127.0.0.1:9", size=2).run_group_step(["a", "b"])


async def test_a_server_without_reservations_that_refuses_after_accepting_is_detected() -> None:
    """Servers of the openenv package accept the socket, send CAPACITY_REACHED and close."""

    async def refuse(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        full = {"message": "at capacity", "code": "CAPACITY_REACHED", "active_sessions": 2, "max_sessions": 2}
        await socket.send_json({"type": "error", "data": full})
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_get("/ws", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        with pytest.raises(GroupTooLargeError, match=r"3 sessions .* has 2"):
            await GrpoPool(url, size=3).connect()
        with pytest.raises(TransientError, match="at capacity"):
            await GrpoPool(url, size=2, options=ClientOptions(connect_s=0.3)).connect()
    finally:
        await runner.cleanup()


async def test_a_synchronous_trainer_plays_groups_with_plain_and_with_async_rollouts() -> None:
    async def play(env: EnvSession, first: Observation) -> float:
        return await bisect(env)

    def train(url: str) -> None:
        results: list[GroupRewards] = []
        with MultiTurnEnvPool(url, size=8, on_result=results.append) as pool:
            for rollout in (bisect_blocking, play):
                rewards = pool.run_group(GAME, rollout)
                assert rewards == pytest.approx([0.84] * 8)
                pool.record_group_result(GAME, rewards)
            assert [seen.done for seen in pool.reset_group(GAME)] == [False] * 8
            assert [seen.text for seen in pool.run_group_step(["5"] * 8)] == ["correct"] * 8
        assert len(results) == 2
        pool.close()
        with pytest.raises(RunError, match="closed"):
            pool.reset_group(GAME)

    async with served("number_guessing", size=8) as server:
        await asyncio.to_thread(train, server.url)
        assert server.pool.health().busy == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("env-")]


@pytest.mark.usefixtures("counting_resets")
async def test_a_blocking_pool_that_fails_to_connect_leaves_no_thread_and_no_session() -> None:
    FailsOneReset.fails_on = 3
    async with served(FailsOneReset, size=4) as server:
        with pytest.raises(EpisodeError, match="reset 3 failed"):
            await asyncio.to_thread(MultiTurnEnvPool, server.url, 4, first_task={})
        await until(lambda: server.pool.health().busy == 0)
        assert not [thread for thread in threading.enumerate() if thread.name == "env-pool"]


async def test_calling_the_pool_from_its_own_loop_is_refused_instead_of_hanging() -> None:
    def train(url: str) -> None:
        with MultiTurnEnvPool(url, size=1) as pool:

            async def wrong(env: EnvSession, first: Observation) -> None:
                pool.reset_group(GAME)

            with pytest.raises(RunError, match="await the session"):
                pool.run_group(GAME, wrong)

    async with served("number_guessing", size=1) as server:
        await asyncio.to_thread(train, server.url)


async def test_closing_a_blocking_pool_ends_a_waiting_rollout() -> None:
    def train(url: str) -> str:
        pool = MultiTurnEnvPool(url, size=1, options=ClientOptions(close_s=0.5))
        waiting = threading.Event()

        def play(env: BlockingSession, first: Observation) -> None:
            waiting.set()
            env.step("600")

        outcome: list[BaseException] = []

        def run() -> None:
            try:
                pool.run_group({}, play)
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        waiting.wait(10)
        pool.close()
        thread.join(10)
        assert not thread.is_alive()
        return type(outcome[0]).__name__

    async with served(Waiter, size=1) as server:
        assert await asyncio.to_thread(train, server.url) in {"RunError", "SessionLostError"}
        await until(lambda: server.pool.health().busy == 0)


async def test_invalid_reservations_are_refused() -> None:
    async with served("number_guessing", size=2) as server, aiohttp.ClientSession(server.url) as http:
        for body in ({"sessions": 0}, {"sessions": "many"}, {"slots": 2}):
            async with http.post("/reservations", json=body) as reply:
                assert reply.status == 422
        async with http.get("/ws?reservation=never-granted") as reply:
            assert reply.status == 410
        async with http.delete("/reservations/never-granted") as reply:
            assert reply.status == 200


def test_the_clients_import_nothing_heavy() -> None:
    heavy = {
        "torch",
        "transformers",
        "openenv",
        "numpy.testing",
        "botocore",
        "awscli",
        "ministack",
        "fastapi",
        "websockets",
    }
    code = "import sys, rollbook.envs.client.group; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert heavy.isdisjoint(loaded)
    assert "rollbook.envs.server.app" not in loaded
