"""Adapters, prefix reuse and alternatives on a GPU: `python -m benchmarks.engine.gpu_checks [--device cpu --small]`.

A random-weight model of SmolLM2-135M's shape, made on the spot. Each part compares with a plain forward of the Hugging Face module,
then says what it costs. Captured steps keep addresses: weights are written in place, which is what is checked first. A part that
fails says so and the others go on; the last line is JSON.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.engine.loop import in_process, requests
from benchmarks.engine.models import SMALL, SMOLLM2_135M, Shape, build, make_model_dir, opened, publish
from benchmarks.engine.turns import Episodes, prefix_reuse
from benchmarks.report import Figure, machine, tell
from rollbook.contracts.adapter import Adapter
from rollbook.contracts.policy import Completion, Publication, PublicationId, SamplingParams
from rollbook.contracts.weights import weights_digest
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import TransformersEngine
from rollbook.inference.engines.embedded.scheduler import RoundResults
from rollbook.inference.weights.safetensors import read_weights

RANK = 16
PROJECTIONS: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PROJECTIONS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    root: Path
    device: str
    dtype: str
    shape: Shape
    is_small: bool

    @property
    def model_dir(self) -> Path:
        return self.root / "model"

    def config(self, **changes: Any) -> InferenceConfig:
        rows = 32 if self.is_small else 512
        given = {"device": self.device, "dtype": self.dtype, "max_running": rows, "max_queued": 100_000}
        return InferenceConfig.model_validate({**given, "max_model_len": 1024 if self.is_small else 4096, **changes})


def adapter_tensors(model: Any, *, seed: int) -> dict[str, Tensor]:
    """Both halves far from zero, for every projection."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for name, part in model.named_modules():
        if name.endswith(PROJECTIONS):
            out, into = part.weight.shape
            found[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, into, generator=random) * 0.05
            found[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, RANK, generator=random) * 0.05
    return found


def publish_adapter(place: Place, model: Any, number: int) -> tuple[Publication, Path, Adapter]:
    path = place.root / f"adapter-{number}.safetensors"
    save_file(adapter_tensors(model, seed=number), path)
    digest = weights_digest(read_weights(path).values())
    publication = Publication(id=PublicationId(number), epoch=1, step=number, digest=digest)
    return publication, path, Adapter(name=f"policy-v{number}", settings={"r": RANK, "lora_alpha": 2 * RANK})


def merged(place: Place, number: int) -> Any:
    """The module with the adapter added, in float32 on the same device: what the engine should sample from."""
    model = build(place.shape)
    tensors = adapter_tensors(model, seed=number)
    with torch.no_grad():
        for name, part in model.named_modules():
            if name.endswith(PROJECTIONS):
                a, b = (tensors[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
                part.weight += (b @ a) * 2.0
    return model.to(place.device)


def deviation(model: Any, prompt: list[int], completion: Completion) -> tuple[float, float]:
    """Largest and mean difference to the logprobs of a plain forward."""
    tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device=next(model.parameters()).device)
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[0].float(), dim=-1)
    expected = logprobs[len(prompt) - 1 : -1].gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu()
    off = (expected - torch.from_numpy(completion.logprobs)).abs()
    return float(off.max()), float(off.mean())


async def adapters(place: Place) -> dict[str, Any]:
    model = build(place.shape)
    told: dict[str, Any] = {}
    exact = replace(place, dtype="float32")
    async with opened(exact.config(max_running=32), place.model_dir, _published(place, model)) as engine:
        told["ways"] = engine.parts.choices
        prompt = requests(1, prompt=64, shortest=8, longest=8, vocab=place.shape.vocab)[0].prompt
        for number in (2, 3, 2 + 2):
            await engine.load_weights(*_split(publish_adapter(place, model, number)), adapter=_adapter(number))
            answers = await asyncio.gather(
                *(engine.generate(prompt, SamplingParams(max_tokens=64, seed=seed)) for seed in range(16))
            )
            reference = merged(place, number)
            told[f"adapter_{number}_float32_max"] = max(deviation(reference, prompt, one)[0] for one in answers)
            told["digest_ok"] = await engine.weights_digest() == engine.publication.digest  # type: ignore[union-attr]
    async with opened(place.config(publish="adapter"), place.model_dir, _published(place, model)) as engine:
        told |= await _update_in_flight(place, engine, model)
    return told


