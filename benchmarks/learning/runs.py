"""Starts `rollbook train`, stops it at a target accuracy or a time limit, and reads its learning curve from the run directory."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.report import print_status
from rollbook.run.directory import RunDirectory
from rollbook.run.reader import open_run
from rollbook.telemetry.events import read_json_lines
from rollbook.telemetry.metrics import read_metrics

POLL_S = 1.0
START_S = 240.0
"""Maximum time from the command to the first step."""
PROGRESS_S = 10.0
END_S = 90.0
"""Maximum time from an interrupt to the end of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """When a run is stopped: after `in_a_row` evaluations at or above a held-out accuracy of `mark`, after `limit_s` or `steps` of
    training, or `total_s` after its command. It may end earlier."""

    mark: float | None = None
    in_a_row: int = 1
    limit_s: float = 1e9
    steps: int = 1_000_000
    total_s: float = 1e9
    needs_checkpoint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRun:
    name: str
    directory: Path
    steps: list[dict[str, Any]] = field(repr=False)
    """The trainer's metrics, one row per step."""
    curve: list[tuple[int, float, float]]
    """Held-out accuracy: step, seconds of training, solved fraction."""
    start_s: float
    """From the command to the first group: imports, loading, compiling."""
    first_step_s: float
    """From the first group to the first published step, including compilation on first use."""
    step_s: float
    """Median seconds from one published step to the next."""
    raw_s: float
    """From the first group to the last step."""
    audit_ok: bool
    max_lag: int | None
    dropped: float
    """Share of the groups that became stale."""

    def at_mark(self, mark: float, *, in_a_row: int = 1) -> tuple[int, float] | None:
        """Step and training seconds of the first evaluation at or above the mark, if the next ones confirm it."""
        first = first_in_a_row([solved for _, _, solved in self.curve], mark, in_a_row)
        return None if first is None else self.curve[first][:2]

    def wall_s(self, step: int) -> float:
        """Seconds from the command to this step, start and compilation included."""
        return self.start_s + self.raw_s - float(self.steps[-1]["time"] - self.steps[step - 1]["time"])

    def mean_of(self, metric: str, *, skip: int = 3) -> float:
        values = [row[metric] for row in self.steps[skip:] if row.get(metric) is not None]
        return statistics.fmean(values) if values else float("nan")

    def row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "steps": len(self.steps),
            "start_s": round(self.start_s, 2),
            "first_step_s": round(self.first_step_s, 2),
            "step_s": round(self.step_s, 4),
            "raw_s": round(self.raw_s, 2),
            "audit_ok": self.audit_ok,
            "max_lag": self.max_lag,
            "curve": [(step, round(at_s, 2), round(solved, 4)) for step, at_s, solved in self.curve],
            "reward": [round(row["rollout/reward"], 4) for row in self.steps if row["rollout/reward"] is not None],
            **{
                name.split("/")[1]: round(self.mean_of(name), 4)
                for name in (
                    "perf/sample_wait_time",
                    "perf/train_time",
                    "perf/weight_sync_time",
                    "rollout/response_len",
                    "train/entropy",
                    "train/mean_kl",
                )
            },
        }


def first_in_a_row(values: Sequence[float], mark: float, count: int) -> int | None:
    """Index of the first of `count` successive values at or above the mark."""
    for first in range(len(values) - count + 1):
        if all(value >= mark for value in values[first : first + count]):
            return first
    return None


OnPoll = Callable[[int, int], None]
"""Called about once a second with the pid of the supervisor and the number of trained steps."""


def train(
    name: str,
    table: Mapping[str, Any],
    home: Path,
    stop: Stop,
    *,
    on_poll: OnPoll | None = None,
    module: str = "rollbook",
    environment: Mapping[str, str] | None = None,
) -> LearningRun:
    """Write the config, start the run, wait for the stop condition, stop it and read its results.

    `module`: whose main function is the command line. `environment`: further variables of the run.
    """
    source = home / f"{name}.toml"
    source.write_text(tomli_w.dumps(dict(table)), encoding="utf-8")
    directory = home / name
    shutil.rmtree(directory, ignore_errors=True)
    command = train_command(source, directory, module=module)
    env = {**os.environ, **(environment or {})}
    # A benchmark that is ended must end its run, too: the run is in another process session.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    began = time.time()
    with (home / f"{name}.out").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=env)
        try:
            _wait_for_stop(process, directory, stop, name, on_poll)
        finally:
            interrupt(process, directory, needs_checkpoint=stop.needs_checkpoint)
    _print_deaths(name, (home / f"{name}.out").read_text(), directory)
    if not read_metrics(directory / "metrics.jsonl", process="trainer"):
        raise RuntimeError(f"{name}: no step was trained\n{(home / f'{name}.out').read_text()[-3000:]}")
    return _read(name, directory, began)


