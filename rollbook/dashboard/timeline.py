"""Who did what when: spans of a run as intervals, their union, and how many ran at once."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollbook.dashboard.queries import SPANS_FOLDER, is_number
from rollbook.dashboard.tail import FolderTail


@dataclass(frozen=True, slots=True)
class Intervals:
    """Spans of one name over all processes: starts and ends, in wall seconds, in the order they were recorded."""

    starts: NDArray[np.float64]
    ends: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.starts)

    def seconds(self) -> float:
        """Seconds in which at least one of them ran."""
        joined = self.union()
        return float((joined.ends - joined.starts).sum())

    def union(self, *, gap_s: float = 0.0) -> "Intervals":
        """As few intervals as cover the same time. Gaps up to `gap_s` are closed: thinner ones cannot be drawn anyway."""
        if not len(self):
            return self
        order = np.argsort(self.starts, kind="stable")
        starts, reach = self.starts[order], np.maximum.accumulate(self.ends[order])
        begins = np.concatenate(([True], starts[1:] > reach[:-1] + gap_s))
        last = np.concatenate((np.flatnonzero(begins)[1:] - 1, [len(starts) - 1]))
        return Intervals(starts[begins], reach[last])

    def within(self, begin: float, end: float) -> "Intervals":
        """The parts that lie between two moments."""
        starts, ends = np.maximum(self.starts, begin), np.minimum(self.ends, end)
        inside = ends > starts
        return Intervals(starts[inside], ends[inside])

    def running(self, edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """How many ran between each pair of neighbouring edges, on average."""
        return np.diff(self._busy_until(edges)) / np.diff(edges)

    def _busy_until(self, moments: NDArray[np.float64]) -> NDArray[np.float64]:
        """Span-seconds spent before each moment: every span adds min(moment, end) - min(moment, start)."""
        return _sum_of_minima(self.ends, moments) - _sum_of_minima(self.starts, moments)


def _sum_of_minima(values: NDArray[np.float64], moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum over values of min(value, moment), for each moment; sorted once instead of compared with each."""
    ordered = np.sort(values)
    below = np.searchsorted(ordered, moments, side="right")
    total_below = np.concatenate(([0.0], np.cumsum(ordered)))[below]
    result: NDArray[np.float64] = total_below + (len(ordered) - below) * moments
    return result


def read_intervals(run_dir: Path, names: Iterable[str]) -> dict[str, Intervals]:
    """When the named spans happened; a name nobody recorded has no intervals."""
    found = {name: (array("d"), array("d")) for name in names}
    for row in FolderTail(run_dir / SPANS_FOLDER).poll():
        name, start, end = row.get("name"), row.get("start"), row.get("end")
        if isinstance(name, str) and name in found and is_number(start) and is_number(end) and start <= end:
            found[name][0].append(start)
            found[name][1].append(end)
    return {name: Intervals(np.array(starts), np.array(ends)) for name, (starts, ends) in found.items()}
