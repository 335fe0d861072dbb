"""Checks of an engine on a GPU: `python -m benchmarks.engine.gpu_checks [--tiny]`.

Adapters, a shared base, prefix reuse, top logprobs, and 8 bits for keys and values or for products.

A random-weight model of SmolLM2-135M's shape. Each part compares with a plain forward of the Hugging Face module and measures the
cost. Captured graphs hold addresses, so weights must be replaced in setup; this is checked first. If one part fails, the others
still run. The last line is JSON.
"""

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.engine.loop import in_process, requests
from benchmarks.engine.models import SMALL, SMOLLM2_135M, Shape, build, make_model_dir, opened, publish
from benchmarks.engine.turns import Episodes, prefix_reuse
from benchmarks.engine.workloads import EIGHT_BITS
from benchmarks.report import Figure, machine, print_status
from rollbook.contracts.policy import Completion, Publication, PublicationId, SamplingParams
from rollbook.contracts.weights import Adapter, weights_digest
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import BASE_MODEL
from rollbook.inference.engines.embedded.engine import TransformersEngine, open_engine
from rollbook.inference.engines.embedded.scheduler import RoundResults
from rollbook.inference.weights.safetensors import read_weights
from rollbook.trainer.model.frozen_base import own_base

RANK = 16
SCORE_SCALE, LOGIT_SCALE = 3.0, 10.0
BYTE_MEAN = 0.6
"""Largest accepted mean difference of logprobs, in nats: sharpened random weights have half of it, a wrong kernel several nats."""
PROJECTIONS: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PROJECTIONS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    root: Path
    device: str
    dtype: str
    shape: Shape
    is_small: bool
    trained: Path | None
    """A model with weights, for the parts that take one."""

    @property
    def model_dir(self) -> Path:
        return self.root / "model"

    def config(self, **changes: Any) -> InferenceConfig:
        rows = 32 if self.is_small else 512
        defaults = {"device": self.device, "dtype": self.dtype, "max_running": rows, "max_queued": 100_000}
        return InferenceConfig.model_validate({**defaults, "max_model_len": 1024 if self.is_small else 4096, **changes})


