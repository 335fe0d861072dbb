"""Measures the four batch policies on the real loop with episodes of log-normal duration, next to the simulation.

Every cell is a staleness bound, a shape of the durations (0: all equal) and a policy, with 8 groups of 8 episodes in a step and all
(O + 1) steps' groups in flight. Environments and training sleep, so the figures are those of the loop, not those of a model. Speed
is relative to an ideal loop, in which a step takes as long as its training, or as its episodes need in the slots there are. The
first steps fill the pipeline and are not counted. The run is stopped before it would drain it. The simulation has the durations and
the training time of the measured run.

Two runs at once share two cores: they mostly sleep. Results are added to the report when a run ends; the same command
continues with the runs that are missing.
"""

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from benchmarks.learning.runs import interrupt, train_command
from benchmarks.loop.tail_simulation import Outcome, Simulation, Workload
from benchmarks.pinned_jobs import run_pinned
from benchmarks.report import Figure, machine, print_figures, print_status
from rollbook.contracts.freshness import BatchPolicy
from rollbook.run.reader import RecordedRun, open_run
from rollbook.telemetry.metrics import read_metrics

SHAPES = (0.0, 0.5, 1.0, 1.5)
BOUNDS = (1, 2, 4)
REPORT = "tail.json"
POLL_S = 0.2
START_S = 20.0
"""Expected time to start and stop a run."""
JOBS_EACH = 2
"""Runs at once on two cores."""
JUDGED_BOUND, JUDGED_SHAPE = 2, 1.0
FLOOR_OF_IDEAL, FLOOR_OVER_WAIT, FLOOR_OVER_DROP = 0.9, 2.0, 1.3
"""What `parts` must reach with a staleness bound of 2: relative to the ideal at every shape, and to two policies at shape 1."""
FLOOR_OF_AGREEMENT = 0.9
"""The smaller of measured and simulated speed over the larger, in every cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run does. Runs with the same number have the same durations under every policy."""

    policy: BatchPolicy
    load: Workload
    run: int
    steps: int
    warm_up: int
    train_s: float
    """Nominal duration of a training step."""

    @property
    def name(self) -> str:
        return (
            f"bound {self.load.max_head_offpolicy_versions}, shape {self.load.shape:g}, {self.policy}, run {self.run}"
        )

    @property
    def durations(self) -> list[list[float]]:
        """In training steps. More groups than any policy opens: `drop` needs one more for each group that it drops."""
        steps = self.warm_up + self.steps + self.load.max_head_offpolicy_versions + 1
        return self.load.durations(2 * steps * self.load.groups_per_step, seed=self.run)

    @property
    def expected_s(self) -> float:
        """Duration of all steps in the simulation."""
        return Simulation(self.policy, self.load, self.durations).run(self.steps + self.warm_up).duration * self.train_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    speed: float
    masked: float
    dropped: float
    step_s: float
    train_s: float
    """Training time of P * n samples."""
    episode_s: float
    """Mean duration of an episode."""
    overhead_s: float
    """What an episode takes in addition to its planned duration: the policy's responses, and a busy machine."""
    max_lag: int
    load_average: float
    simulated: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    plan: Plan
    measured: Measured


def config_table(plan: Plan) -> dict[str, Any]:
    load = plan.load
    bound = load.max_head_offpolicy_versions
    quorum = {"quorum": load.quorum} if plan.policy is BatchPolicy.PARTS else {}
    return {
        "run": {"name": "tail", "seed": 1},
        "model": {
            "build": {
                "hidden_size": 32,
                "layers": 1,
                "heads": 2,
                "kv_heads": 2,
                "intermediate_size": 64,
                "max_position_embeddings": 64,
                "vocabulary": [str(n) for n in range(16)],
            }
        },
        "tasks": {"source": "tasks.jsonl", "shuffle": False},
        "env": {"name": "tail_rollout:SleepingEnvironment", "args": {"turns": load.turns}},
        "rollout": {
            "function": "tail_rollout",
            "completions_per_prompt": load.group_size,
            "max_seconds": 1000.0,
            "step_s": 1000.0,
            "drop_constant_reward": False,
            "sampling": {"max_tokens": 1},
            **quorum,
        },
        "gate": {
            "groups_per_step": load.groups_per_step,
            "max_groups_in_flight": (bound + 1) * load.groups_per_step,
            "max_head_offpolicy_versions": bound,
            "batch_policy": str(plan.policy),
            "group_deadline_s": 2000.0,
        },
        "inference": {"max_running": load.slots, "max_queued": load.slots, "threads": 1},
        "ledger": {"durability": "process_crash"},
        "trainer": {
            # The run is stopped earlier: near its last step, the gate admits only what that step needs.
            "max_steps": 1_000_000,
            "lr": 1e-7,
            "checkpoint_every": 1000,
            "threads": 1,
            "loss": "tail_rollout:sleeping_loss",
            "advantage": "group",
            "reduction": "token_mean",
            "loss_options": {"sample_s": plan.train_s / load.samples_per_step},
        },
    }


