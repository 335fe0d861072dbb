"""Compares `rollbook simulate` with reality: the demo in 20 settings, of which 12 are predicted from the traces of the other 8.

Four workloads: the demo as it is, with slow environments, with environments of log-normal duration, and with long training steps.
Each has two traced settings; the durations fitted to their traces predict the others, which differ in workers, replicas, groups in
flight, staleness bound and batch policy. Then the recommended settings of two workloads are run too. Every run has two cores, so
a machine with 16 cores runs eight at once. Runs are killed after their time: a trace needs no end.
"""

import argparse
import functools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.pinned_jobs import run_pinned
from benchmarks.report import Figure, print_figures, print_status
from rollbook.commands.record.simulate import trace_of
from rollbook.contracts.errors import RollbookError
from rollbook.contracts.freshness import FreshnessRule
from rollbook.run.config.run import override_table
from rollbook.run.directory import RunDirectory
from rollbook.simulation.durations import Durations
from rollbook.simulation.fit import Fit, fit
from rollbook.simulation.prediction import Prediction, predict, recommend
from rollbook.simulation.setting import Setting
from rollbook.simulation.trace import Trace
from rollbook.telemetry.metrics import read_metrics

DEMO = Path(__file__).parents[2] / "rollbook" / "demo"
WORKLOADS: dict[str, tuple[float, float, float]] = {
    "plain": (0.0, 0.0, 0.0),
    "slow_env": (0.15, 0.0, 0.0),
    "tails": (0.15, 1.0, 0.006),
    "slow_steps": (0.0, 0.0, 0.012),
}
"""Seconds of a turn, shape of their distribution, and additional seconds of training for each sample."""
SEEDS = 3
START_S = 240.0
"""Time limit for the first step of a run."""
LEAST_STEPS = 24
"""A run with slow steps takes longer than the others, up to twice as long: a few steps with heavy tails have no stable mean."""
MEDIAN_FLOOR, WORST_FLOOR, GAIN_FLOOR = 0.9, 0.75, 0.9


