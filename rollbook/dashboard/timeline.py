"""The spans of a time window: exact ones where a window holds few, a density otherwise.

Span files grow to gigabytes. A span is written when it ends, so each file is ordered by end times, and a window is found by a
binary search. Of a window that is too large to read, evenly spread parts are read.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from rollbook.contracts.decoding import json_decoder
from rollbook.telemetry.cpu_time import CPU_SPAN
from rollbook.telemetry.intervals import Intervals

READ_BYTES = 2 << 20
"""Bytes read of one file for one window: about 5,000 spans, more than can be shown one by one."""
PART_BYTES = 1 << 16
LINE_BYTES = 1 << 12
"""Longer than most span lines."""
MAX_LINE_BYTES = 1 << 20
MAX_SPANS = 4000
"""Exact spans in one response."""
DENSITY_POINTS = 600
MAX_ROWS = 64
"""Rows of concurrent spans in one lane. The rest share the last row."""
LATE_S = (600.0, 60.0, 10.0, 1.0)
"""Spans that end up to this long after a window are searched for parts inside it: the longest time that can be read."""

KINDS = {
    "policy": "policy",
    "trainer": "trainer",
    "rollout.episode": "worker",
    "rollout.group": "dispatcher",
    "trainer.publish": "publication",
    "trainer.publish_again": "publication",
    "trainer.checkpoint": "checkpoint",
    "env": "environment",
}


class Density(msgspec.Struct, frozen=True, kw_only=True):
    edges: list[float]
    busy: list[float]
    """Mean number of concurrent spans between two edges."""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    label: str
    kind: str
    rows: int
    spans: list[tuple[float, float, str, int, dict[str, Any]]]
    """Start, end, name, row, fields."""
    density: Density | None = None


class _Line(msgspec.Struct, frozen=True, gc=False):
    """A span as it is written. Its fields are decoded only if they are shown."""

    process: str
    name: str
    start: float
    end: float
    fields: msgspec.Raw = msgspec.Raw(b"{}")

    def shown(self) -> dict[str, Any]:
        found = json_decoder(Any).decode(self.fields)
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class _Found:
    spans: list[_Line]
    share: float
    """The part of the window that was read; below 1 the spans are a sample."""


def read_lanes(run_dir: Path, begin: float, end: float, *, process: str = "*") -> tuple[list[Lane], bool]:
    """The lanes between two times, and whether all spans were read. `process` is a pattern of process names."""
    by_lane: dict[str, list[_Line]] = {}
    shares: dict[str, float] = {}
    for path in _files(run_dir, process):
        found = _read_window(path, begin, end)
        for span in found.spans:
            # Episodes, publications and checkpoints have lanes of their own, apart from their process.
            lane = span.name if span.name in KINDS else span.process
            by_lane.setdefault(lane, []).append(span)
            shares[lane] = min(shares.get(lane, 1.0), found.share)
    is_exact = sum(map(len, by_lane.values())) <= MAX_SPANS
    lanes = []
    for name, spans in by_lane.items():
        spans.sort(key=lambda span: span.start)
        # A lane with few spans stays exact next to one with many.
        is_lane_exact = shares[name] == 1.0 and (is_exact or len(spans) <= MAX_SPANS // 8)
        lanes.append(_lane(name, spans, begin, end, share=shares[name], is_exact=is_lane_exact))
    order = ["policy", "worker", "environment", "dispatcher", "trainer", "publication", "checkpoint"]
    lanes.sort(key=lambda lane: (order.index(lane.kind) if lane.kind in order else len(order), lane.id))
    return lanes, all(share == 1.0 for share in shares.values())


def bounds(run_dir: Path) -> tuple[float, float] | None:
    """The first start and the last end of all spans, from the ends of the files. None: there are no spans."""
    starts, ends = [], []
    for path in _files(run_dir):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                first = list(_spans_between(file, 0, min(size, PART_BYTES)))
                last = list(_spans_between(file, max(0, size - PART_BYTES), size))
        except OSError:
            continue
        starts += [span.start for span in first]
        ends += [span.end for span in (*first, *last)]
    return (min(starts), max(ends)) if starts and ends else None


def _files(run_dir: Path, process: str = "*") -> list[Path]:
    """The span files of each process: the current one, and the full one before it (`.jsonl.1`)."""
    return sorted((run_dir / "spans").glob(f"{process}.jsonl*"))


def _lane(name: str, spans: list[_Line], begin: float, end: float, *, share: float, is_exact: bool) -> Lane:
    kind = KINDS.get(name) or KINDS.get(name.partition("-")[0]) or KINDS.get(name.partition(".")[0], "process")
    if is_exact:
        rows = list(_packed(spans))
        return Lane(
            id=name,
            label=name,
            kind=kind,
            rows=max((row for *_, row, _ in rows), default=0) + 1,
            spans=rows,
        )
    edges = np.linspace(begin, max(end, begin + 1e-6), DENSITY_POINTS + 1)
    intervals = Intervals(np.array([s.start for s in spans]), np.array([s.end for s in spans]))
    busy = intervals.mean_concurrency(edges) / max(share, 1e-9)
    return Lane(
        id=name,
        label=name,
        kind=kind,
        rows=1,
        spans=[],
        density=Density(edges=edges.round(4).tolist(), busy=busy.round(4).tolist()),
    )


def _packed(spans: Iterable[_Line]) -> Iterator[tuple[float, float, str, int, dict[str, Any]]]:
    """Each span in the first row that is free at its start. `spans` are ordered by start."""
    ends: list[float] = []
    for span in spans:
        row = next((at for at, free_at in enumerate(ends) if free_at <= span.start), len(ends))
        row = min(row, MAX_ROWS - 1)
        if row == len(ends):
            ends.append(span.end)
        else:
            ends[row] = max(ends[row], span.end)
        yield span.start, span.end, span.name, row, span.shown()


def _read_window(path: Path, begin: float, end: float) -> _Found:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first, _ = _offsets_around(file, size, begin)
            for late_s in LATE_S:
                _, last = _offsets_around(file, size, end + late_s)
                if last - first <= READ_BYTES:
                    break
            parts, share = _parts(first, last)
            found = [
                span
                for part_first, part_last in parts
                for span in _spans_between(file, part_first, part_last)
                if span.end >= begin and span.start <= end
            ]
            return _Found(found, share)
    except OSError:
        return _Found([], 1.0)


def _parts(first: int, last: int) -> tuple[list[tuple[int, int]], float]:
    if last - first <= READ_BYTES:
        return [(first, last)], 1.0
    count = READ_BYTES // PART_BYTES
    starts = np.linspace(first, last - PART_BYTES, count).astype(int).tolist()
    return [(start, start + PART_BYTES) for start in starts], READ_BYTES / (last - first)


def _offsets_around(file: BinaryIO, size: int, time: float) -> tuple[int, int]:
    """Two close offsets: spans before the first end before `time`, those after the second end later."""
    low, high = 0, size
    while high - low > PART_BYTES:
        middle = (low + high) // 2
        span = _next_span(file, middle, size)
        if span is None or span.end >= time:
            high = middle
        else:
            low = middle
    return low, high


def _next_span(file: BinaryIO, offset: int, size: int) -> _Line | None:
    """The first span whose line begins after an offset. Lines are short, so little is read unless it holds no span."""
    for read_bytes in (LINE_BYTES, MAX_LINE_BYTES):
        for span in _spans_between(file, offset, min(size, offset + read_bytes)):
            return span
    return None


def _spans_between(file: BinaryIO, first: int, last: int) -> Iterator[_Line]:
    """Spans whose lines begin between two offsets. Lines that cannot be read are skipped."""
    file.seek(max(0, first - 1))
    block = file.read(last - max(0, first - 1))
    if first > 0:
        # Begin at the next line, unless a line begins here.
        block = block.partition(b"\n")[2]
    if block and not block.endswith(b"\n"):
        block += file.readline(MAX_LINE_BYTES)
    for line in block.split(b"\n")[:-1]:
        try:
            span = _DECODER.decode(line)
        except msgspec.MsgspecError:
            continue
        if span.start <= span.end and span.name != CPU_SPAN:
            yield span


_DECODER = json_decoder(_Line)
