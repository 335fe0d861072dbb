"""Episodes of several turns: each prompt is all that was said before and an observation. With and without prefix reuse, in turn."""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.models import opened
from benchmarks.report import Figure, tell
from rollbook.contracts.policy import Publication, SamplingParams
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import TransformersEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The shape of what is played."""

    count: int = 64
    at_once: int = 32
    turns: int = 6
    system: int = 96
    """Tokens of the first prompt, alike in all of them but for the last few."""
    said: int = 16
    seen: int = 24
    vocab: int = 1024

    @property
    def longest(self) -> int:
        return self.system + 8 + self.turns * (self.said + self.seen)


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
    free = asyncio.Semaphore(episodes.at_once)
    prompts: list[int] = []
    cached: list[int] = []
    sampled: list[int] = []

    async def one(number: int) -> None:
        rng = random.Random(seed * 10_007 + number)
        prompt = [*system, *(rng.randrange(3, episodes.vocab) for _ in range(8))]
        async with free:
            for turn in range(episodes.turns):
                sampling = SamplingParams(max_tokens=episodes.said, seed=seed + number + turn)
                completion = await engine.generate(prompt, sampling)
                prompts.append(len(prompt))
                cached.append(completion.cached_tokens)
                sampled.append(len(completion.token_ids))
                observed = (rng.randrange(3, episodes.vocab) for _ in range(episodes.seen))
                prompt = [*prompt, *completion.token_ids.tolist(), *observed]

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
    """CPU seconds without it over those with it; on a GPU the seconds on the wall say more."""
    on: list[Played] = []
    off: list[Played] = []
    plain = config.model_copy(update={"prefix_cache_share": 0.0})
    async with opened(config, model_dir, weights) as kept, opened(plain, model_dir, weights) as computed:
        for engine in (kept, computed):
            await play(engine, episodes, seed=99)
        for number in range(rounds):
            on.append(await play(kept, episodes, seed=number))
            off.append(await play(computed, episodes, seed=number))
            tell(
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