def adapter_tensors(model: Any, *, seed: int) -> dict[str, Tensor]:
    """Both factors far from zero, for every projection."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for name, part in model.named_modules():
        if name.endswith(PROJECTIONS):
            rows, columns = part.weight.shape
            found[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=random) * 0.05
            found[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=random) * 0.05
    return found


def publish_adapter(setup: Setup, model: Any, number: int) -> tuple[Publication, Path, Adapter]:
    path = setup.root / f"adapter-{number}.safetensors"
    save_file(adapter_tensors(model, seed=number), path)
    digest = weights_digest(read_weights(path).values())
    publication = Publication(id=PublicationId(number), epoch=1, step=number, digest=digest)
    return publication, path, Adapter(name=f"policy-v{number}", settings={"r": RANK, "lora_alpha": 2 * RANK})


def merged(setup: Setup, number: int) -> Any:
    """The module with the adapter merged, in float32 on the same device: the reference for the engine."""
    model = build(setup.shape)
    tensors = adapter_tensors(model, seed=number)
    with torch.no_grad():
        for name, part in model.named_modules():
            if name.endswith(PROJECTIONS):
                a, b = (tensors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
                part.weight += (b @ a) * 2.0
    return model.to(setup.device)


def deviation(model: Any, prompt: list[int], completion: Completion) -> tuple[float, float]:
    """Largest and mean difference to the logprobs of a plain forward."""
    tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device=next(model.parameters()).device)
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[0].float(), dim=-1)
    expected = logprobs[len(prompt) - 1 : -1].gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu()
    error = (expected - torch.from_numpy(completion.logprobs)).abs()
    return float(error.max()), float(error.mean())


async def adapters(setup: Setup) -> dict[str, Any]:
    model = build(setup.shape)
    found: dict[str, Any] = {}
    exact = replace(setup, dtype="float32")
    async with opened(exact.config(max_running=32), setup.model_dir, _published(setup, model)) as engine:
        found["ways"] = engine.parts.choices
        prompt = requests(1, prompt=64, shortest=8, longest=8, vocab=setup.shape.vocab)[0].prompt
        for number in (2, 3, 2 + 2):
            await engine.load_weights(*_split(publish_adapter(setup, model, number)), adapter=_adapter(number))
            completions = await asyncio.gather(
                *(engine.generate(prompt, SamplingParams(max_tokens=64, seed=seed)) for seed in range(16))
            )
            reference = merged(setup, number)
            found[f"adapter_{number}_float32_max"] = max(deviation(reference, prompt, one)[0] for one in completions)
            found["digest_ok"] = await engine.weights_digest() == engine.publication.digest  # type: ignore[union-attr]
    async with opened(setup.config(publish="adapter"), setup.model_dir, _published(setup, model)) as engine:
        # The first adapter allocates the buffers, and the steps are captured.
        await engine.load_weights(*_split(publish_adapter(setup, model, 9)), adapter=_adapter(9))
        found |= await _update_in_flight(setup, engine, model)
        found["tokens_per_s"] = await _rates(setup, engine, model)
    return found


async def _update_in_flight(setup: Setup, engine: TransformersEngine, model: Any) -> dict[str, Any]:
    """Load adapters while all rows decode, and measure the delay at the swap and during staging."""
    rows, length = (16, 200) if setup.is_small else (512, 600)
    jobs = requests(rows, prompt=32, shortest=length, longest=length, vocab=setup.shape.vocab)
    offered = [publish_adapter(setup, model, number) for number in (10, 11, 12)]
    launches: list[tuple[float, int]] = []
    scheduler = engine.parts.scheduler
    launch = scheduler.round

    def timed_round(publication: int, results: RoundResults) -> None:
        launch(publication, results)
        launches.append((time.perf_counter(), publication))

    scheduler.round = timed_round  # type: ignore[method-assign]
    futures = [engine.submit(one.prompt, SamplingParams(max_tokens=one.max_tokens)) for one in jobs]
    while len(launches) < length // 4:  # noqa: ASYNC110  # steps of another thread have no event to wait for
        await asyncio.sleep(0.001)
    spans = []
    for publication, path, adapter in offered:
        started = time.perf_counter()
        await engine.load_weights(publication, path, adapter=adapter)
        spans.append((started, time.perf_counter()))
    await asyncio.gather(*futures)
    scheduler.round = launch  # type: ignore[method-assign]
    gaps = [(after, after - before) for (before, _), (after, _) in itertools.pairwise(launches)]
    calm = [gap for at, gap in gaps[10:-10] if not any(started <= at <= ended for started, ended in spans)]
    steady = statistics.median(calm or [gap for _, gap in gaps])
    changes = [at for at in range(1, len(launches)) if launches[at][1] != launches[at - 1][1]]
    around = [[gap for _, gap in gaps[max(0, at - 2) : at + 4]] for at in changes]
    staged = [[gap for at, gap in gaps if started <= at <= ended] for started, ended in spans]
    return {
        "update_ms": [round((ended - started) * 1e3, 2) for started, ended in spans],
        "step_ms": round(steady * 1e3, 3),
        "pause_steps_at_the_swap": [round((sum(some) - len(some) * steady) / steady, 2) for some in around],
        "longest_step_while_staging": [round(max(some, default=0.0) / steady, 2) for some in staged],
    }


async def _rates(setup: Setup, engine: TransformersEngine, model: Any) -> dict[str, list[int]]:
    """Decoding speed with the base alone, with the policy's adapter, and with two adapters in each step."""
    count, length = (16, 32) if setup.is_small else (512, 256)
    jobs = requests(count, prompt=128, shortest=length, longest=length, vocab=setup.shape.vocab)
    await engine.load_adapter(_adapter(20), read_weights(publish_adapter(setup, model, 20)[1]))
    names: dict[str, list[str | None]] = {"base": [BASE_MODEL], "policy": [None], "two": [None, _adapter(20).name]}
    rates: dict[str, list[int]] = {name: [] for name in names}
    for number in range(3):
        for kind, adapters_in_use in names.items():
            started = time.perf_counter()
            completions = await asyncio.gather(
                *(
                    engine.generate(
                        job.prompt,
                        SamplingParams(max_tokens=job.max_tokens),
                        adapter=adapters_in_use[at % len(adapters_in_use)],
                    )
                    for at, job in enumerate(jobs)
                )
            )
            tokens = sum(len(completion.token_ids) for completion in completions)
            # The first round captures steps.
            if number:
                rates[kind].append(round(tokens / (time.perf_counter() - started)))
    return rates


