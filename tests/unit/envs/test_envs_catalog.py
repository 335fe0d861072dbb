"""Finding environments by name, and reporting mistakes before the first episode."""

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.plugin import plugin_fault
from rollbook.envs.builtin.terminal.environment import TASKS
from rollbook.envs.catalog import EnvironmentSource, environment_class
from rollbook.envs.config import ENVIRONMENTS, EnvConfig

OWN_ENVIRONMENT = """
from rollbook.contracts.task import Observation

class Coin:
    def __init__(self, side="heads"):
        self.side = side
    def reset(self, task):
        return Observation(text="heads or tails?")
    def step(self, action):
        return Observation(text=self.side, reward=float(action == self.side), done=True)
    def close(self):
        raise OSError("the coin rolled away")

class NotAnEnvironment:
    def reset(self, task): ...
"""

GAME = {"secret": 5, "low": 0, "high": 15}
EPISODES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "arithmetic": ({}, {"left": 2, "sign": "+", "right": 3}, ["5"]),
    "delayed_number_guessing": ({"step_s": 0.0}, GAME, ["7", "5"]),
    "maths": ({}, {"question": "2 + 3?", "answer": "5"}, ["six", "\\boxed{5}"]),
    "number_guessing": ({}, GAME, ["7", "5"]),
    "question": ({}, {"question": "2 + 3?"}, ["5"]),
    "terminal": ({}, TASKS[0], TASKS[0]["solution"]),
}


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_environments_for_test.py").write_text(OWN_ENVIRONMENT, encoding="utf-8")
    (tmp_path / "broken_environments_for_test.py").write_text("import no_such_library_at_all", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_environments_for_test", raising=False)
    return "own_environments_for_test"


# `question` has no reward: reward functions score the reply.
@pytest.mark.parametrize("name", sorted(EPISODES.keys() - {"question"}))
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


@pytest.mark.parametrize("name", sorted(EPISODES))
async def test_every_reset_starts_from_a_clean_state(name: str) -> None:
    args, task, actions = EPISODES[name]
    source = EnvironmentSource(EnvConfig(name=name, args=args))
    async with source.open() as env:
        first = [await env.reset(task), *[await env.step(action) for action in actions]]
        again = [await env.reset(task), *[await env.step(action) for action in actions]]
    source.close()
    assert first == again


async def test_a_user_environment_is_found_by_module_and_class(own_module: str) -> None:
    source = EnvironmentSource(EnvConfig(name=f"{own_module}:Coin", args={"side": "tails"}))
    async with source.open() as environment:
        assert (await environment.reset({})).text == "heads or tails?"
        assert (await environment.step("tails")).reward == 1.0
    source.close()


async def test_an_exception_in_close_does_not_fail_the_episode(own_module: str) -> None:
    source = EnvironmentSource(EnvConfig(name=f"{own_module}:Coin"))
    async with source.open() as environment:
        await environment.reset({})
    with pytest.raises(EpisodeError, match="called after close"):
        await environment.step("heads")
    source.close()


async def test_episodes_do_not_share_an_environment() -> None:
    source = EnvironmentSource(EnvConfig())
    first, second = source(), source()
    await first.reset({"secret": 1, "low": 0, "high": 15})
    await second.reset({"secret": 2, "low": 0, "high": 15})
    assert (await first.step("1")).solved
    assert (await second.step("1")).text == "higher"
    source.close()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(RunError, match=r"'chess' is neither built in \(.*delayed_number_guessing, .*number_guessing"):
        environment_class("chess")
    with pytest.raises(RunError, match="did you mean 'number_guessing'"):
        environment_class("numberguessing")


def test_every_built_in_environment_exists() -> None:
    assert EPISODES.keys() == ENVIRONMENTS.keys() - {"aws", "reasoning_gym", "code", "files", "harbor"}
    for name, path in ENVIRONMENTS.items():
        assert plugin_fault(name, setting="env.name", search_path=(), builtin=ENVIRONMENTS) is None, path


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("no_such_module_at_all:Environment", "no module 'no_such_module_at_all'"),
        ("broken_environments_for_test:Environment", "imports 'no_such_library_at_all', which is not installed"),
        ("own_environments_for_test:Dice", r"has no 'Dice' \(it defines Coin, NotAnEnvironment\)"),
        ("own_environments_for_test:NotAnEnvironment", "lacks step, close"),
    ],
)
def test_a_wrong_module_or_class_is_reported(own_module: str, path: str, complaint: str) -> None:
    with pytest.raises(RunError, match=complaint):
        environment_class(path)


@pytest.mark.parametrize("args", [{"max_turn": 6}, {"max_turns": 0}, {"turn_price": 1.5}])
def test_wrong_arguments_are_reported_before_the_first_episode(args: dict[str, float]) -> None:
    with pytest.raises(
        RunError, match=r"env.args: number_guessing does not accept .* its arguments are \(\*, max_turns"
    ):
        EnvironmentSource(EnvConfig(args=args))


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValidationError, match="poolsize"):
        EnvConfig.model_validate({"name": "number_guessing", "poolsize": 8})
