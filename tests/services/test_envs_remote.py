"""A rollout process opens environments of a server in the same way as its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from pydantic import ValidationError

from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.envs.catalog import EnvironmentSource
from rollbook.envs.client import remote
from rollbook.envs.client.remote import OpenEnvironment, open_environments, open_remote_environments
from rollbook.envs.client.session import ClientOptions, ServerFullError
from rollbook.envs.config import EnvConfig
from rollbook.envs.server.run import RunningServer
from tests.parts.envs.environments import GAME, Notebook, served


@asynccontextmanager
async def listed(*urls: str) -> AsyncIterator[OpenEnvironment]:
    """Environments of several servers, when their list has been read."""
    is_read = asyncio.Event()

    async def servers() -> list[str]:
        is_read.set()
        return list(urls)

    async with open_remote_environments(urls[0], source=servers) as open_environment:
        await is_read.wait()
        await asyncio.sleep(0)
        yield open_environment


async def until_waiting(number: int, *servers: RunningServer) -> None:
    """Until each server has this number of requests in its queue. None holds a reservation that no session uses."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(20):
        for server in servers:
            while True:
                async with http.get(f"{server.url}/health") as reply:
                    found = await reply.json()
                if (found["waiting"], found["reserved"]) == (number, 0):
                    break
                await asyncio.sleep(0.01)


async def test_more_episodes_than_environments_wait_for_a_free_one() -> None:
    async with served(Notebook, size=4) as server, open_remote_environments(server.url) as open_environment:

        async def play(number: int) -> str:
            async with open_environment() as env:
                await env.reset({"owner": f"w{number}"})
                assert server.pool.health().busy <= 4
                return (await env.step("end")).text

        assert await asyncio.gather(*(play(n) for n in range(20))) == [f"w{n}|end" for n in range(20)]
        assert server.pool.health().busy == 0


async def test_a_full_server_fails_the_open_at_its_deadline_and_serves_the_next_one() -> None:
    options = ClientOptions(connect_s=2.0)
    async with (
        served("number_guessing", size=1) as server,
        open_remote_environments(server.url, options) as open_environment,
    ):
        async with open_environment() as held:
            with pytest.raises(ServerFullError):
                async with open_environment():
                    pass
            await held.reset(GAME)
            assert (await held.step("5")).solved
        async with open_environment() as env:
            await env.reset(GAME)


async def test_a_rollout_opens_its_own_environments_and_those_of_a_server_in_the_same_way() -> None:
    async with served("number_guessing", token="open sesame") as server:
        for config in (EnvConfig(), EnvConfig.model_validate({"url": server.url, "token": "open sesame"})):
            async with open_environments(config) as open_environment, open_environment() as env:
                await env.reset(GAME)
                assert (await env.step("5")).solved
        with pytest.raises(RunError, match="environments are on that server"):
            EnvironmentSource(EnvConfig(url=server.url))


@pytest.mark.parametrize(
    "fields", [{"url": "http://x", "name": "aws"}, {"url": "http://x", "args": {}}, {"token": "t"}, {"url": "x"}]
)
def test_settings_without_effect_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        EnvConfig.model_validate(fields)


async def test_a_server_that_does_not_respond_is_reported_with_its_address() -> None:
    with pytest.raises(TransientError, match=r"http://127.0.0.1:9"):
        async with open_remote_environments("http://127.0.0.1:9", ClientOptions(connect_s=0.3)):
            pass


async def test_episodes_are_spread_over_the_listed_servers_and_avoid_those_that_are_full_or_gone() -> None:
    is_read = asyncio.Event()

    async def servers() -> list[str]:
        is_read.set()
        return [first.url, second.url, "http://127.0.0.1:9"]

    async with (
        served(Notebook, size=2) as first,
        served(Notebook, size=3) as second,
        open_remote_environments(first.url, source=servers) as open_environment,
        AsyncExitStack() as episodes,
    ):
        await is_read.wait()
        for _ in range(5):
            await episodes.enter_async_context(open_environment())
        assert (first.pool.health().busy, second.pool.health().busy) == (2, 3)


async def test_an_episode_waits_in_the_queues_of_all_servers_and_uses_the_first_free_session() -> None:
    async with (
        served(Notebook, size=1) as first,
        served(Notebook, size=1) as second,
        listed(first.url, second.url) as open_environment,
        AsyncExitStack() as episodes,
    ):
        held = AsyncExitStack()
        for stack in (episodes, held):
            await stack.enter_async_context(open_environment())
        waiting = asyncio.create_task(episodes.enter_async_context(open_environment()))
        await until_waiting(1, first, second)
        await held.aclose()
        await waiting
        # It left the other queue, and holds no reservation there.
        await until_waiting(0, first, second)
        assert first.pool.health().busy == second.pool.health().busy == 1
    assert first.pool.health().busy == second.pool.health().busy == 0


async def test_a_waiting_episode_uses_a_server_that_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FOLLOW_S", 0.02)
    urls: list[str] = []

    async def servers() -> list[str]:
        return urls

    async with served(Notebook, size=1) as first, served(Notebook, size=1) as joining:
        urls.append(first.url)
        async with open_remote_environments(first.url, source=servers) as open_environment, open_environment():
            waiting = asyncio.create_task(open_environment().__aenter__())
            await until_waiting(1, first)
            urls.append(joining.url)
            env = await waiting
            assert joining.pool.health().busy == 1
            await until_waiting(0, first)
            await env.close()


async def test_the_places_of_a_server_that_died_are_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FOLLOW_S", 0.02)
    async with served(Notebook, size=4) as living, AsyncExitStack() as episodes:
        dying = AsyncExitStack()
        dead = await dying.enter_async_context(served(Notebook, size=4))
        async with listed(living.url, dead.url) as open_environment:
            lost = [await episodes.enter_async_context(open_environment()) for _ in range(4)]
            assert (living.pool.health().busy, dead.pool.health().busy) == (2, 2)
            await dying.aclose()
            failed = await asyncio.gather(*(env.reset({"owner": "a"}) for env in lost), return_exceptions=True)
            assert sorted(isinstance(result, EpisodeError) for result in failed) == [False, False, True, True]
            again = [await episodes.enter_async_context(open_environment()) for _ in range(2)]
            assert living.pool.health().busy == 4
            for env in again:
                await env.reset({"owner": "b"})
            await episodes.aclose()