class RunFailedError(Exception):
    """A run that cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    workload: str
    in_flight: int
    bound: int
    policy: str
    workers: int = 1
    replicas: int = 1
    is_traced: bool = False
    """Its trace is used for the predictions. The others are held out."""

    @property
    def name(self) -> str:
        return f"{self.workload}-C{self.in_flight}-O{self.bound}-{self.policy}-w{self.workers}-r{self.replicas}"

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            f"gate.max_groups_in_flight={self.in_flight}",
            f"gate.max_head_offpolicy_versions={self.bound}",
            f'gate.batch_policy="{self.policy}"',
            f"rollout.workers={self.workers}",
            f"inference.replicas={self.replicas}",
        )


CASES = (
    *(Case(workload=name, in_flight=48, bound=2, policy="wait", is_traced=True) for name in WORKLOADS),
    Case(workload="plain", in_flight=16, bound=0, policy="wait", workers=2, replicas=2, is_traced=True),
    Case(workload="slow_env", in_flight=16, bound=0, policy="wait", workers=2, is_traced=True),
    Case(workload="tails", in_flight=32, bound=1, policy="parts", replicas=2, is_traced=True),
    Case(workload="slow_steps", in_flight=16, bound=0, policy="wait", replicas=2, is_traced=True),
    Case(workload="plain", in_flight=32, bound=1, policy="parts"),
    Case(workload="plain", in_flight=16, bound=2, policy="trim", workers=2),
    Case(workload="plain", in_flight=80, bound=4, policy="drop", replicas=2),
    Case(workload="slow_env", in_flight=16, bound=2, policy="wait"),
    Case(workload="slow_env", in_flight=32, bound=1, policy="drop", replicas=2),
    Case(workload="slow_env", in_flight=80, bound=4, policy="parts", workers=2),
    Case(workload="tails", in_flight=48, bound=2, policy="parts"),
    Case(workload="tails", in_flight=48, bound=2, policy="drop", workers=2),
    Case(workload="tails", in_flight=80, bound=4, policy="trim"),
    Case(workload="slow_steps", in_flight=16, bound=1, policy="wait", workers=2),
    Case(workload="slow_steps", in_flight=8, bound=2, policy="drop"),
    Case(workload="slow_steps", in_flight=32, bound=1, policy="trim", replicas=2),
)
RECOMMENDED_FOR = ("slow_env", "tails")
"""Workloads whose first setting, the default, is compared with the recommended one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run did in its steady part."""

    steps: int
    steps_per_s: float
    samples_per_s: float
    lag_mean: float
    trainer_idle: float
    masked: float
    cores: float | None
    """That the run was allowed to use; None: not recorded."""

    @classmethod
    def of(cls, trace: Trace) -> "Measured":
        first_measured = 3 + trace.run.setting.rule.max_head_offpolicy_versions
        steps = [step for step in trace.steps if step.step >= first_measured]
        if len(steps) < 3:
            raise RunFailedError(f"{trace.path}: {len(steps)} measured steps are too few; use more --seconds")
        seconds = steps[-1].end - steps[0].end
        numbers = {step.step for step in steps[1:]}
        rows = [row for row in read_metrics(trace.path / "metrics.jsonl", process="trainer") if row["step"] in numbers]
        tokens = sum(step.tokens for step in steps[1:])
        return cls(
            steps=len(steps) - 1,
            steps_per_s=(len(steps) - 1) / seconds,
            samples_per_s=sum(step.samples for step in steps[1:]) / seconds,
            lag_mean=statistics.mean(row["async/version_offset_mean"] for row in rows),
            trainer_idle=1.0 - sum(step.end - step.start for step in steps[1:]) / seconds,
            masked=sum(row["async/masked_tokens"] for row in rows) / max(1, tokens),
            cores=None if trace.cpu is None else trace.cpu.cores,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    case: Case
    measured: Measured
    predicted: Mapping[str, Any] = field(default_factory=dict)
    error: float = 0.0
    """Of the samples per second, relative."""


def config_table(case: Case) -> dict[str, Any]:
    table = tomllib.loads((DEMO / "run.toml").read_text(encoding="utf-8"))
    turn_s, shape, sample_s = WORKLOADS[case.workload]
    table["trainer"] |= {"max_steps": 100_000, "checkpoint_every": 100_000, "schedule": "constant"}
    if turn_s:
        table["env"] = {"name": "twin_workload:SlowGame", "args": {"turn_s": turn_s, "shape": shape}}
    if sample_s:
        for unread in ("clip_low", "clip_high", "entropy_bonus"):
            table["trainer"].pop(unread, None)
        table["trainer"] |= {
            "loss": "twin_workload:sleeping_loss",
            "loss_options": {"sample_s": sample_s},
            "advantage": "group",
            "reduction": "token_mean",
        }
    for text in case.overrides:
        if (fault := override_table(table, text)) is not None:
            raise SystemExit(str(fault))
    return table


def run(case: Case, home: Path, *, seconds: float) -> Path:
    """Run the case until it has trained for so many seconds. Returns the run directory; one that is there is kept."""
    folder = home / case.name
    done = folder / "done"
    directory = RunDirectory(folder / "run")
    if done.exists():
        return directory.path
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("twin_workload.py"), folder)
    shutil.copy(DEMO / "number_guessing.py", folder)
    (folder / "run.toml").write_text(tomli_w.dumps(config_table(case)), encoding="utf-8")
    command = [sys.executable, "-m", "rollbook", "train", str(folder / "run.toml"), "--run-dir", str(directory.path)]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen([*command, "--no-dashboard", "--no-preflight"], stdout=output, stderr=output)
        try:
            _wait_for_steps(process, directory, folder / "output")
            time.sleep(seconds)
            until = time.monotonic() + seconds
            while time.monotonic() < until and _trained_steps(directory) < LEAST_STEPS:
                time.sleep(0.5)
        finally:
            # The processes of a run end with their supervisor.
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(2.0)
    done.touch()
    return directory.path


def _wait_for_steps(process: "subprocess.Popen[bytes]", directory: RunDirectory, output: Path) -> None:
    until = time.monotonic() + START_S
    while not _trained_steps(directory):
        if process.poll() is not None or time.monotonic() > until:
            shown = output.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise RunFailedError(f"{directory.path} did not train a step:\n{shown}")
        time.sleep(0.5)


def _trained_steps(directory: RunDirectory) -> int:
    return len(read_metrics(directory.metrics_file, process="trainer"))


def run_all(cases: Sequence[Case], home: Path, *, seconds: float) -> dict[Case, Trace]:
    """A run that fails is reported and left out."""

    def one(case: Case) -> tuple[Case, Trace]:
        return case, trace_of(run(case, home, seconds=seconds))

    found: dict[Case, Trace] = {}
    for job in run_pinned([functools.partial(one, case) for case in cases]):
        try:
            case, trace = job.result()
            print_status(f"{case.name}: {Measured.of(trace).samples_per_s:.2f} samples/s measured")
            found[case] = trace
        except (RunFailedError, RollbookError) as error:
            print_status(str(error))
    return found


def predicted(setting: Setting, durations: Durations) -> list[Prediction]:
    return [predict(setting, durations, seed=seed, steps=60) for seed in range(SEEDS)]


def mean_speed(runs: Sequence[Prediction]) -> float:
    return statistics.mean(run.samples_per_s for run in runs)


def compare(case: Case, trace: Trace, fitted: Fit) -> Compared:
    runs, measured = predicted(trace.run.setting, fitted.durations), Measured.of(trace)
    row = {
        name: round(statistics.mean(getattr(run, name) for run in runs), 4)
        for name in ("steps_per_s", "samples_per_s", "lag_mean", "trainer_idle", "masked")
    }
    return Compared(case=case, measured=measured, predicted=row, error=mean_speed(runs) / measured.samples_per_s - 1.0)


def figures_of(compared: Sequence[Compared], gains: Mapping[str, tuple[float, float]]) -> Iterator[Figure]:
    """Errors, and the gain of the recommended settings over the default: predicted and measured."""
    held_out = [abs(one.error) for one in compared if not one.case.is_traced]
    for name, value, floor in (
        ("held out, median", statistics.median(held_out), MEDIAN_FLOOR),
        ("held out, worst", max(held_out), WORST_FLOOR),
    ):
        yield Figure(name=name, ours=value, peer=0.0, unit="error", ratio=1.0 - value, floor=floor)
    for workload, (expected, measured) in gains.items():
        yield Figure(
            name=f"recommended, {workload}",
            ours=expected,
            peer=measured,
            unit="x default",
            ratio=1.0 - abs(measured / expected - 1.0),
            floor=GAIN_FLOOR,
        )


def time_of_10_000_workers(durations: Durations) -> Figure:
    """CPU seconds to simulate 12 steps of 2,048 groups with 10,000 workers and 64 replicas."""
    rule = FreshnessRule(groups_per_step=2_048, max_in_flight=10_000, max_head_offpolicy_versions=4)
    setting = Setting(rule=rule, samples_per_group=8, slots=10_000, workers=10_000, replicas=64)
    began = time.process_time()
    predict(setting, durations, steps=12)
    seconds = time.process_time() - began
    return Figure(name="10,000 workers", ours=seconds, peer=60.0, unit="CPU s", ratio=60.0 / seconds, floor=1.0)


def recommended_cases(traces: Mapping[Case, Trace], fits: Mapping[str, Fit]) -> dict[Case, tuple[Case, float]]:
    """The recommended case of a default, and the predicted ratio of their samples per second."""
    found = {}
    for workload in RECOMMENDED_FOR:
        default = next(case for case in CASES if case.workload == workload)
        if default in traces and workload in fits:
            durations = fits[workload].durations
            setting = traces[default].run.setting
            better = recommend(predict(setting, durations, steps=60), durations)
            rule = better.setting.rule
            case = Case(
                workload=workload,
                in_flight=rule.max_in_flight,
                bound=rule.max_head_offpolicy_versions,
                policy=str(rule.policy),
            )
            speeds = [mean_speed(predicted(one, durations)) for one in (setting, better.setting)]
            found[case] = (default, speeds[1] / speeds[0])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=45.0, help="duration of a run, from its first step on")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--home", type=Path, help="folder of the runs; those that are there are not run again")
    parser.add_argument("--out", type=Path, help="also write the comparison as JSON to this file")
    args = parser.parse_args()
    home = args.home or Path(tempfile.mkdtemp(prefix="rollbook-twin-"))
    cases = [case for case in CASES if case.workload in args.workloads]
    traces = run_all(cases, home, seconds=args.seconds)
    traced = {
        workload: [trace for case, trace in traces.items() if case.workload == workload and case.is_traced]
        for workload in args.workloads
    }
    fits = {workload: fit(found) for workload, found in traced.items() if found}
    compared = [
        compare(case, traces[case], fits[case.workload]) for case in cases if case in traces and case.workload in fits
    ]
    for one in sorted(compared, key=lambda found: found.case.is_traced):
        print_status(
            f"{'traced  ' if one.case.is_traced else 'held out'} {one.case.name:<34} measured {one.measured.samples_per_s:8.2f}, "
            f"predicted {one.predicted['samples_per_s']:8.2f} samples/s: {one.error:+.1%}; lag {one.measured.lag_mean:.2f} "
            f"({one.predicted['lag_mean']:.2f}), trainer idle {one.measured.trainer_idle:.0%} ({one.predicted['trainer_idle']:.0%})"
        )
    better = recommended_cases(traces, fits)
    rerun = run_all([case for case in better if case not in traces], home, seconds=args.seconds)
    gains = {}
    for case, (default, expected) in better.items():
        if case not in traces and case not in rerun:
            continue
        own, base = Measured.of({**traces, **rerun}[case]), Measured.of(traces[default])
        gains[case.workload] = (expected, own.samples_per_s / base.samples_per_s)
        print_status(f"recommended for {case.workload}: {case.name}: {gains[case.workload]} (predicted, measured)")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(one) for one in compared]
        args.out.write_text(json.dumps({"cases": rows, "gains": gains}, indent=1) + "\n", encoding="utf-8")
    scale = time_of_10_000_workers(next(iter(fits.values())).durations)
    return print_figures([*figures_of(compared, gains), scale])


if __name__ == "__main__":
    sys.exit(main())