async def _update_in_flight(place: Place, engine: TransformersEngine, model: Any) -> dict[str, Any]:
    """Adapters arrive while all rows decode: how long is decoding held up where one is swapped in, and while it is staged?"""
    rows, length = (16, 200) if place.is_small else (512, 600)
    asked = requests(rows, prompt=32, shortest=length, longest=length, vocab=place.shape.vocab)
    offered = [publish_adapter(place, model, number) for number in (10, 11, 12)]
    marks: list[tuple[float, int]] = []
    scheduler = engine.parts.scheduler
    launch = scheduler.round

    def marked(publication: int, results: RoundResults) -> None:
        launch(publication, results)
        marks.append((time.perf_counter(), publication))

    scheduler.round = marked  # type: ignore[method-assign]
    answers = [engine.submit(one.prompt, SamplingParams(max_tokens=one.max_tokens)) for one in asked]
    while len(marks) < length // 4:  # noqa: ASYNC110  # steps of another thread have no event to wait for
        await asyncio.sleep(0.001)
    spans = []
    for publication, path, adapter in offered:
        began = time.perf_counter()
        await engine.load_weights(publication, path, adapter=adapter)
        spans.append((began, time.perf_counter()))
    await asyncio.gather(*answers)
    scheduler.round = launch  # type: ignore[method-assign]
    gaps = [(after, after - before) for (before, _), (after, _) in itertools.pairwise(marks)]
    calm = [gap for at, gap in gaps[10:-10] if not any(began <= at <= ended for began, ended in spans)]
    steady = statistics.median(calm or [gap for _, gap in gaps])
    changes = [at for at in range(1, len(marks)) if marks[at][1] != marks[at - 1][1]]
    around = [[gap for _, gap in gaps[max(0, at - 2) : at + 4]] for at in changes]
    staged = [[gap for at, gap in gaps if began <= at <= ended] for began, ended in spans]
    return {
        "update_ms": [round((ended - began) * 1e3, 2) for began, ended in spans],
        "step_ms": round(steady * 1e3, 3),
        "pause_steps_at_the_swap": [round((sum(some) - len(some) * steady) / steady, 2) for some in around],
        "longest_step_while_staging": [round(max(some, default=0.0) / steady, 2) for some in staged],
    }


async def prefixes(place: Place) -> dict[str, Any]:
    model = build(place.shape)
    weights = _published(place, model)
    told: dict[str, Any] = {}
    small = Episodes(count=16, at_once=8, turns=3, system=64, vocab=place.shape.vocab)
    large = Episodes(count=256, at_once=128, turns=6, system=1024, said=32, seen=128, vocab=place.shape.vocab)
    episodes = small if place.is_small else large
    exact = replace(place, dtype="float32").config(max_running=64, prefix_cache_least=64)
    async with opened(exact, place.model_dir, weights) as engine:
        prompt = requests(1, prompt=200, shortest=8, longest=8, vocab=place.shape.vocab)[0].prompt
        off, cached = [], []
        for turn in range(4):
            completion = await engine.generate(prompt, SamplingParams(max_tokens=32, seed=turn))
            off.append(deviation(model.to(place.device), prompt, completion)[0])
            cached.append(completion.cached_tokens)
            prompt = [*prompt, *completion.token_ids.tolist(), 5, 6, 7]
        told["float32_max"], told["cached"] = max(off), cached
    figure, on, plain = await prefix_reuse(
        place.model_dir,
        weights,
        rounds=2,
        episodes=episodes,
        # As few as are worth it on a CPU: what is measured is what it costs here.
        config=place.config(max_running=episodes.at_once, prefix_cache_least=32),
    )
    told["wall_s_on_off"] = [[round(a.wall_s, 3), round(b.wall_s, 3)] for a, b in zip(on, plain, strict=True)]
    told["ratio_wall"] = figure.more["ratio_of_wall_seconds"]
    told["cached_share"] = figure.more["cached_share"]
    return told


