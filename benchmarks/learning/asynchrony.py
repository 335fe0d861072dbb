"""Wall time to the same held-out accuracy, synchronous (staleness bound 0) against asynchronous, with the same recipe.

    python -m benchmarks.learning.asynchrony --model models/smollm2 --minutes 8
    python -m benchmarks.learning.asynchrony --small --device cpu --seeds 0 --lanes 1     # tests the script

SmolLM2-135M learns two-digit sums. An episode has instructions of 290 tokens and two questions. After each answer it waits for a
tool, as agents do. The tool sleeps. A short synchronous run measures how long generation and training take alone; then the duration
of the tool is chosen so that generation alone takes about `--balance` times as long as training alone. Nothing needs the GPU while
a tool sleeps, so this task shows what asynchrony gains for agents; without a tool, engine and trainer compete for the GPU.

Seconds count from the command `rollbook train`: the start of the processes and compilation are included. An accuracy is reached at
the first of two successive evaluations at or above it. A run is stopped when the highest of `--marks` is reached. Two runs share
the machine (`--lanes`); synchronous and asynchronous ones alternate. Every finished run is printed and saved, so a time limit loses
only the runs that it stops.
"""

import argparse
import functools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.curves import plot
from benchmarks.learning.runs import LearningRun, Stop, save, train
from benchmarks.learning.tiny import tiny_model
from benchmarks.pinned_jobs import run_pinned
from benchmarks.report import Figure, print_figures, print_status

HERE = Path(__file__).parent
IN_A_ROW = 2
"""Successive evaluations that must reach the mark."""
AIM = 1.8
CALIBRATION_STEPS = 9
CALIBRATION_SEED = 1000
"""Runs with this seed and above are not compared."""
END_S = 12.0
"""Expected time to stop a run and to audit it."""
MAX_TOKENS = 768
SLOWEST = 1.92
"""A step waits for its slowest episode, whose tools take this many times the mean, with 768 episodes of two turns."""
LEAST_TURN_S, MOST_TURN_S = 0.05, 0.5
"""Durations of the tool that are chosen."""
INSTRUCTIONS = """\
You are an assistant in a small shop. You add and subtract numbers for the people who work there. Each message has one \
question about two numbers. Work in this way. First read both numbers and the sign between them. A plus means that you add the \
second number to the first. A minus means that you subtract the second number from the first. Add the ones first and then the \
tens. If the ones are ten or more, carry one to the tens. When you subtract and the ones of the first number are too small, \
borrow one from the tens. If the second number is larger than the first and the sign is a minus, the result is negative: write \
a minus in front of it. A tool checks every answer after you have given it. The check takes a moment, and then the next \
question comes. The tool reads the last number of your reply and nothing else. So the last number must be the result. Do not \
repeat the question after the result, and do not write another number after it. The people in the shop are in a hurry. Give a \
short reply of one sentence. Do not explain how you found the result, do not add a greeting, and do not ask a question back. \
If you are not sure, give the number that is most likely right: an empty reply is always wrong. Earlier questions do not \
change later ones, so each result depends only on its own two numbers."""
Row = dict[str, Any]


def config_table(args: argparse.Namespace, model: Path, *, bound: int, seed: int, turn_s: float) -> dict[str, Any]:
    """The run of `tails_gpu.toml` with tasks of equal length. Only the staleness bound differs between the runs of a seed."""
    table = tomllib.loads((HERE / "tails_gpu.toml").read_text(encoding="utf-8"))
    table["run"] |= {"seed": seed}
    table["model"] = {"path": str(model)}
    groups = 8 if args.small else args.groups
    shape = {"mean_rounds": args.rounds, "most_rounds": args.rounds, "rounds_shape": 0.0}
    numbers = {"least": 0, "most": 9, "spaced": True} if args.small else {"least": 10, "most": 99}
    held_out = 40 if args.small else 384
    table["tasks"]["args"] = {
        "count": 100 if args.small else 4096,
        "seed": 1 + seed,
        "held_out": held_out,
        **numbers,
        **shape,
    }
    settings = {"turn_s": turn_s} | ({} if args.small else {"system_prompt": INSTRUCTIONS})
    table["rollout"] |= {"workers": args.workers, "groups_per_worker": 3 * groups, "settings": settings}
    table["rollout"] |= {"max_total_tokens": MAX_TOKENS}
    # All groups that the bound allows are in flight.
    table["gate"] = {
        "groups_per_step": groups,
        "max_groups_in_flight": groups * (bound + 1),
        "max_head_offpolicy_versions": bound,
        "batch_policy": "wait",
    }
    table["inference"] |= {"max_running": 2048, "max_connections": 2048, "max_model_len": MAX_TOKENS}
    table["inference"] |= {"kv_memory_mb": 12_000}
    # A trainer with passes of 65,536 tokens takes up to 69 GB: two of them and their policy servers do not fit into one GPU.
    table["trainer"] |= {"lr": args.lr, "max_tokens_per_microbatch": 32_768, "threads": 1}
    table["evaluation"] |= {"every_steps": args.evaluate_every, "args": {"count": 0, "seed": 0, "held_out": held_out}}
    table["evaluation"]["args"] |= numbers
    if args.device == "cpu":
        table["inference"] |= {"device": "cpu", "dtype": "float32", "kv_memory_mb": 500}
        table["trainer"] |= {"device": "cpu", "compute_dtype": "float32"}
    if args.small:
        table["rollout"] |= {"max_total_tokens": 64, "sampling": {"max_tokens": 8}}
        table["inference"] |= {"max_model_len": 64}
        table["trainer"] |= {"lr": 1e-3, "warmup_steps": 0}
    return table


