"""Losses, corrections, learning rates, warm-up and weight decay with an engine and a trainer in bfloat16, at a fixed lag.

    python -m benchmarks.learning.study_bf16 --part lag --device cuda --lanes 9 --cpu-lanes 6 --seconds 450 --out runs/bf16-lag
    python -m benchmarks.learning.study_bf16 --part rates --device cuda --lanes 9 --seconds 450 --out runs/bf16-rates
    python -m benchmarks.learning.study_bf16 --device cpu --cpu-lanes 1 --dtype float32 --seconds 90 --small --out /tmp/bf16

One process (a lane) runs many cells one after the other. A cell is a configuration with a seed. It uses the trainer's own step and
the built-in engine, both in bfloat16: a batch is sampled, and trained `lag` steps later. The engine gets the weights after every
step. So every token of a batch has exactly this lag, which is the worst case of a staleness bound of the same size. The models are
built and warm-started on the spot (`chains.py`).

Every finished cell is a line of `OUT/cells.jsonl`. At the end, or when the time is up, `OUT/summary.md` and standard output have
the table: the mean over seeds with its 95 % interval (Student's t) of the reward of 256 fresh episodes after the last step, the
mean reward of all training steps, and the metrics of the trainer. `--summarise` writes the table of existing files again. The
same command continues with the cells that are missing.
"""

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing as mp
import os
import queue
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.learning.chains import ANSWER_TOKENS, MAX_LENGTH, Chains, warm_start
from benchmarks.report import machine, print_status
from rollbook.contracts.batch import BatchEntry, BatchManifest, TrainingBatch
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.policy import NOT_SAMPLED, Completion, Publication, PublicationId, SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import TransformersEngine, open_engine
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.step import TrainStep

SAMPLES = 8
EVALUATED = 256
SHOWN = {
    "reward": "reward, held out",
    "mean_reward": "mean reward of training",
    "train/ppo_clip_frac": "clipped",
    "train/correction_clip_frac": "corrected to 0 or bound",
    "train/ess": "effective sample size",
    "train/numerics_kl": "KL at lag 0",
    "train/mean_kl": "KL to the sampler",
    "train/entropy": "entropy at the end",
}
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Quantiles of Student's t for 95 % intervals, by number of seeds."""
STOP_S = 12.0
"""Time to stop the lanes and to write the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    shape: str
    device: str
    recipe: str
    lag: int
    seed: int
    steps: int
    groups: int
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The configuration, without the seed."""
        return self.shape, self.device, self.recipe, self.lag


MASK_SEQUENCES = {"correction": "mis", "correction_level": "sequence_sum", "correction_bound": 3.0}
"""As TRL does by default: whole sequences whose weight is above 3 are not trained."""
MASK_TOKENS = {"correction": "mis", "correction_bound": 2.0, "correction_low": 0.5}
RECIPES: dict[str, dict[str, Any]] = {
    "grpo, sampler": {"loss": "grpo"},
    "dapo, sampler": {"loss": "dapo"},
    "grpo, snapshot": {"loss": "grpo", "old_logprobs": "snapshot"},
    "dapo, snapshot, sequence mask": {"loss": "dapo", **MASK_SEQUENCES},
    "dapo, snapshot, tis": {"loss": "dapo", "correction": "tis"},
    "dapo, snapshot, mis": {"loss": "dapo", **MASK_TOKENS},
    "gspo, sampler": {"loss": "gspo"},
    "gspo, sampler, clip 0.003/0.004": {"loss": "gspo", "clip_low": 3e-3, "clip_high": 4e-3},
    "gspo, sampler, clip 0.03/0.04": {"loss": "gspo", "clip_low": 3e-2, "clip_high": 4e-2},
    "gspo, snapshot": {"loss": "gspo", "old_logprobs": "snapshot"},
    "gspo, snapshot, sequence mask": {"loss": "gspo", **MASK_SEQUENCES},
    "cispo, sampler": {"loss": "cispo"},
    "decoupled": {"loss": "decoupled"},
}
AT_EXTREMES = frozenset({"cispo, sampler", "decoupled", "gspo, snapshot"})
"""Recipes that are compared without lag and with most lag only."""
REPEATED = ("dapo, sampler", "grpo, snapshot", "dapo, snapshot, sequence mask", "gspo, sampler, clip 0.003/0.004")
"""Recipes that the larger models are trained with too."""
RATES = {"tiny": (5e-4,), "135M": (1e-6, 5e-6, 1.9e-5, 6e-5, 2e-4), "0.5B": (1e-6, 3e-6, 9.8e-6, 3e-5, 1e-4)}
STUDIED_RATES = {"tiny": 2e-3, "6M": 3e-4, "135M": 8e-5, "0.5B": 4e-5}
"""About four times the defaults, so that the policy changes much from step to step and lag matters."""
HIGH = 4.0
"""Factor of a rate that is too high without a limit of the change."""


