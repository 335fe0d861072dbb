"""The worker side of the benchmark: a rollout worker whose reward function holds the interpreter in bursts.

Its episodes are as small as possible, so that nearly all its time is scoring. Prints `scoring` once it has started to score.
"""

import argparse
import asyncio
import io
import itertools
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from benchmarks.trainer.gil_burn import BURST_VARIABLE
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.contract import RolloutFn, RolloutSetup
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.policy import EpisodePolicy
from rollbook.rollout.rewards.config import RewardFunctionConfig, RewardsConfig
from rollbook.rollout.settings import EpisodeLimits
from rollbook.rollout.workers.handle import open_worker
from rollbook.rollout.workers.spec import WorkerSpec
from rollbook.telemetry.events import EventLog


class NoTokenizer:
    def encode(self, text: str) -> list[int]:
        return [1]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return "42"

    def render(self, messages: Any, *, add_generation_prompt: bool) -> str:
        return ""

    vocab_size = 8
    eos_token_ids = (0,)


@asynccontextmanager
async def build(settings: Mapping[str, Any]) -> AsyncIterator[RolloutSetup]:
    sampling = SamplingParams()
    yield RolloutSetup(
        policy=EpisodePolicy(None, sampling),  # type: ignore[arg-type]  # these episodes send no policy request
        tokenizer=NoTokenizer(),  # type: ignore[arg-type]  # they use no tokens of a model
        sampling=sampling,
        limits=EpisodeLimits(),
        open_environment=None,  # type: ignore[arg-type]
        log=EventLog("gil", echo=io.StringIO()),
    )


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    mask = np.array([False, True])
    row = TokenRow.of(token_ids=[1, 2], logprobs=[0.0, -1.0], loss_mask=mask, versions=[-1, 0])

    async def rollout(task: dict[str, Any]) -> RolloutSample:
        return RolloutSample(sequences=(row,), sampling=setup.sampling, reward=0.0)

    return rollout


async def play(scorers: int) -> None:
    rewards = RewardsConfig(
        functions={"burn": RewardFunctionConfig(path="benchmarks.trainer.gil_burn:reward")},
        processes=scorers,
        timeout_s=600.0,
    )
    spec = WorkerSpec(
        builder="benchmarks.trainer.gil_rollouts:build",
        config=RolloutConfig(
            function="benchmarks.trainer.gil_rollouts", completions_per_prompt=max(2, scorers), rewards=rewards
        ),
    )
    log = EventLog("gil", echo=io.StringIO())
    async with open_worker(spec, log=log, start_s=120, silence_s=600, stop_s=1) as worker:
        numbers = itertools.count()

        def next_group() -> None:
            number = next(numbers)
            worker.play(
                GroupOrder(
                    group_id=GroupId(f"t{number}@0"),
                    attempt=1,
                    task_id=TaskId(f"t{number}"),
                    draw=0,
                    row={},
                    min_publication=0,
                    deadline_s=3600.0,
                )
            )

        for _ in range(2):
            next_group()
        is_first = True
        async for _ in worker.results():
            next_group()
            if is_first:
                print("scoring", flush=True)
                is_first = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scorers", type=int, default=1)
    parser.add_argument("--burst", type=float, default=1.0)
    args = parser.parse_args()
    os.environ[BURST_VARIABLE] = str(args.burst)
    asyncio.run(play(args.scorers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
