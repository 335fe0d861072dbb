"""The spans of a run as time intervals: union, clipping and concurrency."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollbook.telemetry.json_tail import FolderTail, is_number


@dataclass(frozen=True, slots=True)
class Intervals:
    """Spans of one name over all processes: start and end times (Unix seconds), in recorded order."""

    starts: NDArray[np.float64]
    ends: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> NDArray[np.float64]:
        return self.ends - self.starts

    def union(self, *, gap_s: float = 0.0) -> "Intervals":
        """The fewest intervals that cover the same time. Gaps up to `gap_s` are closed, because they are too thin to draw."""
        if not len(self):
            return self
        order = np.argsort(self.starts, kind="stable")
        starts, reach = self.starts[order], np.maximum.accumulate(self.ends[order])
        is_first = np.concatenate(([True], starts[1:] > reach[:-1] + gap_s))
        last = np.concatenate((np.flatnonzero(is_first)[1:] - 1, [len(starts) - 1]))
        return Intervals(starts[is_first], reach[last])

    def within(self, begin: float, end: float) -> "Intervals":
        """The intervals clipped to a time window."""
        starts, ends = np.maximum(self.starts, begin), np.minimum(self.ends, end)
        inside = ends > starts
        return Intervals(starts[inside], ends[inside])

    def mean_concurrency(self, edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean number of concurrent spans between each pair of neighbouring edges."""
        return np.diff(self._seconds_before(edges)) / np.diff(edges)

    def concurrency_during(self, others: "Intervals") -> NDArray[np.float64]:
        """The mean number of these spans during each of the others. 0 for one without a duration."""
        seconds = self._seconds_before(others.ends) - self._seconds_before(others.starts)
        lengths = others.ends - others.starts
        return np.divide(seconds, lengths, out=np.zeros_like(seconds), where=lengths > 0)

    def _seconds_before(self, moments: NDArray[np.float64]) -> NDArray[np.float64]:
        """Span-seconds before each moment: every span adds min(moment, end) - min(moment, start)."""
        return _sum_of_minima(self.ends, moments) - _sum_of_minima(self.starts, moments)


def _sum_of_minima(values: NDArray[np.float64], limits: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each limit, the sum over all values of min(value, limit). Sorts once instead of comparing all pairs."""
    ordered = np.sort(values)
    below = np.searchsorted(ordered, limits, side="right")
    total_below = np.concatenate(([0.0], np.cumsum(ordered)))[below]
    result: NDArray[np.float64] = total_below + (len(ordered) - below) * limits
    return result


def read_intervals(run_dir: Path, names: Iterable[str]) -> dict[str, Intervals]:
    """The intervals of each named span; empty for a name without records."""
    found = {name: (array("d"), array("d")) for name in names}
    for row in FolderTail(run_dir / "spans", "*.jsonl*").poll():
        name, start, end = row.get("name"), row.get("start"), row.get("end")
        if isinstance(name, str) and name in found and is_number(start) and is_number(end) and start <= end:
            found[name][0].append(start)
            found[name][1].append(end)
    return {name: Intervals(np.array(starts), np.array(ends)) for name, (starts, ends) in found.items()}
