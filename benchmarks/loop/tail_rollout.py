"""Episodes of log-normal duration and a training step of fixed duration, for `tail.py`. Both sleep instead of computing."""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from rollbook.contracts.task import Observation
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.rollout.contract import RolloutFn, RolloutSetup
from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms
from rollbook.trainer.losses.registry import reinforce

_episodes: dict[str, Iterator[int]] = defaultdict(itertools.count)
"""Number of the next episode, by task."""


class SleepingEnvironment:
    """Waits `turns` - 1 times. Its task lists the durations of its episodes, so every batch policy has the same ones.

    The waits end at equal intervals from the reset on, so time that the policy needs is part of the duration.
    """

    def __init__(self, *, turns: int) -> None:
        self._waits = turns - 1
        self._started = self._seconds = 0.0
        self._ended = 0

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        durations = task["seconds"]
        self._seconds = durations[next(_episodes[task["id"]]) % len(durations)]
        self._started = time.monotonic()
        return Observation(text="")

    async def step(self, action: str) -> Observation:
        self._ended += 1
        ends = self._started + self._seconds * self._ended / self._waits
        await asyncio.sleep(max(0.0, ends - time.monotonic()))
        return Observation(text="", done=self._ended == self._waits)

    async def close(self) -> None:
        pass


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        assembler = TrajectoryAssembler(setup.sampling)
        assembler.add_prompt(setup.tokenizer.encode(f"<bos> {row['number']}"))
        async with setup.open_environment() as env:
            seen = await env.reset(row)
            assembler.add_completion(await setup.policy.complete(assembler.prompt_ids))
            while not seen.done:
                seen = await env.step("")
                # The last tokens are sampled at the end of the episode.
                answer = await setup.policy.complete(assembler.prompt_ids)
                assembler.add_completion(answer)
        return assembler.build(reward=float(answer.token_ids[0] % 2))

    return rollout


def sleeping_loss(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """Takes `sample_s` for every sequence of the pass, like a model of the simulated size."""
    time.sleep(settings.options["sample_s"] * inputs.num_rows)
    return reinforce(inputs, settings)
