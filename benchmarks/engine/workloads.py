"""Workloads of agents on a GPU, in process, with the limit that bytes and FLOPs set: used by `benchmarks.engine.gpu`.

The limit is the time to read the weights once for each decode step and the keys and values of every row once for each of its
tokens, at the rate of a copy, plus the FLOPs of the prefilled tokens at the rate of a large matrix product. Both rates are measured
first.
"""

import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaForCausalLM

from benchmarks.engine.device_times import copy_rate, timed_ms
from benchmarks.engine.loop import Job, in_process
from benchmarks.engine.models import Shape, llama_config
from benchmarks.engine.turns import Episodes, play
from benchmarks.report import Figure, print_status
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded import build
from rollbook.inference.engines.embedded.engine import TransformersEngine, open_engine

EARLIER_TURNS_PER_S = 287.0
"""The engine with slots, on the same kind of GPU."""
LLAMA_8B = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocab=128_256, max_len=4096, tied=False)


@dataclass(frozen=True, slots=True)
class Rates:
    bytes_per_s: float
    flops: float

    @classmethod
    def measured(cls, device: str) -> "Rates":
        size = 8192 if device == "cuda" else 256
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        product_s = timed_ms(lambda: _product(a, b), device, repeats=10) / 1e3
        rates = cls(copy_rate(device), 2 * size**3 / product_s)
        print_status(f"  copy {rates.bytes_per_s / 1e12:.2f} TB/s, matrix product {rates.flops / 1e12:.0f} TFLOP/s")
        return rates