async def prefixes(setup: Setup) -> dict[str, Any]:
    model = build(setup.shape)
    weights = _published(setup, model)
    found: dict[str, Any] = {}
    small = Episodes(count=16, in_flight=8, turns=3, system=64, vocab=setup.shape.vocab)
    large = Episodes(
        count=256, in_flight=128, turns=6, system=1024, turn_tokens=32, observation_tokens=128, vocab=setup.shape.vocab
    )
    episodes = small if setup.is_small else large
    exact = replace(setup, dtype="float32").config(max_running=64, prefix_cache_least=64)
    async with opened(exact, setup.model_dir, weights) as engine:
        prompt = requests(1, prompt=200, shortest=8, longest=8, vocab=setup.shape.vocab)[0].prompt
        errors, cached = [], []
        for turn in range(4):
            completion = await engine.generate(prompt, SamplingParams(max_tokens=32, seed=turn))
            errors.append(deviation(model.to(setup.device), prompt, completion)[0])
            cached.append(completion.cached_tokens)
            prompt = [*prompt, *completion.token_ids.tolist(), 5, 6, 7]
        found["float32_max"], found["cached"] = max(errors), cached
    figure, on, plain = await prefix_reuse(
        setup.model_dir,
        weights,
        rounds=2,
        episodes=episodes,
        # The minimum length of a CPU, to measure the cost on this device.
        config=setup.config(max_running=episodes.in_flight, prefix_cache_least=32),
    )
    found["wall_s_on_off"] = [[round(a.wall_s, 3), round(b.wall_s, 3)] for a, b in zip(on, plain, strict=True)]
    found["ratio_wall"] = figure.more["ratio_of_wall_seconds"]
    found["cached_share"] = figure.more["cached_share"]
    return found


async def single_turns(setup: Setup) -> dict[str, Any]:
    """The cost of the prefix cache without any reuse, and the cost of top logprobs."""
    model = build(setup.shape)
    count, in_flight = (64, 16) if setup.is_small else (2048, 512)
    jobs = requests(count, prompt=128, shortest=32, longest=256, vocab=setup.shape.vocab)
    rates: dict[str, list[float]] = {"on": [], "off": [], "on_any_length": []}
    changes: dict[str, dict[str, Any]] = {
        "on": {},
        "off": {"prefix_cache_share": 0.0},
        "on_any_length": {"prefix_cache_least": 32},
    }
    for _ in range(2):
        for name, change in changes.items():
            async with opened(setup.config(**change), setup.model_dir, _published(setup, model)) as engine:
                await in_process(engine, jobs[:in_flight], in_flight)
                rates[name].append(round((await in_process(engine, jobs, in_flight)).tokens_per_s))
    found: dict[str, Any] = {"tokens_per_s": rates}
    async with opened(setup.config(), setup.model_dir, _published(setup, model)) as engine:
        for tops in (0, 5, 0, 5):
            started = time.perf_counter()
            sampling = SamplingParams(max_tokens=64, top_logprobs=tops)
            completions = await asyncio.gather(*(engine.generate(one.prompt, sampling) for one in jobs[:in_flight]))
            rate = sum(len(completion.token_ids) for completion in completions) / (time.perf_counter() - started)
            found.setdefault(f"tops_{tops}_tokens_per_s", []).append(round(rate))
        found["tops_are_ordered"] = all(
            bool((completion.tops.logprobs[:, :-1] >= completion.tops.logprobs[:, 1:]).all())
            for completion in completions
            if completion.tops
        )
    return found


