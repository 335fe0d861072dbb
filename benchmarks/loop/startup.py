"""Start of a run: from `rollbook train` to its first trained step, in seconds and CPU seconds, by process and by milestone.

    python -m benchmarks.loop.startup                                   the demo
    python -m benchmarks.loop.startup --config run.toml                 another run, such as one on a GPU

The peer is the same run without the process template: each process imports torch itself. The two alternate, and medians are
compared. CPU seconds are read from the kernel until the first step is recorded, so they do not depend on other load. The first
start on a machine compiles kernels and reads files that later ones find in caches; it is printed, and the medians are over all.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.report import Figure, print_figures, print_status
from rollbook.dashboard.process_files import read_events
from rollbook.telemetry.metrics import read_metrics

DEMO = Path(__file__).parents[2] / "rollbook" / "demo"
POLL_S = 0.05
LIMIT_S = 600.0
FLOOR = 2.0
MILESTONES = (
    "run.started",
    "ledger.serving",
    "run.template.ready",
    "policy.serving",
    "trainer.restored",
    "policy.weights_published",
    "ledger.batch_decided",
    "ledger.step_acknowledged",
)
"""Events whose first occurrence is reported, in seconds since the command."""


@dataclass(frozen=True, slots=True)
class Start:
    wall_s: float
    cpu_s: dict[str, float]
    """By process."""
    reached_s: dict[str, float]
    """By milestone."""

    @property
    def total_cpu_s(self) -> float:
        return sum(self.cpu_s.values())


def measure(directory: Path, config: Path | None, *, has_template: bool) -> Start:
    """Start a run, wait for its first step, and kill it."""
    run = directory / "run"
    if config is None:
        shutil.copytree(DEMO, directory / "demo")
        config = directory / "demo" / "run.toml"
    command = [sys.executable, "-m", "rollbook", "train", str(config), "--run-dir", str(run)]
    command += ["--no-dashboard", "--set", f"run.process_template={str(has_template).lower()}"]
    began, clock = time.monotonic(), time.time()
    with (directory / "output.txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    used: dict[int, tuple[str, float]] = {}
    try:
        while not _has_trained(run):
            if process.poll() is not None or time.monotonic() > began + LIMIT_S:
                raise RuntimeError(f"the run trained no step:\n{(directory / 'output.txt').read_text()[-2000:]}")
            used.update(cpu_by_process(psutil.Process(process.pid)))
            time.sleep(POLL_S)
        wall_s = time.monotonic() - began
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        psutil.wait_procs(
            children, timeout=LIMIT_S
        )  # they end with the supervisor, and write to the directory until then
    cpu_s: dict[str, float] = defaultdict(float)
    for name, seconds in used.values():
        cpu_s[name] += seconds
    first: dict[str, float] = {}
    for event in reversed(read_events(run, levels=("info",))):
        first.setdefault(event["event"], event["time"] - clock)
    return Start(wall_s, dict(cpu_s), {name: round(first[name], 2) for name in MILESTONES if name in first})


def _has_trained(run: Path) -> bool:
    return any(row.get("step", 0) >= 1 for row in read_metrics(run / "metrics.jsonl", process="trainer"))


def cpu_by_process(supervisor: psutil.Process) -> dict[int, tuple[str, float]]:
    """CPU seconds of all processes of a run so far, with the name of each."""
    found = {}
    for process in (supervisor, *supervisor.children(recursive=True)):
        try:
            times, command = process.cpu_times(), process.cmdline()
        except psutil.Error:
            continue
        found[process.pid] = (process_name(command), times.user + times.system)
    return found


def process_name(command: list[str]) -> str:
    if "--role" in command:
        return command[command.index("--role") + 1]
    modules = {
        "train": "supervisor",
        "rollbook.rollout.workers.main": "worker",
        "rollbook.run.preflight.checks": "pre-flight",
        "rollbook.concurrency.child_process.template_main": "template",
    }
    return next((name for module, name in modules.items() if module in command), "other")


def _figure(name: str, unit: str, ours: list[float], peer: list[float], floor: float | None, **more: object) -> Figure:
    mine, theirs = statistics.median(ours), statistics.median(peer)
    spread = {
        "spread": [round(min(ours), 2), round(max(ours), 2)],
        "peer_spread": [round(min(peer), 2), round(max(peer), 2)],
    }
    return Figure(
        name=name, ours=mine, peer=theirs, unit=unit, ratio=theirs / mine, floor=floor, more={**spread, **more}
    )


def _median_by_process(starts: list[Start]) -> dict[str, float]:
    names = sorted({name for start in starts for name in start.cpu_s})
    return {name: round(statistics.median(start.cpu_s.get(name, 0.0) for start in starts), 2) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--config", type=Path, help="the run to start (default: the demo)")
    args = parser.parse_args()
    starts: dict[bool, list[Start]] = {True: [], False: []}
    for _ in range(args.repetitions):
        for has_template, found in starts.items():
            with tempfile.TemporaryDirectory(prefix="rollbook-startup-") as directory:
                found.append(measure(Path(directory), args.config, has_template=has_template))
            start, kind = found[-1], "with template" if has_template else "without"
            print_status(f"{kind}: {start.wall_s:.1f} s, CPU {start.total_cpu_s:.1f} s {_median_by_process([start])}")
            print_status(f"  reached: {start.reached_s}")
    ours, peer = starts[True], starts[False]
    figures = [
        _figure(
            "startup_cpu",
            "CPU s",
            [start.total_cpu_s for start in ours],
            [start.total_cpu_s for start in peer],
            FLOOR,
            by_process=_median_by_process(ours),
            peer_by_process=_median_by_process(peer),
        ),
        _figure(
            "startup_wall",
            "s",
            [start.wall_s for start in ours],
            [start.wall_s for start in peer],
            None,
            reached=[start.reached_s for start in ours],
        ),
    ]
    return print_figures(figures, repetitions=args.repetitions, load=os.getloadavg()[0])


if __name__ == "__main__":
    sys.exit(main())