class Study:
    def __init__(self, args: argparse.Namespace, home: Path) -> None:
        self._args = args
        self._home = home
        self._until = time.monotonic() + 60 * args.minutes
        self._model = tiny_model(home, seed=0) if args.small else args.model.resolve()
        self._rows: list[Row] = []
        shutil.copy(HERE / "rollout.py", home)

    def measure(self) -> int:
        turn_s = self._args.turn_s if self._args.turn_s is not None else self._chosen_turn_s()
        # Of two runs at the same time one is synchronous and one is not, and the lanes change roles with each seed.
        kinds = [
            (seed, bound)
            for seed in self._args.seeds
            for bound in ((0, self._args.bound) if seed % 2 == 0 else (self._args.bound, 0))
        ]
        self._run_all([functools.partial(self._run, seed, bound, turn_s=turn_s) for seed, bound in kinds])
        compared = [row for row in self._rows if row["seed"] < CALIBRATION_SEED]
        curves = [{"name": _name(row["bound"], row["seed"]), "curve": row["curve"]} for row in compared]
        plot(self._args.out / "curves.png", curves, mark=max(self._args.marks), x_label="seconds from the command")
        return print_figures(figures_of(self._rows, bound=self._args.bound, marks=self._args.marks), turn_s=turn_s)

    def _chosen_turn_s(self) -> float:
        """The duration of the tool that makes generation alone `--balance` times as long as training alone."""
        jobs = [
            functools.partial(self._run, CALIBRATION_SEED + lane, 0, turn_s=0.0, steps=CALIBRATION_STEPS)
            for lane in range(self._args.lanes)
        ]
        rows = self._run_all(jobs)
        if not rows:
            raise SystemExit("no calibration run was trained; give --turn-s")
        generation, training = (statistics.fmean(row[name] for row in rows) for name in ("generation_s", "training_s"))
        turn_s: float = (self._args.balance * training - generation) / self._args.rounds / SLOWEST
        chosen = round(min(MOST_TURN_S, max(LEAST_TURN_S, turn_s)), 3)
        print_status(f"alone: generation {generation:.3f} s, training {training:.3f} s; a tool takes {chosen:.3f} s")
        return chosen

    def _run_all(self, jobs: Sequence[functools.partial[Row | None]]) -> list[Row]:
        rows = []
        cores_each = max(1, len(os.sched_getaffinity(0)) // self._args.lanes)
        for job in run_pinned(jobs, cores_each=cores_each):
            if (error := job.exception()) is not None:
                # The other runs continue after a failed one.
                print_status(f"FAILED: {error}")
            elif (row := job.result()) is not None:
                rows.append(row)
                self._rows.append(row)
                print(json.dumps(row | {"curve": None}), flush=True)
                save(self._args.out / "asynchrony.json", {"marks": self._args.marks, "runs": self._rows})
        return rows

    def _run(self, seed: int, bound: int, *, turn_s: float, steps: int = 1_000_000) -> Row | None:
        left_s = self._until - time.monotonic() - END_S
        if left_s < self._args.least_s:
            print_status(f"bound {bound}, seed {seed}: no time left")
            return None
        name = _name(bound, seed)
        table = config_table(self._args, self._model, bound=bound, seed=seed, turn_s=turn_s)
        mark = None if seed >= CALIBRATION_SEED else max(self._args.marks)
        stop = Stop(mark=mark, in_a_row=IN_A_ROW, total_s=min(left_s, self._args.limit_s), steps=steps)
        run = train(name, table, self._home, stop)
        return row_of(run, bound=bound, seed=seed, turn_s=turn_s, marks=self._args.marks)


def _name(bound: int, seed: int) -> str:
    return f"{'sync' if bound == 0 else f'bound-{bound}'}-seed-{seed}"


def row_of(run: LearningRun, *, bound: int, seed: int, turn_s: float, marks: Sequence[float]) -> Row:
    reached = {mark: run.at_mark(mark, in_a_row=IN_A_ROW) for mark in marks}
    return {
        "bound": bound,
        "seed": seed,
        "turn_s": turn_s,
        "seconds": {str(mark): _wall_s(run, at[0]) if at else None for mark, at in reached.items()},
        "steps": {str(mark): at[0] if at else None for mark, at in reached.items()},
        "trained_steps": len(run.steps),
        "start_s": round(run.start_s + run.first_step_s, 2),
        "step_s": round(run.step_s, 4),
        # With bound 0 nothing is generated while the trainer trains, so it waits for the whole generation.
        "generation_s": round(run.mean_of("perf/sample_wait_time"), 4),
        "training_s": round(run.mean_of("perf/train_time") + run.mean_of("perf/weight_sync_time"), 4),
        "max_lag": run.max_lag,
        "audit_ok": run.audit_ok,
        "curve": [(step, _wall_s(run, step), round(solved, 4)) for step, _, solved in run.curve],
    }


def _wall_s(run: LearningRun, step: int) -> float:
    return round(run.wall_s(step) if step else run.start_s, 2)


def figures_of(rows: Sequence[Mapping[str, Any]], *, bound: int, marks: Sequence[float]) -> list[Figure]:
    """One figure for each accuracy: medians over the seeds of which both runs were made. Without runs there are none.

    A run that did not reach the accuracy counts as infinitely long; an accuracy whose median is infinite has no figure.
    """
    sync, ours = (
        {row["seed"]: row for row in rows if row["bound"] == kind and row["seed"] < CALIBRATION_SEED}
        for kind in (0, bound)
    )
    seeds = sorted(sync.keys() & ours.keys())

    def mean(kind: Mapping[int, Mapping[str, Any]], name: str) -> float:
        return round(statistics.fmean(kind[seed][name] for seed in seeds), 4)

    figures = []
    for mark in map(str, marks if seeds else ()):
        seconds = [[kind[seed]["seconds"][mark] for seed in seeds] for kind in (ours, sync)]
        medians = [statistics.median(math.inf if s is None else s for s in of_kind) for of_kind in seconds]
        if not all(map(math.isfinite, medians)):
            continue
        figures.append(
            Figure(
                name=f"async_to_{mark}",
                ours=medians[0],
                peer=medians[1],
                unit="s",
                ratio=medians[1] / medians[0],
                more={
                    "aim": AIM,
                    "seeds": seeds,
                    "asynchronous_s": seconds[0],
                    "synchronous_s": seconds[1],
                    "asynchronous_steps": [ours[seed]["steps"][mark] for seed in seeds],
                    "synchronous_steps": [sync[seed]["steps"][mark] for seed in seeds],
                    **{
                        f"{name}_{of}": mean(kind, name)
                        for name in ("start_s", "step_s")
                        for of, kind in (("asynchronous", ours), ("synchronous", sync))
                    },
                    "generation_alone_s": mean(sync, "generation_s"),
                    "training_alone_s": mean(sync, "training_s"),
                },
            )
        )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--small", action="store_true", help="a tiny model and single digits, to test the script")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--bound", type=int, default=2, help="staleness bound of the asynchronous runs")
    parser.add_argument(
        "--marks", type=float, nargs="+", default=[0.4, 0.5, 0.6], help="held-out accuracies; the highest ends a run"
    )
    parser.add_argument("--groups", type=int, default=96, help="groups of 8 episodes a step")
    parser.add_argument("--lr", type=float, default=2.5e-5)
    parser.add_argument("--rounds", type=int, default=2, help="questions of an episode")
    parser.add_argument("--turn-s", type=float, help="mean duration of the tool; default: measured and chosen")
    parser.add_argument(
        "--balance", type=float, default=1.25, help="generation alone over training alone, without --turn-s"
    )
    parser.add_argument("--evaluate-every", type=int, default=6, help="steps between evaluations")
    parser.add_argument("--workers", type=int, default=4, help="rollout worker processes of each run")
    parser.add_argument("--lanes", type=int, default=2, help="runs at the same time")
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit of the whole command")
    parser.add_argument("--limit-s", type=float, default=120.0, help="time limit of a run, from its command")
    parser.add_argument("--least-s", type=float, default=45.0, help="start no run if less time is left")
    parser.add_argument("--out", type=Path, default=Path("docs/results/asynchrony"), help="directory of the results")
    args = parser.parse_args()
    if not args.small and args.model is None:
        parser.error("--model is required without --small")
    with tempfile.TemporaryDirectory(prefix="rollbook-asynchrony-") as home:
        return Study(args, Path(home)).measure()


if __name__ == "__main__":
    sys.exit(main())
