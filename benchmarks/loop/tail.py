"""Measures the four batch policies on the real loop with episodes of log-normal duration, next to the simulation.

Every cell is a separate run: a staleness bound, a shape of the durations (0: all equal) and a policy, with 8 groups of 8 episodes
in a step and all (O + 1) steps' groups in flight. Environments and training sleep, so the figures are those of the loop, not those
of a model. Speed is relative to an ideal loop, in which a step takes as long as its training, or as its episodes need in the slots
there are. The first steps fill the pipeline and are not counted.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Chart

from benchmarks.loop.tail_simulation import Outcome, Workload, simulate
from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.freshness import BatchPolicy
from rollbook.dashboard.run_files import METRICS_FILE
from rollbook.run.config.run import load_config
from rollbook.run.directory import RunDirectory
from rollbook.run.record import open_run
from rollbook.run.supervision.supervisor import RunEnd, Supervisor
from rollbook.telemetry.events import EventLog, read_json_lines

SHAPES = (0.0, 0.5, 1.0, 1.5)
BOUNDS = (1, 2, 4)
TURNS = 3
COLOURS = {"wait": "#b3382c", "drop": "#d9a441", "trim": "#3b6ea8", "parts": "#2f8f5b"}
JUDGED_BOUND, JUDGED_SHAPE = 2, 1.0
FLOOR_OF_IDEAL, FLOOR_OVER_WAIT, FLOOR_OVER_DROP = 0.9, 2.0, 1.3
"""What `parts` must reach with a staleness bound of 2: relative to the ideal at every shape, and to two policies at shape 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run, with what the simulation says about it."""

    policy: str
    max_head_offpolicy_versions: int
    shape: float
    speed: float
    masked: float
    dropped: float
    step_s: float
    train_s: float
    """Training time of P * n samples."""
    max_lag: int
    simulated: Outcome


def config_table(policy: BatchPolicy, load: Workload, *, steps: int, train_s: float, seed: int) -> dict[str, Any]:
    bound = load.max_head_offpolicy_versions
    quorum = {"quorum": load.quorum} if policy is BatchPolicy.PARTS else {}
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
        "tasks": {"source": "tail_rollout:tasks", "args": {"count": 64}},
        "env": {
            "name": "tail_rollout:SleepingEnvironment",
            "args": {"mean_s": load.mean * train_s, "shape": load.shape, "turns": TURNS, "seed": seed},
        },
        "rollout": {
            "function": "tail_rollout",
            "completions_per_prompt": load.group_size,
            "max_seconds": 1000.0,
            "step_s": 1000.0,
            "drop_constant_reward": False,
            "sampling": {"max_tokens": 2},
            **quorum,
        },
        "gate": {
            "groups_per_step": load.groups_per_step,
            "max_groups_in_flight": (bound + 1) * load.groups_per_step,
            "max_head_offpolicy_versions": bound,
            "batch_policy": str(policy),
            "group_deadline_s": 2000.0,
        },
        "inference": {"max_running": load.slots, "max_queued": load.slots},
        "ledger": {"durability": "process_crash"},
        "trainer": {
            "max_steps": steps,
            "lr": 1e-7,
            "checkpoint_every": 1000,
            "threads": 1,
            "loss": "tail_rollout:sleeping_loss",
            "advantage": "group",
            "reduction": "token_mean",
            "loss_options": {"sample_s": train_s / load.samples_per_step},
        },
    }


async def measure_cell(
    home: Path, policy: BatchPolicy, load: Workload, *, steps: int, warm_up: int, train_s: float, seed: int
) -> Cell:
    shutil.copy(Path(__file__).with_name("tail_rollout.py"), home)
    source = home / "run.toml"
    source.write_text(
        tomli_w.dumps(config_table(policy, load, steps=warm_up + steps, train_s=train_s, seed=seed)), encoding="utf-8"
    )
    config = load_config(source).config
    directory = RunDirectory(home / "run")
    directory.prepare()
    shutil.copy(source, directory.config_file)
    directory.write_manifest(name="tail", source_dir=home)
    outcome = await Supervisor(config, directory, log=EventLog("supervisor", directory.log_file("supervisor"))).run()
    if outcome.end is not RunEnd.FINISHED:
        raise SystemExit(f"{policy}: {outcome.end}: {outcome.message}")
    return read_cell(directory, policy, load, warm_up=warm_up)


def read_cell(directory: RunDirectory, policy: BatchPolicy, load: Workload, *, warm_up: int) -> Cell:
    with open_run(directory.path) as run:
        audit, status, steps = run.audit(), run.status(), run.steps()
        mean_s = run.config.env.args["mean_s"]
    if not audit.ok:
        raise SystemExit(f"{policy}: the audit failed: {audit.violations}")
    rows = [row for row in read_json_lines(directory.path / METRICS_FILE) if row.get("step", 0) > warm_up]
    rows = [row for row in rows if "perf/train_time" in row]
    samples = sum(row["rollout/samples"] for row in rows)
    batches = samples / load.samples_per_step
    # Samples without a token left are not trained and take no time. The ideal trains all samples of a full batch.
    sequences = sum(row["train/sequences"] for row in rows)
    train_s = sum(row["perf/train_time"] for row in rows) / sequences * load.samples_per_step
    seconds = steps[-1].at - steps[warm_up - 1].at
    ideal_s = max(train_s, mean_s * load.samples_per_step / load.slots)
    trainable = sum(row["train/tokens"] + row.get("async/masked_tokens", 0) for row in rows)
    return Cell(
        policy=str(policy),
        max_head_offpolicy_versions=load.max_head_offpolicy_versions,
        shape=load.shape,
        speed=batches * ideal_s / seconds,
        masked=sum(row.get("async/masked_tokens", 0) for row in rows) / trainable,
        dropped=status.dropped.get("stale", 0) / max(1, status.opened),
        step_s=seconds / len(rows),
        train_s=train_s,
        max_lag=audit.max_lag or 0,
        # The simulated training step takes 1.
        simulated=simulate(policy, replace(load, mean=mean_s / train_s), steps=200),
    )


def figures_of(cells: Sequence[Cell]) -> Iterator[Figure]:
    """Our speed against the simulated one, and for the judged bound the floors of `parts`."""
    speeds = {key: statistics.mean(c.speed for c in group) for key, group in grouped(cells).items()}
    for (bound, shape, policy), speed in speeds.items():
        same = grouped(cells)[bound, shape, policy]
        is_judged = policy == "parts" and bound == JUDGED_BOUND
        yield Figure(
            name=f"{policy}, bound {bound}, shape {shape:g}",
            ours=speed,
            peer=same[0].simulated.speed,
            unit="of ideal",
            ratio=speed,
            floor=FLOOR_OF_IDEAL if is_judged else None,
            more={
                "runs": len(same),
                "spread": [round(min(c.speed for c in same), 3), round(max(c.speed for c in same), 3)],
                "masked": round(statistics.mean(c.masked for c in same), 4),
                "dropped": round(statistics.mean(c.dropped for c in same), 4),
                "train_s": round(statistics.mean(c.train_s for c in same), 4),
                "step_s": round(statistics.mean(c.step_s for c in same), 4),
                "max_lag": max(c.max_lag for c in same),
                "simulated": asdict(same[0].simulated),
            },
        )
    parts = speeds.get((JUDGED_BOUND, JUDGED_SHAPE, "parts"))
    for other, floor in (("wait", FLOOR_OVER_WAIT), ("drop", FLOOR_OVER_DROP)):
        theirs = speeds.get((JUDGED_BOUND, JUDGED_SHAPE, other))
        if parts is not None and theirs is not None:
            yield Figure(
                name=f"parts over {other}", ours=parts, peer=theirs, unit="of ideal", ratio=parts / theirs, floor=floor
            )


def grouped(cells: Sequence[Cell]) -> dict[tuple[int, float, str], list[Cell]]:
    found: dict[tuple[int, float, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.max_head_offpolicy_versions, cell.shape, cell.policy), []).append(cell)
    return found


def draw(path: Path, cells: Sequence[Cell]) -> None:
    """Speed over shape, one panel per staleness bound: points are measured, lines are simulated."""
    bounds = sorted({cell.max_head_offpolicy_versions for cell in cells})
    chart = Chart(figsize=(3.6 * len(bounds) + 1.4, 3.4), layout="constrained")
    FigureCanvasSVG(chart)
    for number, bound in enumerate(bounds):
        axes = chart.add_subplot(1, len(bounds), number + 1)
        for policy, colour in COLOURS.items():
            own = [c for c in cells if c.max_head_offpolicy_versions == bound and c.policy == policy]
            lines = sorted({c.shape: c.simulated.speed for c in own}.items())
            axes.plot([x for x, _ in lines], [y for _, y in lines], color=colour, linewidth=1.2, alpha=0.6)
            axes.plot([c.shape for c in own], [c.speed for c in own], "o", color=colour, markersize=5, label=policy)
        axes.set_title(f"staleness bound {bound}", loc="left", fontsize=10)
        axes.set_xlabel("shape of the episode times")
        axes.set_ylim(0, 1.08)
        axes.grid(color="#dddddd", linewidth=0.6)
    chart.axes[0].set_ylabel("speed (1: the ideal loop)")
    chart.axes[0].legend(loc="lower left", frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=float, nargs="+", default=SHAPES, help="sigma of the logarithm of a duration")
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS, help="staleness bounds")
    parser.add_argument("--policies", nargs="+", default=list(BatchPolicy), choices=list(BatchPolicy))
    parser.add_argument("--mean", type=float, default=0.75, help="mean duration of an episode, in training steps")
    parser.add_argument("--runs", type=int, default=3, help="runs of each cell")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a run")
    parser.add_argument("--warm-up", type=int, default=6, help="steps before the measurement")
    parser.add_argument("--train-s", type=float, default=1.0, help="duration of a training step, in seconds")
    parser.add_argument("--out", type=Path, help="also write the cells as JSON and the chart as SVG to this folder")
    args = parser.parse_args()
    cells: list[Cell] = []
    for bound in args.bounds:
        for shape in args.shapes:
            load = Workload(max_head_offpolicy_versions=bound, mean=args.mean, shape=shape)
            for policy in map(BatchPolicy, args.policies):
                for seed in range(args.runs):
                    with tempfile.TemporaryDirectory(prefix="rollbook-tail-") as home:
                        cell = asyncio.run(
                            measure_cell(
                                Path(home),
                                policy,
                                load,
                                steps=args.steps,
                                warm_up=args.warm_up,
                                train_s=args.train_s,
                                seed=seed,
                            )
                        )
                    cells.append(cell)
                    print_status(
                        f"bound {bound} shape {shape:g} {policy}: speed {cell.speed:.2f} (simulated {cell.simulated.speed:.2f}),"
                        f" masked {cell.masked:.1%} ({cell.simulated.masked:.1%}), dropped {cell.dropped:.1%}"
                        f" ({cell.simulated.dropped:.1%}), {cell.step_s:.2f} s a step, {cell.train_s:.2f} s of it training"
                    )
                    if args.out is not None:
                        args.out.mkdir(parents=True, exist_ok=True)
                        rows = [asdict(one) for one in cells]
                        (args.out / "tail.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                        draw(args.out / "tail.svg", cells)
    return print_figures(list(figures_of(cells)))


if __name__ == "__main__":
    sys.exit(main())
