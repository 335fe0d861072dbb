"""A long run of tiny steps: how fast do memory, descriptors, threads and files of each process grow?

Prints the growth per hour, a least-squares slope over the second half of the run, when caches are warm. Bounded by design: memory,
descriptors and threads. Growing with the number of steps by design: metrics.jsonl, logs, spans, and the ledger's rows (some hundred
bytes for each group); payloads, checkpoints and weights are deleted when no resume needs them.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.report import Figure, print_figures, print_status
from tests.parts.run.small import SmallRun

SETTINGS = ["trainer.max_steps=10000000", "env.args.step_s=0.0", "trainer.checkpoint_every=20"]
INTERVAL_S = 5.0
LONG_S = 600.0
# A process that leaks a kilobyte in each step grows by about 20 MB an hour.
MAX_MEMORY_MB_PER_HOUR = 20.0
MAX_DESCRIPTORS_PER_HOUR = 5.0
FOLDERS_IN_USE = ("checkpoints", "weights")
MAX_FOLDER_MB_PER_HOUR = 20.0

Series = dict[str, list[tuple[float, float]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollbook-soak-") as directory:
        run = SmallRun(Path(directory), SETTINGS).start()
        try:
            run.until(lambda: run.step() >= 5, what="step 5", within_s=LONG_S)
            series, steps = observe(run, args.minutes * 60)
        finally:
            run.stop()
    print_status(f"{steps} steps in {args.minutes:g} minutes")
    return print_figures(list(figures(series)), minutes=args.minutes, steps=steps)


def observe(run: SmallRun, seconds: float) -> tuple[Series, int]:
    series: Series = defaultdict(list)
    began, first_step = time.monotonic(), run.step()
    while (now := time.monotonic() - began) < seconds:
        for name, value in sample(run):
            series[name].append((now, value))
        if run.process.poll() is not None:
            raise SystemExit(f"the run ended with {run.process.returncode}")
        time.sleep(INTERVAL_S)
    return series, run.step() - first_step


def sample(run: SmallRun) -> Iterator[tuple[str, float]]:
    processes = {"supervisor": psutil.Process(run.process.pid)}
    for role in ("ledger", "policy", "rollout", "worker", "trainer"):
        if (pid := run.pid(role)) is not None:
            processes[role] = psutil.Process(pid)
    for name, process in processes.items():
        try:
            with process.oneshot():
                yield f"{name} memory_mb", process.memory_info().rss / 2**20
                yield f"{name} descriptors", process.num_fds()
                yield f"{name} threads", process.num_threads()
        except psutil.NoSuchProcess:
            continue
    for path in run.directory.iterdir():
        yield f"{path.name} file_mb", size_of(path) / 2**20


def size_of(path: Path) -> int:
    total = 0
    for file in path.rglob("*") if path.is_dir() else (path,):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # deleted while we look
            continue
    return total


def slope_per_hour(points: Sequence[tuple[float, float]]) -> float:
    """The least-squares slope over the second half of the points."""
    late = points[len(points) // 2 :]
    mean_at = sum(at for at, _ in late) / len(late)
    mean_value = sum(value for _, value in late) / len(late)
    spread = sum((at - mean_at) ** 2 for at, _ in late)
    return 3600 * sum((at - mean_at) * (value - mean_value) for at, value in late) / spread if spread else 0.0


def figures(series: Series) -> Iterator[Figure]:
    """`ours` is the growth per hour, `peer` its limit, if it has one; the ratio is at least 1 within the limit."""
    for name, points in sorted(series.items()):
        owner, unit = name.rsplit(" ", 1)
        limit = {"memory_mb": MAX_MEMORY_MB_PER_HOUR, "descriptors": MAX_DESCRIPTORS_PER_HOUR}.get(unit)
        if owner in FOLDERS_IN_USE:
            limit = MAX_FOLDER_MB_PER_HOUR
        growth = slope_per_hour(points)
        yield Figure(
            name=name,
            ours=round(growth, 3),
            peer=limit or 0.0,
            unit=f"{unit}/h",
            ratio=1.0 if limit is None or growth <= limit else limit / growth,
            floor=None if limit is None else 1.0,
            more={"first": round(points[0][1], 2), "last": round(points[-1][1], 2)},
        )


if __name__ == "__main__":
    sys.exit(main())