def lag_cells(shape: str, device: str, args: argparse.Namespace) -> Iterator[Cell]:
    """The table of decision 0019. A first seed of everything comes before the second seed of anything."""
    shared = {"device": device, "dtype": args.dtype, "steps": args.steps, "groups": args.groups}
    for seed in range(args.seeds):
        for lag, recipe in itertools.product((4, 0, 2, 1), RECIPES):
            if lag in (1, 2) and recipe in AT_EXTREMES:
                continue
            for name, factor in (("", 1.0), (", high rate", HIGH)):
                settings = {"lr": STUDIED_RATES[shape] * factor, **RECIPES[recipe]}
                yield Cell(shape=shape, recipe=f"{recipe}{name}", lag=lag, seed=seed, trainer=settings, **shared)


def rate_cells(shape: str, device: str, args: argparse.Namespace) -> Iterator[Cell]:
    """Learning rates, warm-up and weight decay with the default loss at lag 1, and the main recipes at lag 2."""
    shared = {"device": device, "dtype": args.dtype, "steps": args.steps, "groups": args.groups}
    for seed in range(args.seeds):
        for rate in RATES[shape]:
            yield Cell(shape=shape, recipe=f"lr {rate:g}", lag=1, seed=seed, trainer={"lr": rate}, **shared)
        extra: dict[str, dict[str, Any]] = {
            "warm-up 10": {"warmup_steps": 10},
            "weight decay 0.01": {"weight_decay": 0.01},
        }
        for name, trainer in extra.items():
            yield Cell(shape=shape, recipe=f"default lr, {name}", lag=1, seed=seed, trainer=trainer, **shared)
        for recipe in REPEATED:
            settings = {"lr": STUDIED_RATES[shape], **RECIPES[recipe]}
            yield Cell(shape=shape, recipe=recipe, lag=2, seed=seed, trainer=settings, **shared)


