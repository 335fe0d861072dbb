"""Metrics are declared and dense, and a failed write stops nothing."""

import logging
import math
from pathlib import Path

import pytest

from rollbook.telemetry.metrics import Metric, MetricRecorder, Reduction, read_metrics

TABLE = tuple(Metric(f"test/{reduction}", "s", "a value reduced this way", reduction) for reduction in Reduction)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (Reduction.LAST, 2.0),
        (Reduction.SUM, 11.0),
        (Reduction.MEAN, 2.75),
        (Reduction.MAX, 5.0),
        (Reduction.MIN, 2.0),
        (Reduction.STD, (14 / 9) ** 0.5),
    ],
)
def test_each_metric_is_reduced_as_declared(reduction: Reduction, expected: float) -> None:
    recorder = MetricRecorder("trainer", TABLE, None)
    for value in (4.0, 5.0, 2.0, 0.0):
        recorder.add(f"test/{reduction}", value, weight=0.0 if value == 0.0 else 1.0)
    assert recorder.tick()[f"test/{reduction}"] == pytest.approx({"mean": 11 / 3}.get(reduction, expected))


def test_a_mean_is_weighted() -> None:
    recorder = MetricRecorder("trainer", TABLE, None)
    recorder.add("test/mean", 1.0, weight=99)
    recorder.add("test/mean", 0.0, weight=1)
    assert recorder.tick()["test/mean"] == pytest.approx(0.99)


def test_a_standard_deviation_is_weighted_and_exact_far_from_zero() -> None:
    recorder = MetricRecorder("trainer", TABLE, None)
    for value, weight in ((1e9, 1.0), (1e9 + 2, 3.0)):
        recorder.add("test/std", value, weight=weight)
    assert recorder.tick()["test/std"] == pytest.approx(0.75**0.5)


def test_a_row_has_every_declared_key_even_without_values(tmp_path: Path) -> None:
    recorder = MetricRecorder("trainer", TABLE, tmp_path / "metrics.jsonl")
    recorder.tick(step=1)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["step"] == 1
    assert {name: row[name] for name in row if name.startswith("test/")} == {
        "test/last": None,
        "test/sum": 0.0,
        "test/mean": None,
        "test/max": None,
        "test/min": None,
        "test/std": None,
    }


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_none_nan_and_infinity_are_ignored(value: float | None) -> None:
    recorder = MetricRecorder("trainer", TABLE, None)
    recorder.add("test/mean", value)
    assert recorder.tick()["test/mean"] is None


def test_a_tick_resets_the_values() -> None:
    recorder = MetricRecorder("trainer", TABLE, None)
    recorder.add("test/sum", 3.0)
    recorder.tick()
    assert recorder.tick()["test/sum"] == 0.0


def test_an_undeclared_metric_is_refused() -> None:
    with pytest.raises(KeyError, match=r"test/typo.* is not declared in the table of trainer"):
        MetricRecorder("trainer", TABLE, None).add("test/typo", 1.0)


def test_rows_of_several_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for process in ("trainer", "rollout", "trainer"):
        MetricRecorder(process, TABLE, path).tick()
    assert len(read_metrics(path)) == 3
    assert len(read_metrics(path, process="rollout")) == 1


def test_a_failed_write_is_reported_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = MetricRecorder("trainer", TABLE, tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").mkdir()
    with caplog.at_level(logging.WARNING, logger="rollbook.telemetry"):
        assert recorder.tick(step=1)["step"] == 1
        recorder.tick(step=2)
    assert len(caplog.records) == 1
