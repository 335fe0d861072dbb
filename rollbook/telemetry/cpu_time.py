"""CPU seconds of the processes of a run, recorded as spans for `rollbook simulate`: processes on one machine share its cores.

They are read from `/proc`, so only Linux records them.
"""

import asyncio
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rollbook.telemetry.spans import SpanRecorder

CPU_SPAN = "process.cpu"
"""The span of one period. It is a measurement, not an activity: timelines leave it out."""
PERIOD_S = 4.0
STAT_FILE = Path("/proc/stat")
QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class CpuTime:
    used_s: float
    """Seconds on a core, of all threads, and of child processes that have ended."""
    waited_s: float
    """Seconds in which a thread could have run but had no core."""


def cpu_time(pid: int, *, proc: Path = Path("/proc")) -> CpuTime | None:
    """Since the start of the process. None if it does not exist, or if the system has no such accounts."""
    try:
        fields = (proc / str(pid) / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        # Not `glob`, which takes most of the time: a trainer may have hundreds of threads.
        tasks = (proc / str(pid) / "task").iterdir()
        threads = [(task / "schedstat").read_text(encoding="ascii").split() for task in tasks]
        used_ticks, waited_ns = sum(map(int, fields[11:15])), sum(int(thread[1]) for thread in threads)
    except (OSError, ValueError, IndexError):
        return None
    return CpuTime(used_ticks / os.sysconf("SC_CLK_TCK"), waited_ns / 1e9)


def available_cores(quota_file: Path = QUOTA_FILE) -> float:
    """Cores that this process may use: its affinity, and the quota of its container."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = quota_file.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def busy_core_seconds(stat_file: Path = STAT_FILE) -> float:
    """Seconds since the start of the machine in which the cores of this process were busy, with any program. 0 if unknown."""
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        rows = [line.split() for line in stat_file.read_text(encoding="ascii").splitlines()]
        # user, nice, system, (idle, iowait,) irq, softirq, steal
        ticks = sum(int(value) for name, *row in rows if name in own for value in (*row[:3], *row[5:8]))
    except (OSError, ValueError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")


async def record_cpu_time(
    spans: SpanRecorder, role: str, pids: Callable[[], Iterable[int]], *, period_s: float = PERIOD_S
) -> None:
    """Record what these processes used in each period. Ends: on cancellation, or at once on systems other than Linux."""
    if cpu_time(os.getpid()) is None:
        return
    before, busy_before, began = _times(pids()), busy_core_seconds(), time.time()
    while True:
        await asyncio.sleep(period_s)
        after, busy_after, ended = _times(pids()), busy_core_seconds(), time.time()
        both = after.keys() & before.keys()
        spans.record(
            CPU_SPAN,
            began,
            ended,
            role=role,
            # Only those that lived through the whole period.
            processes=len(both),
            used_s=round(sum(after[pid].used_s - before[pid].used_s for pid in both), 3),
            waited_s=round(sum(max(0.0, after[pid].waited_s - before[pid].waited_s) for pid in both), 3),
            cores=available_cores(),
            busy_s=round(busy_after - busy_before, 3),
            node=platform.node(),
        )
        before, busy_before, began = after, busy_after, ended


def _times(pids: Iterable[int]) -> dict[int, CpuTime]:
    return {pid: found for pid in pids if (found := cpu_time(pid)) is not None}