class Lane:
    """One engine, used by many cells one after the other."""

    def __init__(self, engine: TransformersEngine, model: Path, *, until: float) -> None:
        self._engine = engine
        self._model = model
        self._until = until
        self._chains = Chains()
        self._num_published = 0
        self._versions: dict[int, int] = {}

    async def run(self, cell: Cell) -> dict[str, Any] | None:
        """None if the time is up before the last step."""
        is_gpu = cell.device == "cuda"
        config = TrainerConfig(
            **cell.trainer,
            seed=cell.seed,
            device="cuda" if is_gpu else "cpu",
            compute_dtype=cell.dtype,
            max_tokens_per_microbatch=16_384,
        )
        began = time.monotonic()
        step = TrainStep(PolicyModel.load(self._model, config), config)
        rng = random.Random(1000 + cell.seed)
        await self._publish(step)
        waiting: deque[TrainingBatch] = deque()
        for number in range(1, min(cell.lag + 1, cell.steps) + 1):
            waiting.append(await self._sample(cell, rng, step=number))
        rewards, rows = [], []
        while waiting:
            if time.monotonic() > self._until:
                return None
            batch = waiting.popleft()
            rewards.append(mean_reward(batch))
            rows.append((await asyncio.to_thread(step.run, batch)).metrics)
            await self._publish(step)
            if (coming := step.step + cell.lag + 1) <= cell.steps:
                waiting.append(await self._sample(cell, rng, step=coming))
        final = await self._sample(cell, rng, step=step.step + 1, groups=EVALUATED // SAMPLES)
        tail = rows[-10:]
        return {
            **asdict(cell),
            "reward": mean_reward(final),
            "mean_reward": statistics.fmean(rewards),
            "rewards": [round(reward, 4) for reward in rewards],
            "seconds": round(time.monotonic() - began, 1),
            **{name: _mean(row.get(name) for row in rows) for name in SHOWN if name.startswith("train/")},
            "train/entropy": _mean(row.get("train/entropy") for row in tail),
            "lowest_ess": min((row["train/ess"] for row in rows if row["train/ess"] is not None), default=None),
            "grad_norm": _mean(row.get("train/grad_norm") for row in rows),
            "lr": rows[-1]["train/lr"],
            "entropies": [_rounded(row.get("train/entropy")) for row in rows],
            "kls": [_rounded(row.get("train/mean_kl")) for row in rows],
        }

    async def _publish(self, step: TrainStep) -> None:
        self._num_published += 1
        number = PublicationId(self._num_published)
        self._versions[number] = step.step
        # Tensors of the same process are not checked against the digest.
        publication = Publication(id=number, epoch=1, step=step.step, digest=f"{number:064x}")
        weights = step.snapshot()
        if step.model.device == "cuda":
            # The engine reads the copies on a stream of its own.
            torch.cuda.synchronize()
        await self._engine.load_tensors(publication, weights)

    async def _sample(self, cell: Cell, rng: random.Random, *, step: int, groups: int | None = None) -> TrainingBatch:
        """The batch of a step, sampled by the weights that the engine has now."""
        prompts = [self._chains.prompt(rng) for _ in range(groups or cell.groups)]
        requests = [
            self._engine.generate(
                prompt,
                SamplingParams(max_tokens=ANSWER_TOKENS, seed=rng.getrandbits(62), complete_at_max_tokens=True),
            )
            for prompt in prompts
            for _ in range(SAMPLES)
        ]
        completions = await asyncio.gather(*requests)
        version = self._versions[self._num_published]
        entries, made = [], []
        for number, prompt in enumerate(prompts):
            name = GroupId(f"chain-{step}-{number}@0")
            samples = [self._sample_of(prompt, done) for done in completions[number * SAMPLES : (number + 1) * SAMPLES]]
            made.append(PromptGroup(id=name, task_id=TaskId(str(number)), draw=0, samples=tuple(samples)))
            entries.append(BatchEntry(group_id=name, sequence=number, payload_digest="", oldest_version=version))
        return TrainingBatch(manifest=BatchManifest(step=step, entries=tuple(entries), digest=""), groups=tuple(made))

    def _sample_of(self, prompt: list[int], done: Completion) -> RolloutSample:
        answer = done.token_ids.tolist()
        before = [0] * len(prompt)
        row = TokenRow.of(
            token_ids=[*prompt, *answer],
            logprobs=[*before, *done.logprobs.tolist()],
            loss_mask=[*before, *[1] * len(answer)],
            versions=[*[NOT_SAMPLED] * len(prompt), *done.versions.tolist()],
        )
        reward = self._chains.reward(prompt, answer)
        return RolloutSample(sequences=(row,), sampling=SamplingParams(max_tokens=ANSWER_TOKENS), reward=reward)


def mean_reward(batch: TrainingBatch) -> float:
    return statistics.fmean(sample.reward or 0.0 for group in batch.groups for sample in group.samples)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneKind:
    shape: str
    device: str
    count: int
    """Number of such lanes."""


def lane(kind: LaneKind, args: argparse.Namespace, folder: Path, until: float, queues: tuple[Any, Any]) -> None:
    """The process of a lane: takes cells from the queue until it is empty or the time is up."""
    torch.set_num_threads(1)
    (cells, results), shape, device = queues, kind.shape, kind.device
    model = folder / shape
    while not model.exists():
        if time.monotonic() > until:
            return
        time.sleep(0.2)
    config = InferenceConfig(
        device=device,
        dtype=args.dtype,
        max_running=EVALUATED,
        max_model_len=MAX_LENGTH,
        kv_memory_mb=1500 if device == "cuda" else 200,
    )

    async def work() -> None:
        async with open_engine(config, model) as engine:
            results.put({"lane": f"{shape} on {device}", "choices": engine.parts.choices})
            worker = Lane(engine, model, until=until)
            while time.monotonic() < until:
                try:
                    cell = cells.get_nowait()
                except queue.Empty:
                    return
                try:
                    found = await worker.run(cell)
                except Exception as error:
                    # A process whose GPU failed once fails with every cell. The other lanes go on.
                    results.put({**asdict(cell), "error": f"{type(error).__name__}: {error}"})
                    return
                if found is not None:
                    results.put(found)

    asyncio.run(work())


def start_model(shape: str, folder: Path, device: str, results: Any) -> None:
    """The process of a warm start."""
    torch.set_num_threads(1)
    began = time.monotonic()
    found = warm_start(shape, folder, device=device)
    results.put({"warm_start": shape, **found, "seconds": round(time.monotonic() - began, 1)})


@contextmanager
def shared_gpu(is_wanted: bool) -> Iterator[bool]:
    """Let the kernels of several processes run at the same time (NVIDIA's MPS), where that works. Otherwise they take turns."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not is_wanted or control is None:
        yield False
        return
    folder = tempfile.mkdtemp(prefix="rollbook-mps-")
    names = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    os.environ.update(names)
    started = subprocess.run([control, "-d"], check=False, timeout=20).returncode == 0
    probe = [sys.executable, "-c", "import torch; torch.ones(8, device='cuda').sum().item()"]
    try:
        works = started and subprocess.run(probe, check=False, timeout=60, capture_output=True).returncode == 0
    except subprocess.TimeoutExpired:
        works = False
    if not works:
        subprocess.run([control], input="quit\n", text=True, check=False, timeout=20)
        for name in names:
            del os.environ[name]
    try:
        yield works
    finally:
        if works:
            subprocess.run([control], input="quit\n", text=True, check=False, timeout=20)


def measure(args: argparse.Namespace, folder: Path) -> None:
    until = time.monotonic() + args.seconds - STOP_S
    # One process for each lane would start as many compiling processes as there are cores.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with shared_gpu(args.mps and args.device == "cuda") as is_shared:
        print_status(f"kernels of several processes at once: {is_shared}")
        num_found = run_lanes(args, folder, until=until)
    if is_shared and not num_found:
        print_status("again, without MPS")
        run_lanes(args, folder, until=until)


def run_lanes(args: argparse.Namespace, folder: Path, *, until: float) -> int:
    """Run the cells that have no result yet. Returns how many cells were finished on the requested device."""
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    cells_of = lag_cells if args.part == "lag" else rate_cells
    lanes: list[Any] = []
    others: list[Any] = []
    path = args.out / "cells.jsonl"
    known = {_key(row) for row in read_rows(path)}
    queues: list[Any] = []  # A started process does not keep its queue alive.
    for kind in lanes_of(args):
        if not (folder / kind.shape).exists():
            others.append(context.Process(target=start_model, args=(kind.shape, folder, kind.device, results)))
        cells: Any = context.Queue()
        queues.append(cells)
        for cell in cells_of(kind.shape, kind.device, args):
            if _key(asdict(cell)) not in known:
                cells.put(cell)
        made = [
            context.Process(target=lane, args=(kind, args, folder, until, (cells, results))) for _ in range(kind.count)
        ]
        (lanes if kind.device == args.device else others).extend(made)
    for worker in (*others, *lanes):
        worker.start()
    num_found = collect((lanes, others), results, path, args.device, until=until + STOP_S / 2)
    for worker in (*others, *lanes):
        if worker.is_alive():
            worker.kill()
        worker.join()
    return num_found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The finished cells of a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [row for line in lines if "reward" in (row := json.loads(line))]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("shape", "device", "dtype", "recipe", "lag", "seed"))


def lanes_of(args: argparse.Namespace) -> list[LaneKind]:
    if args.device == "cpu":
        counts = {("tiny", "cpu"): args.cpu_lanes}
    elif args.part == "rates":
        counts = {("135M", "cuda"): args.lanes - args.lanes // 2, ("0.5B", "cuda"): args.lanes // 2}
    else:
        counts = {("6M", "cuda"): args.lanes, ("tiny", "cpu"): args.cpu_lanes}
    return [LaneKind(shape=shape, device=device, count=count) for (shape, device), count in counts.items() if count]


def collect(
    workers: tuple[Sequence[Any], Sequence[Any]], results: Any, path: Path, device: str, *, until: float
) -> int:
    """Write every result as it comes, until the workers have ended or the time is up.

    `workers`: the lanes on the requested device, and the others. Also ends if all of the first kind failed.
    """
    lanes, others = workers
    num_found = 0
    with path.open("a", encoding="utf-8") as file:
        while time.monotonic() < until:
            are_lanes_alive = any(worker.is_alive() for worker in lanes)
            is_over = not are_lanes_alive and (not num_found or not any(worker.is_alive() for worker in others))
            try:
                row = results.get(timeout=0.5)
            except queue.Empty:
                if is_over:
                    break
                continue
            file.write(json.dumps(row) + "\n")
            file.flush()
            if "reward" not in row:
                print_status(json.dumps(row))
                continue
            num_found += row["device"] == device
            shown = f"{row['shape']} {row['recipe']}, lag {row['lag']}, seed {row['seed']}"
            print_status(f"{shown}: {row['reward']:.3f} in {row['seconds']} s")
    return num_found


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for each model, lag by lag."""
    cells: dict[tuple[str, str, str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["shape"], row["device"], row["recipe"], row["lag"]), []).append(row)
    lines = []
    for shape, device in sorted({key[:2] for key in cells}):
        lines += ["", f"## {shape} on {device}", "", "| recipe | lag | seeds | " + " | ".join(SHOWN.values()) + " |"]
        lines.append("|---" * (3 + len(SHOWN)) + "|")
        chosen = sorted((key for key in cells if key[:2] == (shape, device)), key=lambda key: (key[3], key[2]))
        for key in chosen:
            values = [interval([row[name] for row in cells[key]]) for name in SHOWN]
            lines.append(f"| {key[2]} | {key[3]} | {len(cells[key])} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def interval(values: Sequence[float | None]) -> str:
    """The mean, and half of its 95 % interval."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return ""
    mean = statistics.fmean(known)
    if len(known) < 2:
        return f"{mean:.3g}"
    half = STUDENT_T.get(len(known), 2.1) * statistics.stdev(known) / math.sqrt(len(known))
    return f"{mean:.3g} ± {half:.2g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["lag", "rates"], default="lag")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--lanes", type=int, default=9, help="processes on the GPU")
    parser.add_argument("--cpu-lanes", type=int, default=0, help="processes on CPU cores, with a tiny model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of engine and trainer")
    parser.add_argument("--mps", action=argparse.BooleanOptionalAction, default=True, help="try NVIDIA's MPS")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="steps of each cell")
    parser.add_argument("--groups", type=int, default=16, help="groups of a batch, of 8 samples each")
    parser.add_argument("--seconds", type=float, default=450.0, help="time limit of the whole command")
    parser.add_argument("--small", action="store_true", help="few steps of small batches, to test the script")
    parser.add_argument("--out", type=Path, default=Path("runs/bf16"), help="output directory")
    parser.add_argument("--models", type=Path, help="existing directory of the warm starts, to use them again")
    parser.add_argument("--summarise", action="store_true", help="only write the table of existing cells")
    args = parser.parse_args()
    if args.small:
        args.steps, args.groups, args.seeds = 6, 4, 1
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.summarise:
        with tempfile.TemporaryDirectory(prefix="rollbook-bf16-") as folder:
            measure(args, args.models or Path(folder))
    rows = read_rows(args.out / "cells.jsonl")
    text = summary(rows)
    (args.out / "summary.md").write_text(text, encoding="utf-8")
    print(text)
    print(json.dumps({"cells": len(rows), "machine": machine()}))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
