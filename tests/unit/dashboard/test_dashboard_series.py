"""Metrics as chart lines: reduced without losing peaks, by step, time or tokens; and spans of a time window."""

import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.dashboard import timeline
from rollbook.dashboard.series import Axis, MetricSeries, reduced
from rollbook.dashboard.timeline import bounds, read_lanes
from rollbook.telemetry.intervals import read_intervals
from tests.parts.dashboard.run_dir import BEGIN, append_rows, trainer_row, write_run

ANY = {"low": -math.inf, "high": math.inf}


@given(
    values=st.lists(st.one_of(st.just(math.nan), st.integers(-1000, 1000).map(float)), max_size=300),
    points=st.integers(1, 50),
)
def test_a_reduced_line_keeps_the_extremes_and_the_number_of_measurements(values: list[float], points: int) -> None:
    line = reduced(np.arange(len(values), dtype=np.float64), np.array(values, dtype=np.float32), points)
    assert len(line.x) == len(line.y) == min(len(values), points)
    measured = [value for value in values if not math.isnan(value)]
    assert line.count == len(measured)
    low, high = line.low or line.y, line.high or line.y
    if measured:
        assert np.nanmin(low) == min(measured)
        assert np.nanmax(high) == max(measured)
    assert line.x == sorted(line.x)


def test_a_step_that_was_trained_again_counts_once_with_its_last_row(tmp_path: Path) -> None:
    rows = [trainer_row(step) for step in (1, 2, 3)] + [trainer_row(step, **{"train/loss": 9.0}) for step in (2, 3)]
    append_rows(tmp_path / "metrics.jsonl", *rows)
    series = MetricSeries(tmp_path)
    series.poll()
    line = series.series("train/loss", Axis.STEP, points=10, **ANY)
    assert line is not None
    assert line.x == [1.0, 2.0, 3.0]
    assert line.y[1:] == [9.0, 9.0]
    assert series.row(3)["train/loss"] == 9.0
    assert [step for step, _ in series.step_times()] == [1, 2, 3]
    tokens = series.series("rollout/reward", Axis.TOKENS, points=10, **ANY)
    assert tokens is not None
    assert tokens.x == [100.0, 200.0, 300.0]


def test_metrics_of_other_processes_are_shown_at_the_step_of_that_time(tmp_path: Path) -> None:
    append_rows(
        tmp_path / "metrics.jsonl",
        trainer_row(1),
        {"time": BEGIN + 1.5, "process": "rollout", "async/in_flight": 4.0},
        trainer_row(2),
        {"time": BEGIN + 2.5, "process": "rollout", "async/in_flight": 6.0},
    )
    series = MetricSeries(tmp_path)
    series.poll()
    line = series.series("async/in_flight", Axis.STEP, points=10, **ANY)
    assert line is not None
    assert (line.x, line.y) == ([1.0, 2.0], [4.0, 6.0])
    by_time = series.series("async/in_flight", Axis.TIME, points=10, **ANY)
    assert by_time is not None
    assert by_time.x == pytest.approx([0.5, 1.5])
    assert series.series("no/metric", Axis.STEP, points=10, **ANY) is None


def test_lanes_hold_the_spans_of_a_window(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20)
    begin, end = bounds(tmp_path) or (0.0, 0.0)
    assert begin == pytest.approx(BEGIN)
    lanes, is_complete = read_lanes(tmp_path, begin, end)
    assert is_complete
    by_id = {lane.id: lane for lane in lanes}
    assert set(by_id) == {"policy-0", "trainer", "trainer.publish", "rollout.group"}
    assert len(by_id["policy-0"].spans) == 160
    part, _ = read_lanes(tmp_path, BEGIN + 5.3, BEGIN + 5.8)
    names = [span[2] for lane in part if lane.id == "trainer" for span in lane.spans]
    assert names == ["trainer.train"]


def test_spans_of_one_row_do_not_overlap(tmp_path: Path) -> None:
    write_run(tmp_path, steps=30)
    lanes, _ = read_lanes(tmp_path, BEGIN, BEGIN + 40)
    for lane in lanes:
        free_at: dict[int, float] = {}
        for start, end, _, row, _ in lane.spans:
            assert free_at.get(row, -math.inf) <= start
            free_at[row] = end


def test_a_window_that_is_too_large_is_sampled_as_a_density(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "READ_BYTES", 4 * 4096)
    monkeypatch.setattr(timeline, "PART_BYTES", 4096)
    spans = tmp_path / "spans"
    spans.mkdir()
    rows = [
        {"process": "policy", "name": "policy.generate", "start": at, "end": at + 0.5, "id": at, "parent": None}
        for at in range(4000)
    ]
    (spans / "policy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (lane,), is_complete = read_lanes(tmp_path, 0.0, 4000.0)
    assert not is_complete
    assert lane.density is not None
    # Each second has a span of half a second.
    assert np.mean(lane.density.busy) == pytest.approx(0.5, rel=0.3)


def test_torn_and_foreign_lines_of_span_files_are_skipped(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    with (tmp_path / "spans" / "trainer.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"name": 1, "start": "x"}\n[]\nnot json\n{"process": "trainer", "na')
    lanes, _ = read_lanes(tmp_path, BEGIN, BEGIN + 10)
    assert sum(len(lane.spans) for lane in lanes if lane.id == "trainer") == 4


def test_a_timeline_leaves_out_measurements_of_cpu_time(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    before = bounds(tmp_path), read_lanes(tmp_path, BEGIN, BEGIN + 10)
    row = {"process": "trainer", "name": "process.cpu", "start": BEGIN - 5, "end": BEGIN + 9, "id": 99, "parent": None}
    with (tmp_path / "spans" / "trainer.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    assert (bounds(tmp_path), read_lanes(tmp_path, BEGIN, BEGIN + 10)) == before


def test_spans_of_a_full_file_are_shown_after_the_next_one_was_begun(tmp_path: Path) -> None:
    write_run(tmp_path, steps=5)
    before = bounds(tmp_path), read_lanes(tmp_path, BEGIN, BEGIN + 10)
    current = tmp_path / "spans" / "trainer.jsonl"
    *full, last = current.read_text(encoding="utf-8").splitlines(keepends=True)
    current.with_name("trainer.jsonl.1").write_text("".join(full), encoding="utf-8")
    current.write_text(last, encoding="utf-8")
    assert (bounds(tmp_path), read_lanes(tmp_path, BEGIN, BEGIN + 10)) == before
    assert len(read_intervals(tmp_path, ["trainer.train"])["trainer.train"]) == 5


def test_lines_are_read_while_another_thread_adds_steps(tmp_path: Path) -> None:
    path, names = tmp_path / "metrics.jsonl", ["rollout/reward", "train/entropy"]
    append_rows(path, *(trainer_row(step) for step in range(1, 3001)))
    series = MetricSeries(tmp_path)
    series.poll()
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(1) as other:
            for begin in range(3001, 4001, 10):
                append_rows(path, *(trainer_row(step) for step in range(begin, begin + 10)))
                polling = other.submit(series.poll)
                while not polling.done():
                    for name in names:
                        assert series.series(name, Axis.STEP, **ANY, points=10) is not None
                polling.result()
    finally:
        sys.setswitchinterval(switch_s)
    assert [step for step, _ in series.step_times()] == list(range(1, 4001))
