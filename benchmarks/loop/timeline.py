"""What trainer and policy server spend their time on over the steps of a run, recorded in both processes by torch's profiler.

    python -m benchmarks.loop.timeline --device cuda --case 135m-single      after the warm-up, for --seconds
    python -m benchmarks.loop.timeline --role trainer                        one process only; a small model on a CPU

For each process: `device` is the time in which one of its kernels or copies runs (on a CPU: an operation of torch), by kind of
kernel; `gaps` are the times between them; `threads` says how long each thread had a processor, and the rest of the time it waited.
`device_busy`: of the window that both recorded, on one GPU, the share in which a kernel of either runs. On a CPU that others use an
operation takes longer than its thread has a processor.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.learning.runs import Stop, train
from benchmarks.loop.speed import CASES, WARM_UP_STEPS, config_table, write_model
from benchmarks.loop.timeline_recorder import FOLDER, SITECUSTOMIZE, START
from benchmarks.loop.timeline_recorder import ROLES as RECORDED_ROLES
from benchmarks.report import Figure, print_figures, print_status

ROLES = ("trainer", "policy")
KINDS = {
    "attention": ("attend", "join_splits", "flash", "attention", "sdpa"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "wgmma", "xmma", "mm", "linear", "_product"),
    "optimizer": ("adam", "multi_tensor", "foreach", "chunked"),
    "norms, gates, logprobs, sampling": ("norm", "gate", "softmax", "reduce_tiles", "choose", "score"),
    "copies": ("memcpy", "memset", "copy", "nccl"),
}
Interval = tuple[int, int]
"""Start and end, in nanoseconds since 1970."""


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Sorted, and without overlap."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def busy_ns(intervals: Sequence[Interval], window: Interval) -> int:
    return sum(max(0, min(end, window[1]) - max(start, window[0])) for start, end in union(intervals))


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "other")


def report(role: str, found: dict[str, Any], steps: int) -> Figure:
    """Print where the time of a process went."""
    window: Interval = tuple(found["window"])
    wall = window[1] - window[0]
    spans = [(start, end) for _, start, end in found["events"]]
    busy = busy_ns(spans, window)
    joined = union(spans)
    gaps = sorted((after[0] - before[1] for before, after in pairwise(joined)), reverse=True)
    by_kind: dict[str, list[Interval]] = {}
    for name, start, end in found["events"]:
        by_kind.setdefault(kind_of(name), []).append((start, end))
    shares = {kind: round(busy_ns(part, window) / wall, 4) for kind, part in by_kind.items()}
    threads = {name: round(seconds * 1e9 / wall, 3) for name, seconds in found["threads"].items()}
    busiest = sorted(threads.items(), key=lambda one: -one[1])[:6]
    each = f", {wall / 1e6 / steps:.1f} ms a step" if steps else ""
    print_status(f"{role}: {wall / 1e9:.1f} s with {steps} steps{each}; {len(spans)} kernels or operations")
    print_status(f"  device {busy / wall:.1%}: " + ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items()))
    print_status(f"  gaps: {len(gaps)}, longest {', '.join(f'{gap / 1e6:.2f} ms' for gap in gaps[:5])}")
    for name, share in busiest:
        print_status(f"  thread {name}: on a processor {share:.1%} of the time, waiting {max(0.0, 1 - share):.1%}")
    more = {"kinds": shares, "threads": dict(busiest), "steps": steps, "gaps": len(gaps)}
    return Figure(name=f"device_{role}", ours=busy / wall, peer=1.0, unit="share", ratio=busy / wall, more=more)


def both_busy(found: dict[str, dict[str, Any]], *, device: str) -> Figure:
    """The share of the common window in which one of the processes computes."""
    window = (max(one["window"][0] for one in found.values()), min(one["window"][1] for one in found.values()))
    spans = [(start, end) for one in found.values() for _, start, end in one["events"]]
    share = busy_ns(spans, window) / max(1, window[1] - window[0])
    floor = 0.98 if device == "cuda" else None
    return Figure(name="device_busy", ours=share, peer=1.0, unit="share", ratio=share, floor=floor)


def recorded(args: argparse.Namespace, home: Path) -> tuple[dict[str, dict[str, Any]], list[float]]:
    """What the processes of a run wrote, and the times of its steps."""
    case, folder = CASES[args.case], home / "timeline"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    write_model(case, home / "model", device=args.device)
    shutil.copy(Path(__file__).with_name("token_rollout.py"), home)
    table = config_table(case, home / "model", device=args.device, bound=1)
    table["run"]["process_template"] = False
    table["trainer"]["max_steps"] = 100_000
    paths = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    os.environ |= {FOLDER: str(folder), RECORDED_ROLES: " ".join(args.role)}
    wanted = [folder / f"{role}.json" for role in args.role]

    def on_poll(_supervisor: int, steps: int) -> None:
        if steps >= WARM_UP_STEPS and not (folder / START).exists():
            partial = folder / "start.partial"
            partial.write_text(json.dumps({"seconds": args.seconds, "device": args.device}))
            partial.replace(folder / START)
        if all(path.exists() for path in wanted):
            raise _Recorded

    try:
        run = train("timeline-run", table, home, Stop(total_s=args.limit_s), on_poll=on_poll)
        times = [row["time"] for row in run.steps]
    except _Recorded:
        lines = (home / "timeline-run" / "metrics.jsonl").read_text().splitlines()
        times = [row["time"] for row in map(json.loads, lines) if row.get("process") == "trainer"]
    if missing := [path.stem for path in wanted if not path.exists()]:
        raise SystemExit(f"nothing was recorded of: {', '.join(missing)}; the run is in {home}")
    return {path.stem: json.loads(path.read_text()) for path in wanted}, times


class _Recorded(Exception):
    """Ends the run: all processes have written what they recorded."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", nargs="+", default=list(ROLES), choices=ROLES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--case", default="cpu", choices=list(CASES), help="a case of benchmarks.loop.speed (default: cpu)"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="how long is recorded")
    parser.add_argument("--limit-s", type=float, default=300.0, help="how long the run may take")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found, times = recorded(args, Path(folder))
    figures = []
    for role, one in found.items():
        steps = sum(one["window"][0] <= moment * 1e9 <= one["window"][1] for moment in times)
        figures.append(report(role, one, steps))
    if len(found) > 1:
        figures.append(both_busy(found, device=args.device))
    return print_figures(figures)


if __name__ == "__main__":
    sys.exit(main())
