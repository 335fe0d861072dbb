"""Measures how much scoring slows down the trainer. Times its real step in three settings:

    (a) alone           nothing else runs
    (b) threads         reward functions run in threads of the trainer's process and share its interpreter
    (c) workers         the same functions run in our rollout workers, which are separate processes

Reward functions hold the interpreter in bursts of a second, like parsers of long answers. Rounds of the three settings alternate,
so that other load on the machine affects all of them. The workers are stopped (SIGSTOP) while the other settings are measured.
torch uses one thread, so that a second core is free for the workers.

The figure is wall time. `without_waits` subtracts the time in which the trainer was ready to run but had no core (`run_delay`).
With a free core that is almost zero; a larger difference says that other processes disturbed the measurement.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Figure, print_figures, print_status
from benchmarks.trainer.gil_burn import burn
from rollbook.contracts.batch import BatchEntry, BatchManifest, TrainingBatch
from rollbook.contracts.group import PromptGroup, group_id
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.model_config import ModelBuildConfig, ModelConfig
from rollbook.trainer.step import TrainStep

BURST_S = 1.0
CEILING = 1.05
SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Of the thread that reads it: nanoseconds on a core, nanoseconds ready without a core, number of time slices."""
WORDS = tuple(str(number) for number in range(64))


def learner(directory: Path) -> TrainStep:
    build = ModelBuildConfig(
        hidden_size=96,
        layers=2,
        heads=4,
        kv_heads=4,
        intermediate_size=256,
        max_position_embeddings=512,
        vocabulary=WORDS,
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    model = prepare_model_directory(ModelConfig(build=build), directory / "model", seed=0)
    return initial_learner(model, TrainerConfig(lr=1e-4))


def batch(step: int, *, groups: int = 4, samples: int = 4, tokens: int = 96) -> TrainingBatch:
    rng = np.random.default_rng(step)
    built = []
    for number in range(groups):
        task = TaskId(f"t{step}-{number}")
        rows = []
        for _ in range(samples):
            mask = np.arange(tokens) >= 16
            rows.append(
                TokenRow.of(
                    token_ids=rng.integers(4, len(WORDS), tokens),
                    logprobs=np.where(mask, -4.0, 0.0),
                    loss_mask=mask,
                    versions=np.where(mask, 0, -1),
                )
            )
        built.append(
            PromptGroup(
                id=group_id(task, 0),
                task_id=task,
                draw=0,
                samples=tuple(
                    RolloutSample(sequences=(row,), sampling=SamplingParams(), reward=float(rng.random()))
                    for row in rows
                ),
            )
        )
    entries = tuple(
        BatchEntry(group_id=group.id, sequence=number, payload_digest=f"{step}-{number}", oldest_version=0)
        for number, group in enumerate(built)
    )
    return TrainingBatch(
        manifest=BatchManifest(step=step, entries=entries, digest=f"batch-{step}"), groups=tuple(built)
    )


@contextmanager
def scoring_threads(count: int) -> Iterator[None]:
    stopping = threading.Event()

    def score() -> None:
        while not stopping.is_set():
            burn(BURST_S)
            stopping.wait(0.05)

    threads = [threading.Thread(target=score, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


@contextmanager
def workers(count: int) -> Iterator[int]:
    """Start worker processes that play and score in an endless loop, in their own process group. Yields its id; it is stopped."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.trainer.gil_rollouts",
        "--scorers",
        str(count),
        "--burst",
        str(BURST_S),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "scoring", "the workers did not begin to score"
        os.killpg(process.pid, signal.SIGSTOP)
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextmanager
def resumed(group: int) -> Iterator[None]:
    os.killpg(group, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGSTOP)


def run_delay_s() -> float:
    """Seconds since its start in which this thread was ready to run but had no core. 0 if the kernel does not report it."""
    try:
        return int(SCHEDSTAT.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


@dataclass
class Steps:
    """Mean seconds of the steps of one round: wall time, and wall time without waits for a core."""

    wall_s: float
    running_s: float
    count: int


def run_steps(step: TrainStep, seconds: float, first: int) -> Steps:
    """Run and time one step after another for at least `seconds`."""
    wall, waited, count = 0.0, 0.0, 0
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        ready = batch(first + count + 1)
        began, delay_before = time.perf_counter(), run_delay_s()
        step.run(ready)
        wall += time.perf_counter() - began
        waited += run_delay_s() - delay_before
        count += 1
    return Steps(wall_s=wall / count, running_s=max(0.0, wall - waited) / count, count=count)


def slow_downs(times: dict[str, list[Steps]], which: str) -> dict[str, float]:
    """Median over the rounds of a setting's mean step time divided by that of `alone` in the same round."""
    return {
        kind: statistics.median(
            getattr(found, which) / getattr(alone, which)
            for found, alone in zip(times[kind], times["alone"], strict=True)
        )
        for kind in ("threads", "workers")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--round-s", type=float, default=3.0)
    parser.add_argument("--scorers", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[Steps]] = {"alone": [], "threads": [], "workers": []}
    with tempfile.TemporaryDirectory(prefix="rollbook-gil-") as directory, workers(args.scorers) as group:
        step = learner(Path(directory))
        trained = run_steps(step, 1.0, 0).count  # warm-up
        for number in range(args.rounds):
            for kind, load in (
                ("alone", nullcontext()),
                ("threads", scoring_threads(args.scorers)),
                ("workers", resumed(group)),
            ):
                with load:
                    times[kind].append(run_steps(step, args.round_s, trained))
                trained += times[kind][-1].count
            print_status(
                f"round {number + 1}: " + ", ".join(f"{k} {v[-1].wall_s * 1e3:.1f} ms" for k, v in times.items())
            )
    wall, running = slow_downs(times, "wall_s"), slow_downs(times, "running_s")
    print_status(f"{'':<10}{'step ms':>9}{'slow-down':>11}{'without waits for a core':>26}")
    for kind, rounds in times.items():
        median = statistics.median(found.wall_s for found in rounds) * 1e3
        print_status(f"{kind:<10}{median:>9.1f}{wall.get(kind, 1.0):>10.2f}×{running.get(kind, 1.0):>25.2f}×")
    cores = len(os.sched_getaffinity(0))
    figure = Figure(
        name="gil_slowdown",
        ours=wall["workers"],
        peer=wall["threads"],
        unit="× alone",
        ratio=CEILING / wall["workers"],
        floor=1.0 if cores > args.scorers else None,
        more={
            "cores": cores,
            "scorers": args.scorers,
            "ceiling": CEILING,
            "ours_without_waits": running["workers"],
            "peer_without_waits": running["threads"],
        },
    )
    return print_figures([figure])


if __name__ == "__main__":
    sys.exit(main())
