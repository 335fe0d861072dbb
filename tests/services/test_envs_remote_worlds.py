"""Worlds of a server elsewhere look like worlds of one's own."""

import asyncio

import pytest
from pydantic import ValidationError

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import RunError, TransientError
from rollbook.envs.catalog import EnvironmentSource
from rollbook.envs.client.remote import open_environments, open_remote_worlds
from rollbook.envs.client.session import ClientOptions
from rollbook.envs.config import EnvConfig
from rollbook.envs.pools.environment_pool import WorldsExhaustedError
from tests.parts.envs.worlds import GAME, Notebook, served


async def test_more_episodes_than_worlds_are_played_as_worlds_come_free() -> None:
    async with served(Notebook, size=4) as server, open_remote_worlds(server.url) as worlds:
        assert worlds.capacity == 4

        async def play(number: int) -> str:
            async with worlds.open() as world:
                await world.reset({"owner": f"w{number}"})
                assert server.worlds.health().busy <= 4
                return (await world.step("end")).text

        assert await asyncio.gather(*(play(n) for n in range(20))) == [f"w{n}|end" for n in range(20)]
        assert (worlds.health().busy, server.worlds.health().busy) == (0, 0)


async def test_a_full_server_exhausts_the_patience_of_the_caller_and_nothing_else() -> None:
    async with served("number_guessing", size=1) as server, open_remote_worlds(server.url) as worlds:
        held = await worlds.acquire(Deadline(5, "first"))
        with pytest.raises(WorldsExhaustedError):
            await worlds.acquire(Deadline(2.0, "second"))
        await held.reset(GAME)
        assert (await held.step("5")).solved
        await held.close()
        await (await worlds.acquire(Deadline(5, "third"))).close()


async def test_a_rollout_opens_worlds_of_its_own_or_of_a_server_in_the_same_way() -> None:
    async with served("number_guessing", token="open sesame") as server:
        for config in (EnvConfig(), EnvConfig.model_validate({"url": server.url, "token": "open sesame"})):
            async with open_environments(config) as open_environment, open_environment() as world:
                await world.reset(GAME)
                assert (await world.step("5")).solved
        with pytest.raises(RunError, match="no world is made here"):
            EnvironmentSource(EnvConfig(url=server.url))


@pytest.mark.parametrize(
    "fields", [{"url": "http://x", "name": "aws"}, {"url": "http://x", "args": {}}, {"token": "t"}, {"url": "x"}]
)
def test_settings_that_nobody_would_read_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        EnvConfig.model_validate(fields)


async def test_without_a_server_the_wait_ends_with_a_clear_word() -> None:
    with pytest.raises(TransientError, match=r"http://127.0.0.1:9"):
        async with open_remote_worlds("http://127.0.0.1:9", ClientOptions(connect_s=0.3)):
            pass
