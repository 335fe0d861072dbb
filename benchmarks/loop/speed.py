"""The whole loop against its parts: how much of the engine's speed and of the trainer's speed does `rollbook train` keep?

    python -m benchmarks.loop.speed --device cuda            135M and 1.5B models with random weights, engine and trainer on one GPU
    python -m benchmarks.loop.speed --cases cpu              the same script with a small model
    python -m benchmarks.loop.speed --cases scripted         the work of 135m-single without a model: CPU seconds a step, by process
    python -m benchmarks.loop.speed --device cuda --cases 135m-single --seconds 100

`loop_share_of_engine`: tokens sampled a second by `rollbook train` over those of the engine in this process, which plays the same
episodes in a closed loop. `step_to_step_mfu`: model FLOPs of a step over the time from one step to the next, everything included.
The trainer computes a shared prompt once; `mfu_with_each_prompt` counts it for every sample, as without shared prompts.
`training_share_of_cpu`: CPU seconds of the training step over those of all processes, per step.
Figures are printed as soon as they are known. `--seconds` stops each run early enough that a case takes about that long.
"""

import argparse
import asyncio
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.engine.models import QWEN_1_5B, SMALL, SMOLLM2_135M, TINY, Shape, build, opened, publish
from benchmarks.learning.runs import Stop, train
from benchmarks.loop.startup import cpu_by_process
from benchmarks.loop.token_rollout import tasks
from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.policy import SamplingParams
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import TransformersEngine
from rollbook.trainer.model.flops import peak_flops
from rollbook.trainer.model.model_directory import build_tokenizer
from rollbook.trainer.model_config import ModelBuildConfig