def _product(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a, b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a workload must do at least."""

    steps: float
    positions: int
    """Positions read by all decoded tokens together."""
    prefilled: int
    """Prompt tokens that no cache could provide."""

    def limit_s(self, shape: Shape, rates: Rates) -> float:
        head = shape.hidden // shape.heads
        weights = shape.layers * shape.layer_parameters + shape.hidden * shape.vocab
        cache = 2 * shape.layers * shape.kv_heads * head
        read_s = 2 * (self.steps * weights + self.positions * cache) / rates.bytes_per_s
        return read_s + 2.0 * shape.layers * shape.layer_parameters * self.prefilled / rates.flops


Lengths = tuple[int, int]
"""Of the prompt and of the sampled tokens of one request."""


def work_of(lengths: Sequence[Lengths], in_flight: int) -> Work:
    tokens = sum(sampled for _, sampled in lengths)
    positions = sum(sampled * prompt + sampled**2 // 2 for prompt, sampled in lengths)
    return Work(steps=tokens / in_flight, positions=positions, prefilled=sum(prompt for prompt, _ in lengths))


def _jobs(lengths: Sequence[Lengths], vocab: int, rng: random.Random) -> list[Job]:
    """With new prompts, because the engine caches those it has seen."""
    return [Job([rng.randrange(3, vocab) for _ in range(prompt)], sampled) for prompt, sampled in lengths]


@asynccontextmanager
async def random_engine(shape: Shape, config: InferenceConfig, **options: Any) -> AsyncIterator[TransformersEngine]:
    """An engine whose weights are random and made on the device, so that large models need no files."""
    with patch.object(build, "load_module", lambda *_, **__: (_module(shape, config), config.max_model_len)):
        async with open_engine(config, Path(tempfile.gettempdir()), **options) as engine:
            await engine.adopt(Publication(id=PublicationId(1), epoch=1, step=1, digest="0" * 32))
            print_status(f"  {'; '.join(engine.parts.choices)}; open after {engine.opening_s:.1f} s")
            yield engine


def _module(shape: Shape, config: InferenceConfig) -> Any:
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.dtype))
    try:
        with torch.device(config.device):
            model: Any = LlamaForCausalLM(llama_config(shape))
    finally:
        torch.set_default_dtype(default)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the workloads. `small` lets the script run on a CPU."""

    episodes: Episodes
    requests: int
    in_flight: int
    long_prompt: int
    long_tokens: int
    rounds: int = 3


def full_sizes(vocab: int) -> Sizes:
    episodes = Episodes(
        count=256, in_flight=256, turns=8, system=512, turn_tokens=48, observation_tokens=96, vocab=vocab
    )
    return Sizes(episodes=episodes, requests=4096, in_flight=512, long_prompt=1792, long_tokens=256)


def small_sizes(vocab: int) -> Sizes:
    episodes = Episodes(count=6, in_flight=4, turns=3, system=32, turn_tokens=5, observation_tokens=8, vocab=vocab)
    return Sizes(episodes=episodes, requests=24, in_flight=8, long_prompt=96, long_tokens=20, rounds=1)


async def agent_turns(
    open_with: Callable[..., Any], shape: Shape, rates: Rates, sizes: Sizes, *, is_gpu: bool
) -> list[Figure]:
    """Episodes of several turns with growing contexts, with and without prefix reuse."""
    episodes = sizes.episodes
    turns = episodes.count * episodes.turns
    grown = episodes.turn_tokens + episodes.observation_tokens
    starts = [episodes.system + 8 + turn * grown for turn in range(episodes.turns)]
    said = episodes.turn_tokens
    work = Work(
        steps=turns * said / episodes.in_flight,
        positions=episodes.count * sum(said * start + said**2 // 2 for start in starts),
        prefilled=episodes.system + episodes.count * (8 + (episodes.turns - 1) * (episodes.observation_tokens + 1)),
    )
    limit_s = work.limit_s(shape, rates)
    # Without reuse every prompt is prefilled as a whole.
    limit_without_s = replace(work, prefilled=episodes.count * sum(starts)).limit_s(shape, rates)
    seconds: dict[bool, list[float]] = {}
    cached = 0.0
    for is_reused in (True, False):
        share = {} if is_reused else {"prefix_cache_share": 0.0}
        async with open_with(max_running=episodes.in_flight, max_model_len=2 * starts[-1], **share) as engine:
            await play(engine, episodes, seed=99)
            played = [await play(engine, episodes, seed=number) for number in range(sizes.rounds)]
            if is_reused:
                cached = played[-1].cached_tokens / played[-1].prompt_tokens
        seconds[is_reused] = [one.wall_s for one in played]
        print_status(
            f"  {'with' if is_reused else 'without'} reuse: {[f'{turns / s:,.0f}' for s in seconds[is_reused]]} turns/s"
        )
    ours, without = (statistics.median(seconds[is_reused]) for is_reused in (True, False))
    print_status(
        f"  agent turns: {turns / ours:,.0f} turns/s, {turns * said / ours:,.0f} sampled tokens/s, {cached:.0%} of the prompt "
        f"tokens cached; the limit is {limit_s:.2f} s of {ours:.2f}; {without / ours:.2f} times the speed without reuse, "
        f"{limit_without_s / limit_s:.2f} times if both ran at their limits"
    )
    return [
        _figure("agent_turns", turns / ours, EARLIER_TURNS_PER_S, "turns/s", floor=5.0 if is_gpu else None),
        _figure("agent_turns_of_limit", turns / ours, turns / limit_s, "turns/s", floor=0.5 if is_gpu else None),
        _figure("agent_turns_reuse", turns / ours, turns / without, "turns/s", floor=3.0 if is_gpu else None),
    ]


async def mixed_lengths(
    open_with: Callable[..., Any], shape: Shape, rates: Rates, sizes: Sizes, *, is_gpu: bool
) -> list[Figure]:
    """One request in twenty is long, compared with the same numbers of prompt and sampled tokens in equal requests."""
    vocab = shape.vocab
    rng = random.Random(4)
    lengths = [
        (sizes.long_prompt, sizes.long_tokens) if index % 20 == 7 else (128, rng.randint(32, 128))
        for index in range(sizes.requests)
    ]
    means = [round(statistics.mean(column)) for column in zip(*lengths, strict=True)]
    shapes = {"mixed": lengths, "equal": [(means[0], means[1])] * len(lengths)}
    found: dict[str, float] = {}
    limits: dict[str, float] = {}
    async with open_with(max_running=sizes.in_flight, max_model_len=4096 if is_gpu else 256) as engine:
        for name, wanted in shapes.items():
            await in_process(engine, _jobs(wanted[: 2 * sizes.in_flight], vocab, rng), sizes.in_flight)
            runs = [await in_process(engine, _jobs(wanted, vocab, rng), sizes.in_flight) for _ in range(sizes.rounds)]
            found[name] = statistics.median(run.tokens_per_s for run in runs)
            limits[name] = runs[0].tokens / work_of(wanted, sizes.in_flight).limit_s(shape, rates)
            print_status(
                f"  {name} lengths: {[f'{run.tokens_per_s:,.0f}' for run in runs]} tokens/s, "
                f"{found[name] / limits[name]:.2f} of the limit"
            )
    print_status(
        f"  at their limits, mixed lengths run at {limits['mixed'] / limits['equal']:.2f} of the speed of equal ones"
    )
    return [_figure("mixed_lengths", found["mixed"], found["equal"], "tokens/s", floor=0.8 if is_gpu else None)]


async def closed_loop_of(
    name: str, shape: Shape, rates: Rates, *, count: int, in_flight: int, rounds: int = 3
) -> list[Figure]:
    """Prompts of 512 tokens, 64 to 512 tokens each, random weights."""
    rng = random.Random(0)
    lengths = [(512, rng.randint(64, 512)) for _ in range(count)]
    config = InferenceConfig(
        device="cuda", dtype="bfloat16", max_running=in_flight, max_model_len=1024, max_queued=100_000
    )
    async with random_engine(shape, config) as engine:
        await in_process(engine, _jobs(lengths[: in_flight + 16], shape.vocab, rng), in_flight)
        runs = [await in_process(engine, _jobs(lengths, shape.vocab, rng), in_flight) for _ in range(rounds)]
    ours = statistics.median(run.tokens_per_s for run in runs)
    tokens = runs[0].tokens
    limit = tokens / work_of(lengths, in_flight).limit_s(shape, rates)
    print_status(f"  {name}: {[f'{run.tokens_per_s:,.0f}' for run in runs]} tokens/s, the limit is {limit:,.0f}")
    return [_figure(f"closed_loop_{name}", ours, limit, "tokens/s", floor=0.5)]


EIGHT_BITS: dict[str, dict[str, str]] = {
    "fast": {},
    "int8_cache": {"kv_dtype": "int8"},
    "fp8_cache": {"kv_dtype": "fp8"},
    "fp8_weights": {"weights_dtype": "fp8"},
    "fp8_both": {"kv_dtype": "fp8", "weights_dtype": "fp8"},
}


async def eight_bits(name: str, shape: Shape, *, in_flight: Sequence[int] = (16, 128)) -> list[Figure]:
    """Prompts of 512 tokens and 256 tokens each, with keys and values, products, or both with 8 bits, against `fast` without."""
    rng, found = random.Random(0), dict[str, dict[int, float]]()
    for kind, changes in EIGHT_BITS.items():
        config = InferenceConfig.model_validate(
            {"device": "cuda", "dtype": "bfloat16", "max_running": max(in_flight), "max_model_len": 1024}
            | {"max_queued": 100_000, "exactness": "fast"}
            | changes
        )
        async with random_engine(shape, config) as engine:
            for rows in in_flight:
                lengths = [(512, 256)] * rows
                # The first warms up.
                runs = [await in_process(engine, _jobs(lengths, shape.vocab, rng), rows) for _ in range(3)][1:]
                found.setdefault(kind, {})[rows] = statistics.median(run.tokens_per_s for run in runs)
        print_status(f"  {name}, {kind}: {found[kind]} tokens/s; {engine.parts.choices}")
    return [
        _figure(f"{name}_{kind}_{rows}", found[kind][rows], found["fast"][rows], "tokens/s", floor=None)
        for kind in EIGHT_BITS
        for rows in in_flight
        if kind != "fast"
    ]


PUBLIC_8B = {"SGLang": 16_215, "LMDeploy": 16_132, "vLLM with FlashInfer": 12_553}
"""Output tokens per second of Llama 3.1 8B in bfloat16 on an H100 of 80 GB, 1,000 ShareGPT prompts at once. From
https://research.aimultiple.com/inference-engines, read in November 2026; not measured here."""


async def conversations_8b(*, rounds: int = 3) -> list[Figure]:
    """1,000 requests at once with the mean lengths of ShareGPT, 220 and 200 tokens, exponentially distributed; random weights."""
    rng = random.Random(0)

    def length(mean: int) -> int:
        return min(1024, max(4, int(rng.expovariate(1 / mean))))

    lengths = [(length(220), length(200)) for _ in range(1000)]
    config = InferenceConfig(
        device="cuda", dtype="bfloat16", max_running=len(lengths), max_model_len=2048, max_queued=100_000
    )
    async with random_engine(LLAMA_8B, config) as engine:
        # The first warms up.
        runs = [await in_process(engine, _jobs(lengths, LLAMA_8B.vocab, rng), 1000) for _ in range(1 + rounds)][1:]
    print_status(
        f"  8B, 1,000 at once: {[f'{run.tokens_per_s:,.0f}' for run in runs]} tokens/s; public figures on an H100: {PUBLIC_8B}"
    )
    ours = statistics.median(run.tokens_per_s for run in runs)
    return [_figure("conversations_8B", ours, PUBLIC_8B["vLLM with FlashInfer"], "tokens/s", floor=None)]


def _figure(name: str, ours: float, peer: float, unit: str, *, floor: float | None) -> Figure:
    return Figure(name=name, ours=ours, peer=peer, unit=unit, ratio=ours / peer, floor=floor)