async def eight_bits(setup: Setup) -> dict[str, Any]:
    """Keys and values, or products, in the model's dtype and with 8 bits: differences of logprobs from a plain forward in float32,
    bytes, and speed. `--model`: of a trained model, which continues a few random tokens. Random weights have almost uniform
    attention and logits, so these are sharpened."""
    if setup.trained is None:
        model = build(setup.shape)
        with torch.no_grad():
            model.model.norm.weight.mul_(LOGIT_SCALE)
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(SCORE_SCALE)
                layer.self_attn.k_proj.weight.mul_(SCORE_SCALE)
    else:
        model = AutoModelForCausalLM.from_pretrained(setup.trained, dtype=torch.float32)
    weights = _published(setup, model)
    count, length = (16, 32) if setup.is_small else (512, 256)
    prompt = 128 if setup.trained is None else 4
    jobs = requests(count, prompt=prompt, shortest=length, longest=length, vocab=model.config.vocab_size)
    model = model.to(setup.device)
    found: dict[str, Any] = {}
    for kind, changes in EIGHT_BITS.items():
        config = setup.config(
            exactness="fast", kv_memory_mb=20 if setup.is_small and setup.trained is None else 4000, **changes
        )
        rates: list[int] = []
        async with opened(config, setup.trained or setup.model_dir, weights) as engine:
            for _ in range(3):
                started = time.perf_counter()
                completions = await asyncio.gather(
                    *(
                        engine.generate(job.prompt, SamplingParams(max_tokens=length, seed=seed))
                        for seed, job in enumerate(jobs)
                    )
                )
                rates.append(round(count * length / (time.perf_counter() - started)))
            errors = [deviation(model, job.prompt, one) for job, one in zip(jobs[:32], completions, strict=False)]
            found[kind] = {
                "ways": engine.parts.choices,
                "bytes_per_token": engine.parts.model.bytes_per_row()[0],
                "max": max(largest for largest, _ in errors),
                "mean": statistics.fmean(mean for _, mean in errors),
                "tokens_per_s": rates[1:],
            }
    return found


async def shared_base(setup: Setup) -> dict[str, Any]:
    """An engine on the base of another process, and on its own: equal bits, memory, and what a publication delays."""
    model, file = build(setup.shape), setup.root / "base.json"
    found: dict[str, Any] = {}
    with owned_base(setup, file) as owner:
        for name, base in (("own", None), ("shared", file)):
            before = _allocated_bytes(setup)
            async with open_engine(setup.config(publish="adapter"), setup.model_dir, shared_base=base) as engine:
                found[f"{name}_bytes"] = _allocated_bytes(setup) - before
                await engine.adopt(Publication(id=PublicationId(1), epoch=1, step=0, digest=""))
                await engine.load_weights(*_split(publish_adapter(setup, model, 9)), adapter=_adapter(9))
                jobs = requests(16, prompt=64, shortest=8, longest=8, vocab=setup.shape.vocab)
                completions = [
                    await engine.generate(job.prompt, SamplingParams(max_tokens=32, seed=seed))
                    for seed, job in enumerate(jobs)
                ]
                found[f"{name}_bits"] = hash(tuple(one.logprobs.tobytes() for one in completions))
                found[name] = await _update_in_flight(setup, engine, model)
            gc.collect()
        output, _ = owner.communicate("stop\n", timeout=60)
    found["is_unchanged"] = owner.returncode == 0 and "unchanged" in output
    found["equal_bits"] = found.pop("own_bits") == found.pop("shared_bits")
    return found


