"""CPU seconds of processes, read from the kernel's accounts and recorded as spans."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from rollbook.telemetry.cpu_time import CPU_SPAN, CpuTime, available_cores, busy_core_seconds, cpu_time, record_cpu_time
from rollbook.telemetry.spans import Span, SpanRecorder, read_spans

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def account(proc: Path, pid: int, *, ticks: tuple[int, int, int, int], waited_ns: tuple[int, ...]) -> None:
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    fields = ["S", *"1234567890", *map(str, ticks), "20", "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} (a name) with spaces) {' '.join(fields)}")
    for thread, waited in enumerate(waited_ns):
        folder = proc / str(pid) / "task" / str(pid + thread)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"123456 {waited} 7\n")


def test_cpu_time_counts_all_threads_and_ended_children(tmp_path: Path) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    account(tmp_path, 40, ticks=(2 * tick, tick, 4 * tick, 3 * tick), waited_ns=(500_000_000, 1_500_000_000))
    assert cpu_time(40, proc=tmp_path) == CpuTime(used_s=10.0, waited_s=2.0)
    assert cpu_time(41, proc=tmp_path) is None


def test_accounts_that_cannot_be_read_are_unknown(tmp_path: Path) -> None:
    account(tmp_path, 40, ticks=(1, 1, 1, 1), waited_ns=(5,))
    (tmp_path / "40" / "task" / "40" / "schedstat").write_text("")
    assert cpu_time(40, proc=tmp_path) is None


@linux_only
def test_busy_seconds_are_those_of_the_own_cores(tmp_path: Path) -> None:
    own, tick = min(os.sched_getaffinity(0)), os.sysconf("SC_CLK_TCK")
    rows = [
        "cpu  9 9 9 9 9 9 9 9 9 9",
        # user, nice, system, idle, iowait, irq, softirq, steal
        f"cpu{own} {tick} {tick} {tick} 5000 7000 {tick} {tick} {tick} 0 0",
        "cpu100000 77777 1 1 1 1 1 1 1 0 0",
        "intr 5",
    ]
    (tmp_path / "stat").write_text("\n".join(rows))
    assert busy_core_seconds(tmp_path / "stat") == 6.0
    (tmp_path / "stat").write_text(f"cpu{own} damaged")
    assert busy_core_seconds(tmp_path / "stat") == 0.0
    assert busy_core_seconds(tmp_path / "missing") == 0.0


@linux_only
def test_a_process_that_computes_uses_cpu_time() -> None:
    before = cpu_time(os.getpid())
    assert before is not None
    # As long as it takes: a tick of the kernel is a hundredth of a second.
    while (after := cpu_time(os.getpid())) is not None and after.used_s == before.used_s:
        sum(range(100_000))
    assert after is not None
    assert after.used_s > before.used_s


@pytest.mark.parametrize(("quota", "expected"), [("50000 100000", 0.5), ("max 100000", None), ("damaged", None)])
def test_the_quota_of_a_container_limits_the_cores(tmp_path: Path, quota: str, expected: float | None) -> None:
    file = tmp_path / "cpu.max"
    whole = available_cores(file)
    file.write_text(quota)
    assert available_cores(file) == (whole if expected is None else expected)


@linux_only
def test_the_cores_are_those_that_the_process_may_use(tmp_path: Path) -> None:
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(own)})
        assert available_cores(tmp_path / "missing") == 1
    finally:
        os.sched_setaffinity(0, own)


@linux_only
async def test_each_period_is_recorded_with_the_processes_that_lived_through_it(tmp_path: Path) -> None:
    path = tmp_path / "rollout.jsonl"
    spans = SpanRecorder("rollout", path)
    gone = os.getpid() + 10_000_000
    recording = asyncio.create_task(record_cpu_time(spans, "worker", lambda: (os.getpid(), gone), period_s=0.01))
    found: list[Span] = []
    while len(found) < 2:
        await asyncio.sleep(0.01)
        found = [span for span in read_spans(path) if span.name == CPU_SPAN]
    recording.cancel()
    spans.close()
    first, second = found[:2]
    assert first.end == second.start
    assert first.fields["role"] == "worker"
    assert first.fields["processes"] == 1
    assert first.fields["cores"] == available_cores()
    assert first.fields["used_s"] >= 0
