"""Episodes of several turns: each prompt is the whole conversation so far. With and without prefix reuse, alternating."""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.engine.models import opened
from benchmarks.report import Figure, print_status
from rollbook.contracts.policy import Publication, SamplingParams
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import TransformersEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Number and size of the episodes."""

    count: int = 64
    in_flight: int = 32
    turns: int = 6
    system: int = 96
    """Tokens of the system prompt, which all episodes share."""
    turn_tokens: int = 16
    observation_tokens: int = 24
    vocab: int = 1024

    @property
    def longest(self) -> int:
        return self.system + 8 + self.turns * (self.turn_tokens + self.observation_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    wall_s: float
    cpu_s: float
    prompt_tokens: int
    cached_tokens: int
    sampled: int


async def play(engine: TransformersEngine, episodes: Episodes, *, seed: int) -> Played:
    common = random.Random(-1)
    system = [common.randrange(3, episodes.vocab) for _ in range(episodes.system)]
    free = asyncio.Semaphore(episodes.in_flight)
    prompts: list[int] = []
    cached: list[int] = []
    sampled: list[int] = []

    def drawn(rng: random.Random, number: int) -> list[int]:
        return [rng.randrange(3, episodes.vocab) for _ in range(number)]

    # Drawn before the clock starts: the time of the episodes is the engine's.
    starts: list[NDArray[np.int32]] = []
    observations: list[list[NDArray[np.int32]]] = []
    for number in range(episodes.count):
        rng = random.Random(seed * 10_007 + number)
        starts.append(np.array([*system, *drawn(rng, 8)], dtype=np.int32))
        observations.append(
            [np.array(drawn(rng, episodes.observation_tokens), dtype=np.int32) for _ in range(episodes.turns)]
        )

    async def one(number: int) -> None:
        prompt = starts[number]
        async with free:
            for turn in range(episodes.turns):
                sampling = SamplingParams(max_tokens=episodes.turn_tokens, seed=seed + number + turn)
                completion = await engine.generate(prompt, sampling)
                prompts.append(len(prompt))
                cached.append(completion.cached_tokens)
                sampled.append(len(completion.token_ids))
                prompt = np.concatenate([prompt, completion.token_ids, observations[number][turn]])

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(number) for number in range(episodes.count)))
    return Played(
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
        prompt_tokens=sum(prompts),
        cached_tokens=sum(cached),
        sampled=sum(sampled),
    )


async def prefix_reuse(
    model_dir: Path, weights: tuple[Publication, Path], *, rounds: int, episodes: Episodes, config: InferenceConfig
) -> tuple[Figure, Sequence[Played], Sequence[Played]]:
    """The ratio is CPU seconds without reuse over CPU seconds with it; on a GPU, use the ratio of wall seconds."""
    on: list[Played] = []
    off: list[Played] = []
    plain = config.model_copy(update={"prefix_cache_share": 0.0})
    async with opened(config, model_dir, weights) as with_reuse, opened(plain, model_dir, weights) as without:
        for engine in (with_reuse, without):
            await play(engine, episodes, seed=99)
        for number in range(rounds):
            on.append(await play(with_reuse, episodes, seed=number))
            off.append(await play(without, episodes, seed=number))
            print_status(
                f"turns, round {number}: {on[-1].cpu_s:.2f} CPU seconds with prefix reuse, {off[-1].cpu_s:.2f} without; "
                f"{on[-1].cached_tokens / on[-1].prompt_tokens:.0%} of the prompt tokens were cached"
            )
    figure = Figure(
        name="prefix_reuse",
        ours=statistics.median(one.cpu_s for one in on),
        peer=statistics.median(one.cpu_s for one in off),
        unit="CPU s",
        ratio=statistics.median(b.cpu_s / a.cpu_s for a, b in zip(on, off, strict=True)),
        more={
            "ratio_of_wall_seconds": round(
                statistics.median(b.wall_s / a.wall_s for a, b in zip(on, off, strict=True)), 3
            ),
            "cached_share": round(on[-1].cached_tokens / on[-1].prompt_tokens, 3),
            "sampled_tokens": on[-1].sampled,
        },
    )
    return figure, on, off
