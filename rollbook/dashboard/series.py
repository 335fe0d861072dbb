"""The metrics of a run over its steps, its time or its trained tokens, reduced to the points that a chart can show."""

import math
from array import array
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollbook.dashboard.run_files import METRICS_FILE
from rollbook.dashboard.run_metrics import Change
from rollbook.telemetry.json_tail import JsonTail, is_number

MAX_POINTS = 2000
NAN = math.nan
TOKENS = "train/tokens"


class Axis(StrEnum):
    STEP = "step"
    TIME = "time"
    TOKENS = "tokens"


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """A chart line. With `low` and `high`, each point is the mean of several measurements, and these are their extremes."""

    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    count: int = 0
    """Measurements before the reduction."""


class _Rows:
    """The rows of one process as columns of equal length. Steps of a row without one are those of the trainer at that time."""

    def __init__(self) -> None:
        self.steps = array("d")
        self.times = array("d")
        self.columns: dict[str, array[float]] = {}
        self.at_step: dict[float, int] = {}
        """The last row of each step."""

    def add(self, step: float, time: float, row: Mapping[str, Any]) -> None:
        at = len(self.steps)
        self.at_step[step] = at
        self.steps.append(step)
        self.times.append(time)
        for name, value in row.items():
            if "/" in name and is_number(value):
                column = self.columns.get(name)
                if column is None:
                    column = self.columns[name] = array("f")
                if len(column) < at:
                    column.extend([NAN] * (at - len(column)))
                column.append(value)

    def values(self, name: str) -> NDArray[np.float32]:
        found = np.full(len(self.steps), np.nan, dtype=np.float32)
        column = self.columns[name]
        found[: len(column)] = column
        return found


class MetricSeries:
    """Follows `metrics.jsonl` and keeps all values in memory: 60 metrics over 100,000 steps take 25 MB.

    Requests read it in threads while another one polls, so every method locks it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._tail = JsonTail(run_dir / METRICS_FILE)
        self._rows: dict[str, _Rows] = {}
        self._step = 0.0
        self._lock = Lock()

    @property
    def skipped(self) -> int:
        """Lines that could not be read."""
        return self._tail.skipped

    def poll(self) -> None:
        with self._lock:
            for row in self._tail.poll():
                self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        process, time, step = row.get("process"), row.get("time"), row.get("step")
        if not isinstance(process, str) or not is_number(time):
            return
        if is_number(step):
            if process == "trainer":
                self._step = step
        else:
            step = self._step
        self._rows.setdefault(process, _Rows()).add(step, time, row)

    def names(self) -> list[tuple[str, str, float | None]]:
        """Each metric with its process and its last value. Of two processes with the same metric, the trainer is shown."""
        with self._lock:
            found: dict[str, tuple[str, float]] = {}
            for process in self._processes():
                for name, column in self._rows[process].columns.items():
                    found.setdefault(name, (process, column[-1] if column else NAN))
        return [(name, process, None if math.isnan(last) else last) for name, (process, last) in found.items()]

    def change(self, name: str) -> Change:
        """Means of a metric of the trainer over the first and the last tenth of the steps."""
        with self._lock:
            rows = self._rows.get("trainer")
            if rows is None or name not in rows.columns:
                return Change()
            values = rows.values(name)[_last_of_each_step(np.array(rows.steps))]
        tenth = max(1, round(len(values) / 10))
        return Change(_mean(values[:tenth]), _mean(values[-tenth:]))

    def row(self, step: int) -> dict[str, float]:
        """The trainer's metrics of a step; empty if it has none."""
        with self._lock:
            rows = self._rows.get("trainer")
            at = None if rows is None else rows.at_step.get(step)
            if rows is None or at is None:
                return {}
            found = {name: column[at] for name, column in rows.columns.items() if len(column) > at}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def step_times(self) -> list[tuple[int, float]]:
        """Each trained step and when its row was written, by step."""
        with self._lock:
            rows = self._rows.get("trainer")
            if rows is None:
                return []
            return [(int(step), rows.times[at]) for step, at in sorted(rows.at_step.items()) if step >= 1]

    def series(self, name: str, axis: Axis = Axis.STEP, *, low: float, high: float, points: int) -> Series | None:
        """The metric between two values of the axis, in at most `points` points. None: there is no such metric."""
        with self._lock:
            rows = next((self._rows[p] for p in self._processes() if name in self._rows[p].columns), None)
            if rows is None:
                return None
            y, steps, times = rows.values(name), np.array(rows.steps), np.array(rows.times)
            order = _last_of_each_step(steps) if rows is self._rows.get("trainer") else np.arange(len(steps))
            y, steps, times = y[order], steps[order], times[order]
            match axis:
                case Axis.STEP:
                    x = steps
                case Axis.TIME:
                    x = times - self._begin()
                case Axis.TOKENS:
                    x = self._tokens_at(steps)
        inside = (x >= low) & (x <= high)
        return reduced(x[inside], y[inside], points)

    def _processes(self) -> list[str]:
        return sorted(self._rows, key=lambda process: (process != "trainer", process))

    def _begin(self) -> float:
        return min((rows.times[0] for rows in self._rows.values() if rows.times), default=0.0)

    def _tokens_at(self, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens trained until each step."""
        rows = self._rows.get("trainer")
        if rows is None or TOKENS not in rows.columns:
            return np.zeros(len(steps))
        order = _last_of_each_step(np.array(rows.steps))
        trained = np.cumsum(np.nan_to_num(rows.values(TOKENS)[order].astype(np.float64)))
        at = np.searchsorted(np.array(rows.steps)[order], steps, side="right")
        return np.concatenate(([0.0], trained))[at]


def _mean(values: NDArray[np.float32]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def reduced(x: NDArray[np.float64], y: NDArray[np.float32], points: int) -> Series:
    """At most `points` points. Measurements that share a point keep their extremes, so that no peak disappears."""
    measured = np.isfinite(y)
    if len(x) <= points:
        return Series(x=x.tolist(), y=_listed(y), count=int(measured.sum()))
    # Equal numbers of measurements per point. An irregular axis stays readable.
    edges = np.linspace(0, len(x), points + 1).astype(np.int64)
    starts = edges[:-1]
    counts = np.add.reduceat(measured.astype(np.int64), starts)
    total = np.add.reduceat(np.where(measured, y, 0.0).astype(np.float64), starts)
    least = np.minimum.reduceat(np.where(measured, y, np.inf), starts)
    most = np.maximum.reduceat(np.where(measured, y, -np.inf), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / counts
    return Series(
        x=x[edges[1:] - 1].tolist(),
        y=_listed(mean),
        low=_listed(least),
        high=_listed(most),
        count=int(measured.sum()),
    )


def _listed(values: NDArray[Any]) -> list[float]:
    """Plain numbers with seven digits, which keeps the response small. NaN, which is null in JSON, where nothing was measured."""
    numbers = np.where(np.isfinite(values), values, np.nan).astype(np.float64)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (6 - np.floor(np.log10(np.abs(numbers))))
        rounded = np.round(numbers * scale) / scale
    found: list[float] = np.where(np.isfinite(rounded), rounded, numbers).tolist()
    return found


def _last_of_each_step(steps: NDArray[np.float64]) -> NDArray[np.int64]:
    """Positions of the last row of each step, by step: a step that was trained again after a crash counts once."""
    if (steps[1:] > steps[:-1]).all():
        return np.arange(len(steps))
    _, last = np.unique(steps[::-1], return_index=True)
    found: NDArray[np.int64] = len(steps) - 1 - last
    return found
