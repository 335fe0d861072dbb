"""What does scoring cost the trainer? Times of its real step: with nothing else, with scoring threads, with our workers.

    (a) alone           nothing else runs
    (b) threads         reward functions run in threads of the trainer's process: they take turns for its interpreter
    (c) workers         the same functions in our rollout workers: processes of their own

A reward burns the interpreter in bursts of a second, as parsers of long answers do. Rounds of the three alternate, so that whatever
else the machine does meets all alike; the workers are stopped (SIGSTOP) while the others are measured. One thread of torch, so that
a second core is free for the workers.

The question is about the interpreter, not about who else uses the machine: from a step's wall time the time is taken off in which
the trainer was ready to run and the kernel had given its core to another process (`run_delay`). On a machine with a free core that
is next to nothing, and the wall times are reported beside it.
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

from benchmarks.report import Figure, print_figures, tell
from benchmarks.trainer.gil_burn import burn
from rollbook.contracts.batch import BatchEntry, BatchManifest, TrainingBatch
from rollbook.contracts.group import PromptGroup, group_id
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.config import ModelBuildConfig, ModelConfig, TrainerConfig
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.step import TrainStep

BURST_S = 1.0
CEILING = 1.05
SCHEDULED = Path("/proc/thread-self/schedstat")
"""Nanoseconds on a core, nanoseconds ready without one, turns: of the thread that reads it."""
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
    made = []
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
        made.append(
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
        for number, group in enumerate(made)
    )
    return TrainingBatch(manifest=BatchManifest(step=step, entries=entries, digest=f"batch-{step}"), groups=tuple(made))


@contextmanager
def scoring_threads(count: int) -> Iterator[None]:
    over = threading.Event()

    def score() -> None:
        while not over.is_set():
            burn(BURST_S)
            over.wait(0.05)

    threads = [threading.Thread(target=score, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def workers(count: int) -> Iterator[int]:
    """Our worker processes, playing and scoring without end, in a process group of their own. Gives its id, stopped."""
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
def going_on(group: int) -> Iterator[None]:
    os.killpg(group, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGSTOP)


def waited_for_a_core_s() -> float:
    """Seconds in which this thread was ready to run and had no core, since it began. 0 where the kernel does not tell."""
    try:
        return int(SCHEDULED.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


@dataclass
class Steps:
    """Mean seconds of the steps of one round: on the wall, and without waiting for a core."""

    wall_s: float
    own_s: float
    count: int


def measured(step: TrainStep, seconds: float, first: int) -> Steps:
    """Steps, one after the other, for a while."""
    wall, waited, count = 0.0, 0.0, 0
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        ready = batch(first + count + 1)
        began, before = time.perf_counter(), waited_for_a_core_s()
        step.run(ready)
        wall += time.perf_counter() - began
        waited += waited_for_a_core_s() - before
        count += 1
    return Steps(wall_s=wall / count, own_s=max(0.0, wall - waited) / count, count=count)


def slow_downs(times: dict[str, list[Steps]], which: str) -> dict[str, float]:
    """Of each round the mean step against the one alone beside it; of the rounds the median."""
    return {
        kind: statistics.median(
            getattr(found, which) / getattr(alone, which)
            for found, alone in zip(times[kind], times["alone"], strict=True)
        )
        for kind in ("threads", "workers")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--round-s", type=float, default=3.0)
    parser.add_argument("--scorers", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[Steps]] = {"alone": [], "threads": [], "workers": []}
    with tempfile.TemporaryDirectory(prefix="rollbook-gil-") as directory, workers(args.scorers) as group:
        step = learner(Path(directory))
        trained = measured(step, 1.0, 0).count  # warm
        for number in range(args.rounds):
            for kind, beside in (
                ("alone", nullcontext()),
                ("threads", scoring_threads(args.scorers)),
                ("workers", going_on(group)),
            ):
                with beside:
                    times[kind].append(measured(step, args.round_s, trained))
                trained += times[kind][-1].count
            tell(f"round {number + 1}: " + ", ".join(f"{k} {v[-1].wall_s * 1e3:.1f} ms" for k, v in times.items()))
    wall, own = slow_downs(times, "wall_s"), slow_downs(times, "own_s")
    tell(f"{'':<10}{'step ms':>9}{'slow-down':>11}{'on the wall':>13}")
    for kind, rounds in times.items():
        median = statistics.median(found.own_s for found in rounds) * 1e3
        tell(f"{kind:<10}{median:>9.1f}{own.get(kind, 1.0):>10.2f}×{wall.get(kind, 1.0):>12.2f}×")
    cores = len(os.sched_getaffinity(0))
    figure = Figure(
        name="gil_slowdown",
        ours=own["workers"],
        peer=own["threads"],
        unit="× alone",
        # Larger is better: how far below the ceiling we stay.
        ratio=CEILING / own["workers"],
        floor=1.0 if cores > args.scorers else None,
        more={
            "cores": cores,
            "scorers": args.scorers,
            "ceiling": CEILING,
            "ours_on_the_wall": wall["workers"],
            "peer_on_the_wall": wall["threads"],
        },
    )
    return print_figures([figure])


if __name__ == "__main__":
    sys.exit(main())
