"""Episodes of log-normal duration and a training step of fixed duration, for `tail.py`. Both sleep instead of computing."""

import asyncio
import math
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rollbook.contracts.environment import Observation
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.rollout.contract import RolloutFn, RolloutSetup
from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms
from rollbook.trainer.losses.policy_gradient import reinforce

_durations: dict[int, random.Random] = {}
"""By seed. Shared by all episodes of a worker process, so that every policy meets the same durations in the same order."""


class SleepingEnvironment:
    """An episode of `turns` turns whose total duration is log-normal with the given mean and shape (sigma of the logarithm).

    The turns end at equal intervals from the reset on, so time that the policy needs is part of the duration.
    """

    def __init__(self, *, mean_s: float, shape: float, turns: int, seed: int = 0) -> None:
        rng = _durations.setdefault(seed, random.Random(seed))
        self._turns = turns
        self._seconds = rng.lognormvariate(math.log(mean_s) - shape**2 / 2, shape) if shape else mean_s
        self._started = 0.0
        self._turn = 0

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        self._started = time.monotonic()
        return Observation(text="")

    async def step(self, action: str) -> Observation:
        self._turn += 1
        ends = self._started + self._seconds * self._turn / self._turns
        await asyncio.sleep(max(0.0, ends - time.monotonic()))
        return Observation(text="", done=self._turn == self._turns)

    async def close(self) -> None:
        pass


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        assembler = TrajectoryAssembler(setup.sampling)
        assembler.add_prompt(setup.tokenizer.encode(f"<bos> {row['number']}"))
        async with setup.open_environment() as env:
            seen = await env.reset(row)
            while not seen.done:
                # The tokens of a turn are sampled at its end, so those of the last turn are as new as the episode.
                seen = await env.step("")
                answer = await setup.policy.complete(assembler.prompt_ids)
                assembler.add_completion(answer)
        return assembler.build(reward=float(answer.token_ids[0] % 2))

    return rollout


def sleeping_loss(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """Takes `sample_s` for every sequence of the pass, like a model of the simulated size."""
    time.sleep(settings.options["sample_s"] * inputs.num_rows)
    return reinforce(inputs, settings)


def tasks(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"id": f"task-{number}", "number": number % 16}
