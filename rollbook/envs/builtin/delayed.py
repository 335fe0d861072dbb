"""Number guessing in an environment that takes its time: for measuring how waiting overlaps with work."""

import asyncio
from collections.abc import Mapping
from typing import Any

from rollbook.contracts.environment import Observation
from rollbook.envs.builtin.number_guessing import NumberGuessing


class DelayedNumberGuessing:
    """The same game; every answer comes after `step_s` seconds of waiting that hold no processor."""

    def __init__(self, *, step_s: float, **game: Any) -> None:
        if step_s < 0:
            raise ValueError(f"step_s is {step_s}; an environment cannot answer before it was asked")
        self._step_s = step_s
        self._env = NumberGuessing(**game)

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return self._env.reset(task)

    async def step(self, action: str) -> Observation:
        await asyncio.sleep(self._step_s)
        return self._env.step(action)

    async def close(self) -> None:
        self._env.close()