FLOOR_SHARE = 0.5
FLOOR_MFU = 0.33
WARM_UP_STEPS = 4
ENGINE_ALONE_S = 45.0
"""Of `--seconds`, kept for the engine alone: it is opened, warmed up and measured after the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shape: Shape
    groups: int
    """Groups of 8 episodes a step."""
    steps: int
    turns: int = 1
    prompt: int = 64
    shortest: int = 16
    longest: int = 48
    observation: int = 0
    checkpoint_every: int = 10
    engine: str = "transformers"
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_len(self) -> int:
        return self.prompt + self.turns * (self.longest + self.observation)

    @property
    def kv_memory_mb(self) -> int:
        """Keys and values (bfloat16) of all episodes in flight at their longest, and a quarter more."""
        shape = self.shape
        bytes_per_token = 2 * 2 * shape.layers * shape.kv_heads * shape.hidden // shape.heads
        return max(2_000, round(1.25e-6 * 16 * self.groups * self.max_len * bytes_per_token))

    @property
    def workload(self) -> dict[str, int]:
        return {
            "vocabulary": self.shape.vocab,
            "prompt": self.prompt,
            "turns": self.turns,
            "shortest": self.shortest,
            "longest": self.longest,
            "observation": self.observation,
        }


CASES = {
    "cpu": Case(shape=SMALL, groups=4, steps=8),
    "scripted": Case(shape=TINY, groups=64, steps=30, engine="scripted"),
    "135m-single": Case(shape=SMOLLM2_135M, groups=64, steps=30),
    "135m-turns": Case(shape=SMOLLM2_135M, groups=64, steps=10, turns=6, prompt=200, observation=60),
    "1.5b-single": Case(shape=QWEN_1_5B, groups=64, steps=14, checkpoint_every=100),
    "1.5b-long": Case(shape=QWEN_1_5B, groups=16, steps=14, prompt=128, shortest=60, longest=300, checkpoint_every=10),
}


def config_table(case: Case, model: Path, *, device: str, bound: int) -> dict[str, Any]:
    is_gpu = device == "cuda"
    return {
        "run": {"name": "loop", "seed": 0},
        "model": {"path": str(model)},
        "tasks": {"source": "token_rollout:tasks", "args": {"count": 4096, **case.workload}},
        "rollout": {
            "function": "token_rollout",
            "completions_per_prompt": 8,
            "drop_constant_reward": False,
            "max_total_tokens": case.max_len + 8,
            "max_seconds": 120.0,
            "workers": 8 if is_gpu else 1,
            "groups_per_worker": case.groups,
            "sampling": {"max_tokens": case.longest},
        },
        "gate": {
            "groups_per_step": case.groups,
            "max_groups_in_flight": (bound + 1) * case.groups,
            "max_head_offpolicy_versions": bound,
        },
        "ledger": {"durability": "process_crash"},
        "inference": inference_settings(case, device=device),
        "trainer": {
            "max_steps": case.steps,
            "lr": 1e-7,
            "device": device,
            "compute_dtype": "bfloat16" if is_gpu else "float32",
            "threads": 4 if is_gpu else 1,
            "pass_cost_tokens": 8192 if is_gpu else 192,
            "checkpoint_every": case.checkpoint_every,
            "keep_checkpoints": 1,
            **case.trainer,
        },
    }


def inference_settings(case: Case, *, device: str) -> dict[str, Any]:
    is_gpu = device == "cuda"
    if case.engine == "scripted":
        return {"engine": "scripted", "scripted": {"vocab_size": case.shape.vocab}, "max_running": 1024}
    return {
        "device": device,
        "dtype": "bfloat16" if is_gpu else "float32",
        "max_running": 1024 if is_gpu else 64,
        "max_model_len": case.max_len + 8,
        **({"kv_memory_mb": case.kv_memory_mb, "max_connections": 512} if is_gpu else {}),
    }


async def engine_alone(case: Case, model_dir: Path, weights: Any, *, device: str) -> float:
    """Sampled tokens a second of the engine in this process, with as many episodes in flight as the run has."""
    config = InferenceConfig(**inference_settings(case, device=device))
    rows = list(tasks(4 * case.groups, **case.workload))
    episodes = [row for row in rows for _ in range(8)]
    async with opened(config, model_dir, weights) as engine:
        await play(engine, episodes[: 8 * case.groups], in_flight=16 * case.groups)  # captures and compiles
        started = time.perf_counter()
        replies = await play(engine, episodes, in_flight=16 * case.groups)
        return sum(tokens for _, tokens in replies) / (time.perf_counter() - started)


async def play(
    engine: TransformersEngine, episodes: Iterable[Mapping[str, Any]], *, in_flight: int
) -> list[tuple[float, int]]:
    """All replies in their order: when each ended (`time.perf_counter`), and its tokens."""
    todo, replies = iter(episodes), list[tuple[float, int]]()

    async def player() -> None:
        for row in todo:
            ids: list[int] = list(row["prompt"])
            for turn, (length, observation) in enumerate(zip(row["lengths"], row["observations"], strict=True)):
                ids += observation if turn else []
                reply = await engine.submit(ids, SamplingParams(max_tokens=length))
                ids += reply.token_ids.tolist()
                replies.append((time.perf_counter(), len(reply.token_ids)))

    await asyncio.gather(*(player() for _ in range(in_flight)))
    return replies


def separate_flops(case: Case, sampled: float) -> float:
    """Of a step that computes every sample alone, prompt included. `sampled`: tokens of a sample, on average."""
    shape, length = case.shape, case.prompt + sampled + (case.turns - 1) * case.observation
    body = shape.layers * (shape.layer_parameters * length + shape.hidden * length**2)
    return 6.0 * 8 * case.groups * (body + shape.hidden * shape.vocab * sampled)


class CpuByProcess:
    """CPU seconds of the processes of a run, from the first reading after the warm-up to the last one."""

    def __init__(self) -> None:
        self._readings: list[tuple[int, dict[str, float]]] = []

    def read(self, supervisor: int, steps: int) -> None:
        if steps < WARM_UP_STEPS:
            return
        used: dict[str, float] = defaultdict(float)
        for name, seconds in cpu_by_process(psutil.Process(supervisor)).values():
            used[name] += seconds
        if (
            not self._readings or used.keys() >= self._readings[0][1].keys()
        ):  # at the end of the run processes are missing
            self._readings.append((steps, dict(used)))

    def per_step(self) -> dict[str, float]:
        (first, before), (last, after) = self._readings[0], self._readings[-1]
        return {name: round((after[name] - before.get(name, 0.0)) / max(1, last - first), 4) for name in sorted(after)}


def write_model(case: Case, directory: Path, *, device: str) -> Any:
    """A model with random weights, and its tokenizer."""
    model = build(case.shape, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(directory)
    settings = ModelBuildConfig(tokenizer="bytes", max_position_embeddings=case.shape.max_len)
    build_tokenizer(settings).save_pretrained(str(directory))
    return model


def measure(
    name: str, case: Case, home: Path, *, device: str, bound: int, workers: int | None, seconds: float
) -> Iterator[Figure]:
    began = time.monotonic()
    model_dir = home / f"model-{name}"
    model = write_model(case, model_dir, device=device)
    publication = publish(home / "weights.safetensors", model, 1)
    del model
    print_status(f"{name}: the model is written after {time.monotonic() - began:.0f} s")
    table = config_table(case, model_dir, device=device, bound=bound)
    if workers is not None:
        table["rollout"]["workers"] = workers
    cpu = CpuByProcess()
    run = train(name, table, home, Stop(total_s=began + seconds - ENGINE_ALONE_S - time.monotonic()), on_poll=cpu.read)
    if len(run.steps) <= WARM_UP_STEPS + 1:
        raise RuntimeError(f"only {len(run.steps)} steps within {seconds:.0f} s: give it more --seconds")
    steady = run.steps[WARM_UP_STEPS:]
    periods = [after["time"] - before["time"] for before, after in pairwise(run.steps[WARM_UP_STEPS - 1 :])]
    step_s = statistics.fmean(periods)  # with the steps that a checkpoint delays
    tokens = statistics.fmean(row["rollout/response_len"] * row["rollout/samples"] for row in steady)

    def median_of(metric: str) -> float:
        return round(statistics.median(row[metric] or 0.0 for row in steady), 3)

    more = {
        "steps": len(run.steps),
        "staleness_bound": bound,
        "step_s": round(step_s, 3),
        "step_s_median": round(statistics.median(periods), 3),
        "step_s_all": [round(period, 3) for period in periods],
        "train_s": median_of("perf/train_time"),
        "wait_s": median_of("perf/sample_wait_time"),
        "publish_wait_s": median_of("perf/publish_wait_time"),
        "weight_sync_s": median_of("perf/weight_sync_time"),
        "checkpoint_wait_s": max(row["perf/checkpoint_wait_time"] or 0.0 for row in steady),
        "trainer_idle": round(median_of("perf/sample_wait_time") / step_s, 3),
        "start_s": round(run.start_s, 1),
        "first_step_s": round(run.first_step_s, 1),
        "first_train_s": [round(row["perf/train_time"], 2) for row in run.steps[:WARM_UP_STEPS]],
        "tokens_per_step": round(tokens),
        "memory_gb": max(row["perf/memory_gb"] for row in steady),
        "cpu_s_per_step": cpu.per_step(),
        "audit_ok": run.audit_ok,
        "max_lag": run.max_lag,
    }
    computed = [row for row in steady if row["perf/mfu"] is not None]
    if computed:
        in_step = statistics.median(row["perf/mfu"] for row in computed)
        achieved = statistics.fmean(row["perf/mfu"] * row["perf/train_time"] for row in computed) / step_s
        peak = peak_flops(torch.cuda.get_device_name()) or math.nan
        more["mfu_with_each_prompt"] = round(separate_flops(case, tokens / (8 * case.groups)) / step_s / peak, 4)
        yield Figure(
            name=f"step_to_step_mfu_{name}",
            ours=achieved,
            peer=in_step,
            unit="of peak",
            ratio=achieved,
            floor=FLOOR_MFU if name == "1.5b-long" else None,
            more=more,
        )
    if case.engine == "scripted":
        shutil.rmtree(model_dir)
        used = sum(cpu.per_step().values())
        # The trainer has one thread and computes on the CPU, but it may wait for a core.
        yield Figure(
            name="training_share_of_cpu",
            ours=used,
            peer=more["train_s"],
            unit="CPU s",
            ratio=more["train_s"] / used,
            more=more,
        )
        return
    print_status(f"{name}: {tokens / step_s:,.0f} sampled tokens/s; now the engine alone")
    alone = asyncio.run(engine_alone(case, model_dir, (publication, home / "weights.safetensors"), device=device))
    shutil.rmtree(model_dir)
    yield Figure(
        name=f"loop_share_of_engine_{name}",
        ours=tokens / step_s,
        peer=alone,
        unit="tokens/s",
        ratio=tokens / step_s / alone,
        floor=FLOOR_SHARE,
        more={} if computed else more,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cases", nargs="+", default=None, choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=600.0, help="about how long a case may take (default: 600)")
    parser.add_argument("--bound", type=int, default=1, help="staleness bound of the run (default: 1)")
    parser.add_argument("--workers", type=int, help="worker processes of the run (default: 8 on a GPU, 1 on a CPU)")
    parser.add_argument("--home", type=Path, help="folder that keeps the run directories (default: a temporary one)")
    args = parser.parse_args()
    names = args.cases or (["cpu"] if args.device == "cpu" else [name for name in CASES if name != "cpu"])
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        home = args.home or Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name("token_rollout.py"), home)
        for name in names:
            try:
                for figure in measure(
                    name,
                    CASES[name],
                    home,
                    device=args.device,
                    bound=args.bound,
                    workers=args.workers,
                    seconds=args.seconds,
                ):
                    print_status(str(figure))
                    figures.append(figure)
            except RuntimeError as error:  # the other cases are still worth measuring
                print_status(f"{name}: {error}")
    return print_figures(figures)


if __name__ == "__main__":
    sys.exit(main())