def write_run(home: Path, plan: Plan) -> Path:
    """The config file, its tasks and its code."""
    shutil.copy(Path(__file__).with_name("tail_rollout.py"), home)
    with (home / "tasks.jsonl").open("w", encoding="utf-8") as tasks:
        for number, durations in enumerate(plan.durations):
            seconds = [duration * plan.train_s for duration in durations]
            tasks.write(json.dumps({"id": f"task-{number}", "number": number % 16, "seconds": seconds}) + "\n")
    source = home / "run.toml"
    source.write_text(tomli_w.dumps(config_table(plan)), encoding="utf-8")
    return source


def measure(plan: Plan, *, until: float) -> Cell | None:
    """None if the run would not end in time."""
    if time.monotonic() + plan.expected_s * 1.1 + START_S > until:
        return None
    with tempfile.TemporaryDirectory(prefix="rollbook-tail-") as name:
        home = Path(name)
        command = train_command(write_run(home, plan), home / "run")
        with (home / "output").open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
            try:
                is_done = wait_for_step(process, home / "run" / "metrics.jsonl", plan.warm_up + plan.steps)
            finally:
                interrupt(process, home / "run")
        if not is_done:
            raise RuntimeError(f"{plan.name} ended too early:\n{(home / 'output').read_text()[-3000:]}")
        return Cell(plan=plan, measured=read_run(home / "run", plan))


def wait_for_step(process: subprocess.Popen[bytes], metrics: Path, step: int) -> bool:
    """Whether the step was trained before the process ended."""
    while process.poll() is None:
        if any(row["step"] >= step for row in read_metrics(metrics, process="trainer")):
            return True
        time.sleep(POLL_S)
    return False


def read_run(directory: Path, plan: Plan) -> Measured:
    load = plan.load
    with open_run(directory) as run:
        audit, status, steps = run.audit(), run.status(), run.steps()
        episode_s, overhead_s = episode_times(run, plan)
    if not audit.ok:
        raise RuntimeError(f"{plan.name}: the audit failed: {audit.violations}")
    last = plan.warm_up + plan.steps
    rows = read_metrics(directory / "metrics.jsonl", process="trainer")
    rows = [row for row in rows if plan.warm_up < row["step"] <= last]
    batches = sum(row["rollout/samples"] for row in rows) / load.samples_per_step
    # Samples without a token left are not trained and take no time. The ideal trains all samples of a full batch.
    sequences = sum(row["train/sequences"] for row in rows)
    train_s = sum(row["perf/train_time"] for row in rows) / sequences * load.samples_per_step
    seconds = steps[last - 1].at - steps[plan.warm_up - 1].at
    masked = sum(row.get("async/masked_tokens") or 0 for row in rows)
    # The simulated training step takes 1.
    scale, overhead = plan.train_s / train_s, overhead_s / train_s
    durations = [[duration * scale + overhead for duration in group] for group in plan.durations]
    real = replace(load, mean=episode_s / train_s)
    return Measured(
        speed=batches * train_s * real.ideal_step / seconds,
        masked=masked / (masked + sum(row["train/tokens"] for row in rows)),
        dropped=status.dropped.get("stale", 0) / max(1, status.opened),
        step_s=seconds / len(rows),
        train_s=train_s,
        episode_s=episode_s,
        overhead_s=overhead_s,
        max_lag=audit.max_lag or 0,
        load_average=os.getloadavg()[0],
        simulated=Simulation(plan.policy, real, durations).run(plan.steps, warm_up=plan.warm_up),
    )


def episode_times(run: RecordedRun, plan: Plan) -> tuple[float, float]:
    """Mean duration of the episodes after the warm-up, and how much longer than planned they took on average."""
    planned = {f"task-{number}": durations for number, durations in enumerate(plan.durations)}
    first = run.steps()[plan.warm_up - 1].at
    seconds: dict[tuple[str, int], list[float]] = {}
    for group in run.groups(limit=1 << 20):
        if (outcome := group.outcome) is not None and group.opened_at >= first:
            taken = seconds.setdefault((group.task_id, group.draw), [])
            taken.extend(sample.seconds for sample in outcome.samples if sample.seconds is not None)
    # Parts of a group that are still played would make the mean too short.
    whole = [(task, taken) for (task, _), taken in seconds.items() if len(taken) == plan.load.group_size]
    if not whole:
        raise RuntimeError(f"{plan.name}: no group began and ended after the warm-up; take more steps")
    mean = statistics.fmean(second for _, taken in whole for second in taken)
    return mean, mean - plan.train_s * statistics.fmean(duration for task, _ in whole for duration in planned[task])