@contextmanager
def owned_base(setup: Setup, file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the base until it reads a line."""
    command = [sys.executable, "-m", "benchmarks.engine.gpu_checks", "--device", setup.device]
    command += ["--own", str(setup.model_dir), setup.dtype, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            if owner.stdout.readline() != "ready\n":
                raise RuntimeError(f"the owner of the base ended with {owner.wait()}")
            yield owner
        finally:
            owner.kill()


def own(model_dir: Path, dtype: str, device: str, file: Path) -> int:
    base, digest = own_base(model_dir, dtype=dtype, device=device)
    base.offer(file, digest=digest)
    print("ready", flush=True)
    sys.stdin.readline()
    base.check()
    print("unchanged", flush=True)
    return 0


def _allocated_bytes(setup: Setup) -> int:
    return torch.cuda.memory_allocated() if setup.device == "cuda" else 0


def _published(setup: Setup, model: Any) -> tuple[Publication, Path]:
    path = setup.root / "weights.safetensors"
    return publish(path, model, 1), path


def _split(offered: tuple[Publication, Path, Adapter]) -> tuple[Publication, Path]:
    return offered[0], offered[1]


def _adapter(number: int) -> Adapter:
    return Adapter(name=f"policy-v{number}", settings={"r": RANK, "lora_alpha": 2 * RANK})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--tiny", action="store_true", help="the same on a CPU, to test the script")
    parser.add_argument("--parts", nargs="+", help="only these parts")
    parser.add_argument(
        "--model", type=Path, help="directory of a trained model for eight_bits, instead of random weights"
    )
    parser.add_argument("--own", nargs=3, metavar=("MODEL", "DTYPE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.device, options.small = "cpu", True
    if options.own is not None:
        model_dir, dtype, file = options.own
        return own(Path(model_dir), dtype, options.device, Path(file))
    parts: dict[str, Callable[[Setup], Awaitable[dict[str, Any]]]] = {
        "adapters": adapters,
        "shared_base": shared_base,
        "prefixes": prefixes,
        "single_turns": single_turns,
        "eight_bits": eight_bits,
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        setup = Setup(
            root=Path(scratch),
            device=options.device,
            dtype="bfloat16" if options.device == "cuda" else "float32",
            shape=SMALL if options.small else SMOLLM2_135M,
            is_small=options.small,
            trained=options.model,
        )
        make_model_dir(setup.model_dir, setup.shape)
        for name, part in parts.items():
            if name not in (options.parts or parts):
                continue
            started = time.perf_counter()
            try:
                found[name] = asyncio.run(_awaited(part, setup))
            except Exception as error:  # The other parts still run.
                traceback.print_exc()
                found[name] = {"failed": f"{type(error).__name__}: {error}"}
            print_status(
                f"{name} ({time.perf_counter() - started:.0f} s): {json.dumps(found[name], indent=1, default=str)}"
            )
    checks = _checks(found)
    rows = [
        {"name": f.name, "ours": f.ours, "peer": f.peer, "ratio": f.ratio, "floor": f.floor, "ok": f.ok} for f in checks
    ]
    print(json.dumps({"figures": rows, "machine": machine(), "checks": found}, default=str), flush=True)
    has_failed = any("failed" in one or one.get("equal_bits") is False for one in found.values())
    return 0 if all(figure.ok for figure in checks) and not has_failed else 1


async def _awaited(part: Callable[[Setup], Awaitable[dict[str, Any]]], setup: Setup) -> dict[str, Any]:
    return await part(setup)


def _checks(found: dict[str, Any]) -> list[Figure]:
    """The ratio is the allowed difference divided by the measured one."""
    errors = {}
    if "adapters" in found:
        measured = [v for k, v in found["adapters"].items() if k.endswith("float32_max")]
        errors["adapter_logprobs_float32"] = max(measured, default=float("nan"))
    if "prefixes" in found:
        errors["prefix_logprobs_float32"] = found["prefixes"].get("float32_max", float("nan"))
    measured_bytes = found.get("eight_bits", {})
    means = {f"{kind}_logprobs_mean": one["mean"] for kind, one in measured_bytes.items() if kind in EIGHT_BITS}
    errors |= means
    figures = [
        Figure(name=name, ours=error, peer=most, unit="nats", ratio=most / max(error, 1e-9), floor=1.0)
        for name, error in errors.items()
        for most in [BYTE_MEAN if name in means else 1e-3]
    ]
    if "shared_base" in found:
        checked = ("is_unchanged", "equal_bits")
        good = sum(found["shared_base"].get(name) is True for name in checked)
        figures.append(
            Figure(name="shared_base", ours=good, peer=2, unit="checks", ratio=good / len(checked), floor=1.0)
        )
    return figures


if __name__ == "__main__":
    sys.exit(main())
