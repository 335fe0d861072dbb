"""A long run of tiny steps: does anything grow without a bound?

Samples memory, descriptors and threads of every process, and the size of every file and folder of the run directory. Prints the
growth of each over the second half of the run, when caches are warm (a least-squares slope), next to its bound. The bounds are also
in docs/architecture.md. In a run of minutes caches still grow: the bounds are then wider (`NOISE`).

`--env aws` also has simulators and command lines. `--series` keeps every sample, to see when something grew.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.report import Figure, print_figures, print_status
from tests.parts.run.small import CONFIG, REPOSITORY, SmallRun

AWS = REPOSITORY / "examples" / "02_aws_cli_agent"
SETTINGS = ["trainer.max_steps=10000000", "trainer.checkpoint_every=20", "ledger.keep_payloads=false"]
ENVIRONMENTS = {
    "guessing": [*SETTINGS, "env.args.step_s=0.0", "env.pool_size=32"],
    "aws": [*SETTINGS, "env.pool_size=4", "rollout.completions_per_prompt=2"],
}
REWARDS = """
[rollout.rewards]
environment_weight = 1.0

[rollout.rewards.functions.brief]
path = "soak_rewards:brief"
weight = 0.01
"""
REWARD_MODULE = "def brief(case):\n    return -float(case.num_sampled)\n"
INTERVAL_S = 5.0
LONG_S = 600.0

# Growth per hour. A process that leaks one kilobyte in each step grows by about 20 MB an hour.
PROCESS_BOUNDS = {"memory_mb": 20.0, "descriptors": 5.0, "threads": 5.0}
# What connections and caches gain and lose in a few minutes. It matters in a short run only.
NOISE = {"memory_mb": 4.0, "descriptors": 4.0, "threads": 2.0}
# Growth per step in kilobytes: four groups of four short episodes. Everything else in the run directory has a fixed size.
KB_PER_STEP = {
    "ledger": 25.0,
    "metrics.jsonl": 8.0,
    "rollouts.jsonl": 8.0,
    "mastery.jsonl": 1.0,
    "tokens": 1.0,
    # Until their files have reached 32 MiB: then the older half is replaced.
    "logs": 25.0,
    "spans": 25.0,
}
MAX_FIXED_MB_PER_HOUR = 5.0

Series = dict[str, list[tuple[float, float]]]
"""Values by name, with the time or the step at which each was taken."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--env", choices=sorted(ENVIRONMENTS), default="guessing")
    parser.add_argument("--series", type=Path, help="write every sample to this JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollbook-soak-") as name:
        directory = Path(name)
        (directory / "soak_rewards.py").write_text(REWARD_MODULE, encoding="utf-8")
        config = (AWS / "run.toml").read_text(encoding="utf-8") if args.env == "aws" else CONFIG
        shutil.copy(AWS / "aws_reference.py", directory)
        run = SmallRun(directory, ENVIRONMENTS[args.env], config=config + REWARDS).start()
        try:
            run.until(lambda: run.step() >= 5, what="step 5", within_s=LONG_S)
            by_time, by_step, steps = observe(run, args.minutes * 60)
        finally:
            run.stop()
    if args.series is not None:
        args.series.write_text(json.dumps({"by_time": by_time, "by_step": by_step}), encoding="utf-8")
    print_status(f"{steps} steps in {args.minutes:g} minutes; growth over the second half")
    return print_figures(
        [*process_figures(by_time), *file_figures(by_time, by_step)], env=args.env, minutes=args.minutes, steps=steps
    )


def observe(run: SmallRun, seconds: float) -> tuple[Series, Series, int]:
    by_time: Series = defaultdict(list)
    by_step: Series = defaultdict(list)
    began, first_step = time.monotonic(), run.step()
    while (now := time.monotonic() - began) < seconds:
        for name, value in sample_processes(run):
            by_time[name].append((now, value))
        step = run.step()
        for name, value in sample_files(run.directory):
            by_time[name].append((now, value))
            by_step[name].append((step, value))
        if run.process.poll() is not None:
            ended = run.wait()
            raise SystemExit(f"the run ended after {now:.0f} s with {ended['exit_code']}:\n{ended['stderr'][-4000:]}")
        time.sleep(INTERVAL_S)
    return by_time, by_step, run.step() - first_step


def sample_processes(run: SmallRun) -> Iterator[tuple[str, float]]:
    """Sums over the processes of each kind: reward processes are replaced, so single ones have no history."""
    sums: Counter[str] = Counter()
    for process in [psutil.Process(run.process.pid), *run.descendants()]:
        try:
            with process.oneshot():
                kind = kind_of(process.cmdline())
                found = {
                    f"{kind} memory_mb": process.memory_info().rss / 2**20,
                    f"{kind} descriptors": process.num_fds(),
                    f"{kind} threads": process.num_threads(),
                }
        except psutil.Error:
            continue
        for name, value in found.items():
            sums[name] += value  # type: ignore[assignment]  # a counter of numbers with fractions
    yield from sums.items()


def kind_of(command: Sequence[str]) -> str:
    """`--name trainer` of a process of the run, the module of one that it started, else the program."""
    if "--name" in command:
        return command[command.index("--name") + 1]
    if "-m" in command:
        module = command[command.index("-m") + 1]
        return "supervisor" if module == "rollbook" else module.removeprefix("rollbook.")
    return Path(command[0]).name if command else "ending"


def sample_files(directory: Path) -> Iterator[tuple[str, float]]:
    for path in directory.iterdir():
        yield path.name, size_of(path) / 2**20


def size_of(path: Path) -> int:
    files = [path] if path.is_file() else [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        with suppress(FileNotFoundError):  # deleted while we look; `os.walk` ignores deleted folders
            total += file.stat().st_size
    return total


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The least-squares slope over the second half of the points."""
    late = points[len(points) // 2 :]
    mean_at = sum(at for at, _ in late) / len(late)
    mean_value = sum(value for _, value in late) / len(late)
    spread = sum((at - mean_at) ** 2 for at, _ in late)
    return sum((at - mean_at) * (value - mean_value) for at, value in late) / spread if spread else 0.0


def process_figures(by_time: Series) -> Iterator[Figure]:
    for name, points in sorted(by_time.items()):
        unit = name.rpartition(" ")[2]
        if unit in PROCESS_BOUNDS:
            hours = (points[-1][0] - points[len(points) // 2][0]) / 3600
            bound = PROCESS_BOUNDS[unit] + (NOISE[unit] / hours if hours else 0.0)
            yield figure(name, slope(points) * 3600, round(bound, 3), f"{unit}/h", points)


def file_figures(by_time: Series, by_step: Series) -> Iterator[Figure]:
    for name, points in sorted(by_step.items()):
        if name in KB_PER_STEP:
            yield figure(name, slope(points) * 1024, KB_PER_STEP[name], "KB/step", points)
        else:
            yield figure(name, slope(by_time[name]) * 3600, MAX_FIXED_MB_PER_HOUR, "MB/h", points)


def figure(name: str, growth: float, bound: float, unit: str, points: Sequence[tuple[float, float]]) -> Figure:
    """`ours` is the growth and `peer` its bound; the ratio is at least 1 within the bound."""
    return Figure(
        name=name,
        ours=round(growth, 3),
        peer=bound,
        unit=unit,
        ratio=1.0 if growth <= bound else bound / growth,
        floor=1.0,
        more={"first": round(points[0][1], 2), "last": round(points[-1][1], 2)},
    )


if __name__ == "__main__":
    sys.exit(main())