def figures_of(cells: Sequence[Cell]) -> Iterator[Figure]:
    """Our speed against the simulated one, and for the judged bound the floors of `parts`."""
    found: dict[tuple[int, float, str], list[Measured]] = {}
    for cell in cells:
        load = cell.plan.load
        found.setdefault((load.max_head_offpolicy_versions, load.shape, cell.plan.policy), []).append(cell.measured)
    speeds = {key: statistics.fmean(one.speed for one in same) for key, same in found.items()}
    simulated = {key: statistics.fmean(one.simulated.speed for one in same) for key, same in found.items()}
    for (bound, shape, policy), same in found.items():
        key = bound, shape, policy
        yield Figure(
            name=f"{policy}, bound {bound}, shape {shape:g}",
            ours=speeds[key],
            peer=simulated[key],
            unit="of ideal",
            ratio=speeds[key],
            floor=FLOOR_OF_IDEAL if policy == "parts" and bound == JUDGED_BOUND else None,
            more={
                "runs": len(same),
                "spread": [round(min(one.speed for one in same), 3), round(max(one.speed for one in same), 3)],
                **{
                    name: round(statistics.fmean(getattr(one, name) for one in same), 4)
                    for name in ("masked", "dropped", "train_s", "step_s", "episode_s", "overhead_s")
                },
                "max_lag": max(one.max_lag for one in same),
                "simulated_masked": round(statistics.fmean(one.simulated.masked for one in same), 4),
                "simulated_dropped": round(statistics.fmean(one.simulated.dropped for one in same), 4),
            },
        )
    agreements = {key: min(speeds[key] / simulated[key], simulated[key] / speeds[key]) for key in found}
    worst = min(agreements, key=lambda key: agreements[key])
    yield Figure(
        name="measured and simulated speed",
        ours=speeds[worst],
        peer=simulated[worst],
        unit="of ideal",
        ratio=agreements[worst],
        floor=FLOOR_OF_AGREEMENT,
        more={"cell": worst, "below_floor": sum(one < FLOOR_OF_AGREEMENT for one in agreements.values())},
    )
    parts = speeds.get((JUDGED_BOUND, JUDGED_SHAPE, "parts"))
    for other, floor in (("wait", FLOOR_OVER_WAIT), ("drop", FLOOR_OVER_DROP)):
        theirs = speeds.get((JUDGED_BOUND, JUDGED_SHAPE, other))
        if parts is not None and theirs is not None:
            yield Figure(
                name=f"parts over {other}", ours=parts, peer=theirs, unit="of ideal", ratio=parts / theirs, floor=floor
            )


def read_report(path: Path) -> list[Cell]:
    return msgspec.convert(json.loads(path.read_bytes())["cells"], list[Cell]) if path.exists() else []


def write_report(path: Path, cells: Sequence[Cell]) -> None:
    figures = [asdict(figure) for figure in figures_of(cells)]
    report = {"machine": machine(), "figures": figures, "cells": msgspec.to_builtins(list(cells))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".new").replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=float, nargs="+", default=SHAPES, help="sigma of the logarithm of a duration")
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS, help="staleness bounds")
    parser.add_argument("--policies", nargs="+", default=list(BatchPolicy), choices=list(BatchPolicy))
    parser.add_argument("--mean", type=float, default=0.75, help="mean duration of an episode, in training steps")
    parser.add_argument("--runs", type=int, default=3, help="runs of each cell")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a run")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before the measurement")
    parser.add_argument("--train-s", type=float, default=1.0, help="duration of a training step, in seconds")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no run that would end after this time")
    parser.add_argument("--out", type=Path, default=Path("runs/tail"), help="folder of the report (tail.json)")
    args = parser.parse_args()
    plans = [
        Plan(
            policy=policy,
            load=Workload(max_head_offpolicy_versions=bound, mean=args.mean, shape=shape),
            run=run,
            steps=args.steps,
            warm_up=args.warm_up,
            train_s=args.train_s,
        )
        for run in range(args.runs)
        for bound in args.bounds
        for shape in args.shapes
        for policy in map(BatchPolicy, args.policies)
    ]
    cells = read_report(args.out / REPORT)
    known = {cell.plan for cell in cells}
    # The judged cells first, then long runs, so that no long one is left at the end.
    missing = sorted(
        (plan for plan in plans if plan not in known),
        key=lambda plan: (plan.load.max_head_offpolicy_versions != JUDGED_BOUND, -plan.expected_s),
    )
    until = time.monotonic() + args.minutes * 60
    num_failed = num_late = 0
    jobs = [functools.partial(measure, plan, until=until) for plan in missing]
    for job in run_pinned(jobs, jobs_each=JOBS_EACH):
        if (error := job.exception()) is not None:
            num_failed += 1
            print_status(f"failed: {error}")
        elif (cell := job.result()) is None:
            num_late += 1
        else:
            cells.append(cell)
            write_report(args.out / REPORT, cells)
            one = cell.measured
            print_status(
                f"{cell.plan.name}: speed {one.speed:.2f} (simulated {one.simulated.speed:.2f}), masked {one.masked:.1%}"
                f" ({one.simulated.masked:.1%}), dropped {one.dropped:.1%} ({one.simulated.dropped:.1%}), {one.step_s:.2f} s"
                f" a step, {one.train_s:.2f} s of it training; episodes {one.overhead_s:+.3f} s"
            )
    print_status(f"{len(cells)} runs measured, {num_failed} failed, {num_late} left for the next call")
    if not cells:
        return 1
    return print_figures(list(figures_of(cells))) or (1 if num_failed or num_late else 0)


if __name__ == "__main__":
    sys.exit(main())
