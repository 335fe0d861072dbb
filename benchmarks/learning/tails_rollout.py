"""Environments with episodes of log-normal duration, for `tails.py`."""

import asyncio
import math
import random
from collections.abc import Mapping
from typing import Any

from rollbook import RolloutFn, RolloutSample, RolloutSetup, TrajectoryAssembler
from rollbook.contracts.task import Observation
from rollbook.envs.builtin.number_guessing import NumberGuessing

TYPICAL_TURNS = 4
"""A turn takes this fraction of the drawn duration, so that an episode of typical length takes about as long as drawn."""


class _Tailed:
    def __init__(self, *, mean_s: float, shape: float) -> None:
        self._turn_s = random.lognormvariate(math.log(mean_s) - shape**2 / 2, shape) / TYPICAL_TURNS

    async def close(self) -> None:
        pass


class TailedGuessing(_Tailed):
    """Number guessing. How long a turn takes does not depend on the guesses."""

    def __init__(self, *, mean_s: float, shape: float, **game: Any) -> None:
        super().__init__(mean_s=mean_s, shape=shape)
        self._game = NumberGuessing(**game)

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return self._game.reset(task)

    async def step(self, action: str) -> Observation:
        await asyncio.sleep(self._turn_s)
        return self._game.step(action)


class TailedCoin(_Tailed):
    """The episode ends when the agent says a number below 4. The reward is a coin toss."""

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return Observation(text="")

    async def step(self, action: str) -> Observation:
        await asyncio.sleep(self._turn_s)
        is_end = action.strip() in ("0", "1", "2", "3")
        return Observation(text="higher", done=is_end, reward=float(random.random() < 0.5) if is_end else 0.0)


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    """An episode of the coin. An episode that reaches the limit of turns also tosses it: the reward never depends on the length."""
    opening = setup.tokenizer.encode("<bos>")

    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        assembler = TrajectoryAssembler(setup.sampling)
        assembler.add_prompt(opening)
        async with setup.open_environment() as env:
            seen = await env.reset(row)
            while not seen.done and assembler.num_turns < setup.limits.max_turns:
                word = await setup.policy.complete(assembler.prompt_ids, max_tokens=1)
                assembler.add_completion(word)
                seen = await env.step(setup.tokenizer.decode(word.token_ids.tolist()))
        return assembler.build(reward=seen.reward if seen.done else float(random.random() < 0.5))

    return rollout
