"""Every environment of the catalog plays episodes through the adapter."""

from typing import Any

import pytest

from rollbook.envs.builtin.terminal.environment import TASKS
from rollbook.envs.catalog import CATALOG, EnvironmentSource
from rollbook.envs.config import EnvConfig

GAME = {"secret": 5, "low": 0, "high": 15}
EPISODES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "arithmetic": ({}, {"left": 2, "sign": "+", "right": 3}, ["5"]),
    "delayed_number_guessing": ({"step_s": 0.0}, GAME, ["7", "5"]),
    "maths": ({}, {"question": "2 + 3?", "answer": "5"}, ["six", "\\boxed{5}"]),
    "number_guessing": ({}, GAME, ["7", "5"]),
    "terminal": ({}, TASKS[0], TASKS[0]["solution"]),
}


@pytest.mark.parametrize("name", sorted(CATALOG))
async def test_a_solved_episode_ends_with_its_reward(name: str) -> None:
    args, task, actions = EPISODES[name]
    source = EnvironmentSource(EnvConfig(name=name, args=args))
    async with source.open() as env:
        assert not (await env.reset(task)).done
        seen = [await env.step(action) for action in actions]
    source.close()
    assert [observation.done for observation in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].solved
    assert sum(observation.reward for observation in seen) > 0


@pytest.mark.parametrize("name", sorted(CATALOG))
async def test_every_reset_starts_from_a_clean_state(name: str) -> None:
    args, task, actions = EPISODES[name]
    source = EnvironmentSource(EnvConfig(name=name, args=args))
    async with source.open() as env:
        first = [await env.reset(task), *[await env.step(action) for action in actions]]
        again = [await env.reset(task), *[await env.step(action) for action in actions]]
    source.close()
    assert first == again
