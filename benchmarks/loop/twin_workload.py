"""The demo's game with environments and training steps that take time, for `twin.py`. They sleep instead of computing."""

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any

from rollbook.contracts.task import Observation
from rollbook.envs.builtin.number_guessing import NumberGuessing
from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms
from rollbook.trainer.losses.registry import reinforce

_speeds = random.Random(0)


class SlowGame:
    """Number guessing whose turns take `turn_s` on average. Each episode has its own speed, log-normal with this shape."""

    def __init__(self, *, turn_s: float, shape: float = 0.0, max_turns: int = 6, turn_price: float = 0.4) -> None:
        self._game = NumberGuessing(max_turns=max_turns, turn_price=turn_price)
        self._turn_s = turn_s * (_speeds.lognormvariate(-(shape**2) / 2, shape) if shape else 1.0)

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return self._game.reset(task)

    async def step(self, action: str) -> Observation:
        await asyncio.sleep(self._turn_s)
        return self._game.step(action)

    async def close(self) -> None:
        self._game.close()


def sleeping_loss(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """Takes `sample_s` longer for every sequence of the pass, like a larger model."""
    time.sleep(settings.options["sample_s"] * inputs.num_rows)
    return reinforce(inputs, settings)
