"""Environments of a server elsewhere look like environments of one's own."""

import asyncio

import pytest
from pydantic import ValidationError

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import RunError, TransientError
from rollbook.envs.catalog import EnvironmentSource
from rollbook.envs.client.remote import open_environments, open_remote_pool
from rollbook.envs.client.session import ClientOptions
from rollbook.envs.config import EnvConfig
from rollbook.envs.environment import EnvironmentsExhaustedError
from tests.parts.envs.environments import GAME, Notebook, served


async def test_more_episodes_than_environments_are_played_as_environments_come_free() -> None:
    async with served(Notebook, size=4) as server, open_remote_pool(server.url) as environments:
        assert environments.capacity == 4

        async def play(number: int) -> str:
            async with environments.open() as env:
                await env.reset({"owner": f"w{number}"})
                assert server.pool.health().busy <= 4
                return (await env.step("end")).text

        assert await asyncio.gather(*(play(n) for n in range(20))) == [f"w{n}|end" for n in range(20)]
        assert (environments.health().busy, server.pool.health().busy) == (0, 0)


async def test_a_full_server_exhausts_the_patience_of_the_caller_and_nothing_else() -> None:
    async with served("number_guessing", size=1) as server, open_remote_pool(server.url) as environments:
        held = await environments.acquire(Deadline(5, "first"))
        with pytest.raises(EnvironmentsExhaustedError):
            await environments.acquire(Deadline(2.0, "second"))
        await held.reset(GAME)
        assert (await held.step("5")).solved
        await held.close()
        await (await environments.acquire(Deadline(5, "third"))).close()


async def test_a_rollout_opens_environments_of_its_own_or_of_a_server_in_the_same_way() -> None:
    async with served("number_guessing", token="open sesame") as server:
        for config in (EnvConfig(), EnvConfig.model_validate({"url": server.url, "token": "open sesame"})):
            async with open_environments(config) as open_environment, open_environment() as env:
                await env.reset(GAME)
                assert (await env.step("5")).solved
        with pytest.raises(RunError, match="no environment is made here"):
            EnvironmentSource(EnvConfig(url=server.url))


@pytest.mark.parametrize(
    "fields", [{"url": "http://x", "name": "aws"}, {"url": "http://x", "args": {}}, {"token": "t"}, {"url": "x"}]
)
def test_settings_that_nobody_would_read_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        EnvConfig.model_validate(fields)


async def test_without_a_server_the_wait_ends_with_a_clear_word() -> None:
    with pytest.raises(TransientError, match=r"http://127.0.0.1:9"):
        async with open_remote_pool("http://127.0.0.1:9", ClientOptions(connect_s=0.3)):
            pass