async def single_turns(place: Place) -> dict[str, Any]:
    """What keeping costs where nothing is ever reused; and what alternatives cost."""
    model = build(place.shape)
    count, flying = (64, 16) if place.is_small else (2048, 512)
    asked = requests(count, prompt=128, shortest=32, longest=256, vocab=place.shape.vocab)
    rates: dict[str, list[float]] = {"on": [], "off": [], "on_any_length": []}
    changes: dict[str, dict[str, Any]] = {
        "on": {},
        "off": {"prefix_cache_share": 0.0},
        "on_any_length": {"prefix_cache_least": 32},
    }
    for _ in range(2):
        for name, change in changes.items():
            async with opened(place.config(**change), place.model_dir, _published(place, model)) as engine:
                await in_process(engine, asked[:flying], flying)
                rates[name].append(round((await in_process(engine, asked, flying)).tokens_per_s))
    told: dict[str, Any] = {"tokens_per_s": rates}
    async with opened(place.config(), place.model_dir, _published(place, model)) as engine:
        for tops in (0, 5, 0, 5):
            began = time.perf_counter()
            sampling = SamplingParams(max_tokens=64, top_logprobs=tops)
            answers = await asyncio.gather(*(engine.generate(one.prompt, sampling) for one in asked[:flying]))
            rate = sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - began)
            told.setdefault(f"tops_{tops}_tokens_per_s", []).append(round(rate))
        told["tops_are_ordered"] = all(
            bool((answer.tops.logprobs[:, :-1] >= answer.tops.logprobs[:, 1:]).all())
            for answer in answers
            if answer.tops
        )
    return told


def _published(place: Place, model: Any) -> tuple[Publication, Path]:
    path = place.root / "weights.safetensors"
    return publish(path, model, 1), path


def _split(offered: tuple[Publication, Path, Adapter]) -> tuple[Publication, Path]:
    return offered[0], offered[1]


def _adapter(number: int) -> Adapter:
    return Adapter(name=f"policy-v{number}", settings={"r": RANK, "lora_alpha": 2 * RANK})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model and few requests, to try the script itself")
    options = parser.parse_args()
    parts: dict[str, Callable[[Place], Awaitable[dict[str, Any]]]] = {
        "adapters": adapters,
        "prefixes": prefixes,
        "single_turns": single_turns,
    }
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(
            root=Path(scratch),
            device=options.device,
            dtype="bfloat16" if options.device == "cuda" else "float32",
            shape=SMALL if options.small else SMOLLM2_135M,
            is_small=options.small,
        )
        make_model_dir(place.model_dir, place.shape)
        for name, part in parts.items():
            began = time.perf_counter()
            try:
                told[name] = asyncio.run(_awaited(part, place))
            except Exception as error:  # the next part may still have something to say
                traceback.print_exc()
                told[name] = {"failed": f"{type(error).__name__}: {error}"}
            tell(f"{name} ({time.perf_counter() - began:.0f} s): {json.dumps(told[name], indent=1, default=str)}")
    checks = _checks(told)
    rows = [
        {"name": f.name, "ours": f.ours, "peer": f.peer, "ratio": f.ratio, "floor": f.floor, "ok": f.ok} for f in checks
    ]
    print(json.dumps({"figures": rows, "machine": machine(), "told": told}, default=str), flush=True)
    return 0 if all(figure.ok for figure in checks) and not any("failed" in one for one in told.values()) else 1


async def _awaited(part: Callable[[Place], Awaitable[dict[str, Any]]], place: Place) -> dict[str, Any]:
    return await part(place)


def _checks(told: dict[str, Any]) -> list[Figure]:
    """Small differences are good ones: the ratio is what is allowed over what was found."""
    found = {
        "adapter_logprobs_float32": max(
            (v for k, v in told["adapters"].items() if k.endswith("float32_max")), default=float("nan")
        ),
        "prefix_logprobs_float32": told["prefixes"].get("float32_max", float("nan")),
    }
    return [
        Figure(name=name, ours=off, peer=1e-3, unit="nats", ratio=1e-3 / max(off, 1e-9), floor=1.0)
        for name, off in found.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