def _print_deaths(name: str, output: str, directory: Path) -> None:
    """Why processes of the run died: what the run printed, and the end of what they wrote to stderr."""
    deaths = [line for line in output.splitlines() if "it is started again" in line or "died" in line]
    for line in deaths:
        print_status(f"  {name}: {line}")
    for path in sorted((directory / "logs").glob("*.stderr")) if deaths else ():
        if written := path.read_text(errors="replace").strip():
            print_status(f"  {name}: the end of {path.name}:\n{written[-2000:]}")


def train_command(source: Path, directory: Path, *, module: str = "rollbook") -> list[str]:
    options = ["--no-dashboard", "--no-preflight", "--run-dir", str(directory)]
    return [sys.executable, "-m", module, "train", *options, str(source)]


def _wait_for_stop(
    process: subprocess.Popen[bytes], directory: Path, stop: Stop, name: str, on_poll: OnPoll | None
) -> None:
    began = reported = time.monotonic()
    num_printed = 0
    first: float | None = None
    while process.poll() is None:
        time.sleep(POLL_S)
        rows = read_metrics(directory / "metrics.jsonl")
        trained = [row for row in rows if row["process"] == "trainer"]
        if on_poll is not None:
            on_poll(process.pid, len(trained))
        elapsed = time.monotonic() - began
        if time.monotonic() - reported > PROGRESS_S:
            reported = time.monotonic()
            print_status(f"  {name}: {elapsed:.0f} s, {len(trained)} steps")
        if elapsed > stop.total_s or (not trained and elapsed > START_S):
            return
        if not trained:
            continue
        first = first or time.monotonic()
        evaluated = [row for row in rows if row["process"] == "evaluation"]
        for row in evaluated[num_printed:]:
            after_s = row["time"] - trained[0]["time"]
            print_status(
                f"  {name}: step {row['step']:4d}  held-out {row['eval/solved']:.1%}  {after_s:.1f} s after step 1"
            )
        num_printed = len(evaluated)
        solved = [row["eval/solved"] for row in evaluated]
        if stop.mark is not None and first_in_a_row(solved, stop.mark, stop.in_a_row) is not None:
            return
        if time.monotonic() - first > stop.limit_s or len(trained) >= stop.steps:
            return


def interrupt(process: subprocess.Popen[bytes], directory: Path, *, needs_checkpoint: bool = False) -> None:
    """The first interrupt writes a checkpoint; the second one stops the run at once. The run draws no plots."""
    for _ in range(1 if needs_checkpoint else 2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
    log, until = RunDirectory(directory).log_file("supervisor"), time.monotonic() + END_S
    while process.poll() is None and time.monotonic() < until:
        if any(row["event"] == "run.ended" for row in read_json_lines(log)):
            break
        time.sleep(0.2)
    process.kill()
    process.wait()


def _read(name: str, directory: Path, began: float) -> LearningRun:
    rows = read_metrics(directory / "metrics.jsonl")
    steps = [row for row in rows if row["process"] == "trainer"]
    at = {int(row["step"]): float(row["time"]) for row in steps}
    with open_run(directory) as run:
        opened = run.groups(limit=1)[0].opened_at
        status = run.status()
    # In a separate process: audits of several runs in this one would wait for each other.
    audit = json.loads(
        subprocess.run(
            [sys.executable, "-m", "rollbook", "audit", "--json", str(directory)], capture_output=True, check=False
        ).stdout
    )
    times = [at[step] for step in sorted(at)]
    periods = [after - before for before, after in pairwise(times[1:])]
    step_s = statistics.median(periods) if periods else times[0] - opened
    # Compilation does not count: the first step and filling the pipeline before it count as one median step each.
    zero = times[0] - 2 * step_s
    curve = [
        (int(row["step"]), max(0.0, at[int(row["step"])] - zero), float(row["eval/solved"]))
        for row in rows
        if row["process"] == "evaluation" and int(row["step"]) in at
    ]
    before = [
        (0, 0.0, float(row["eval/solved"])) for row in rows if row["process"] == "evaluation" and row["step"] == 0
    ]
    return LearningRun(
        name=name,
        directory=directory,
        steps=steps,
        curve=[*before, *curve],
        start_s=opened - began,
        first_step_s=times[0] - opened,
        step_s=step_s,
        raw_s=times[-1] - opened,
        audit_ok=audit["ok"],
        max_lag=audit["max_lag"],
        dropped=status.dropped.get("stale", 0) / max(1, status.opened),
    )


def save(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
