"""Declared metrics: each room lists its metrics in one table, with unit, meaning and reduction.

A recorder writes one row per tick with every declared key, null where nothing was measured, so that a gap in a chart is always a
fault. Means are weighted by their counts, so averages of averages cannot happen.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollbook.concurrency.clock import WALL_CLOCK
from rollbook.telemetry.events import FailureReport, read_json_lines


class Reduction(StrEnum):
    LAST = "last"
    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    STD = "std"


@dataclass(frozen=True, slots=True)
class Metric:
    """`Metric("perf/step_time", "s", "wall seconds of one training step", Reduction.LAST)`."""

    name: str
    unit: str
    meaning: str
    reduction: Reduction = Reduction.LAST


class _Cell:
    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0  # of the distances from the mean: those of the values themselves would cancel
        self.most = -math.inf
        self.least = math.inf
        self.last = math.nan

    def add(self, value: float, weight: float) -> None:
        self.total += value * weight
        self.count += weight
        distance = value - self.mean
        self.mean += distance * weight / self.count
        self.squares += distance * (value - self.mean) * weight
        self.most = max(self.most, value)
        self.least = min(self.least, value)
        self.last = value

    def reduced(self, reduction: Reduction) -> float | None:
        if self.count == 0:
            return 0.0 if reduction is Reduction.SUM else None
        return {
            Reduction.LAST: self.last,
            Reduction.SUM: self.total,
            Reduction.MEAN: self.total / self.count,
            Reduction.MAX: self.most,
            Reduction.MIN: self.least,
            Reduction.STD: math.sqrt(self.squares / self.count),
        }[reduction]


class MetricRecorder:
    """Collects values of declared metrics and appends one row per tick to `metrics.jsonl`.

    Several processes append to one file: each row is a single write, small enough to be atomic.
    """

    def __init__(self, process: str, table: Iterable[Metric], path: Path | None) -> None:
        self.process = process
        self._table = {metric.name: metric for metric in table}
        self._cells = {name: _Cell() for name in self._table}
        self._failure = FailureReport(f"metrics of {process} are not written")
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, value: float | None, *, weight: float = 1.0) -> None:
        """Record a value. None and NaN are ignored. Raises `KeyError` for an undeclared name."""
        if name not in self._table:
            raise KeyError(f"metric {name!r} is not declared in the table of {self.process}")
        if value is not None and math.isfinite(value) and weight > 0:
            self._cells[name].add(float(value), weight)

    def tick(self, **labels: Any) -> dict[str, Any]:
        """Write the row and reset all values."""
        row: dict[str, Any] = {"time": round(WALL_CLOCK.now(), 4), "process": self.process, **labels}
        for name, metric in self._table.items():
            row[name] = self._cells[name].reduced(metric.reduction)
        self._cells = {name: _Cell() for name in self._table}
        if self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                self._failure.report(error)
        return row


def read_metrics(path: Path, *, process: str | None = None) -> list[dict[str, Any]]:
    rows = read_json_lines(path)
    return [row for row in rows if process is None or row.get("process") == process]
