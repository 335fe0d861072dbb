"""Nested timed spans: what each process did, and when. The timeline plot uses them.

A span is one JSON line, written at its end: name, wall start and end, parent span and fields. Nesting follows the context (task or
thread), so concurrent tasks do not mix.
"""

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook.concurrency.clock import WALL_CLOCK
from rollbook.telemetry.events import FailureReport, LineFile, read_json_lines

_current: ContextVar[int | None] = ContextVar("rollbook_span", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    process: str
    name: str
    start: float
    end: float
    id: int
    parent: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


class SpanRecorder:
    """Writes the spans of one process; without a path, nothing."""

    def __init__(self, process: str, path: Path | None = None) -> None:
        self.process = process
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._failure = FailureReport(f"spans of {process} are not all written")
        self._file = None if path is None else LineFile(path)

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Time a block. Fields known only at its end can be added to the yielded dict."""
        span_id, parent = next(self._ids), _current.get()
        token = _current.set(span_id)
        start, began = time.time(), time.perf_counter()
        try:
            yield fields
        finally:
            _current.reset(token)
            self.record(name, start, start + time.perf_counter() - began, span_id=span_id, parent=parent, **fields)

    def record(
        self,
        name: str,
        start: float,
        end: float,
        *,
        span_id: int | None = None,
        parent: int | None = None,
        **fields: Any,
    ) -> None:
        """Write a span with given times, of this machine's clock."""
        row = {
            "process": self.process,
            "name": name,
            "start": round(WALL_CLOCK.corrected(start), 5),
            "end": round(WALL_CLOCK.corrected(end), 5),
            "id": span_id if span_id is not None else next(self._ids),
            "parent": parent,
            "fields": fields,
        }
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(json.dumps(row, default=str) + "\n")
            except (OSError, ValueError, TypeError) as error:
                self._failure.report(error)

    def close(self) -> None:
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                with self._failure.reported():
                    file.close()


def read_spans(path: Path) -> list[Span]:
    """Every complete span. Ignores other lines."""
    return [span for row in read_json_lines(path) if (span := span_of(row)) is not None]


def span_of(row: dict[str, Any]) -> Span | None:
    """The span of a line; None for another line."""
    if not row.keys() >= {"process", "name", "start", "end", "id", "parent"}:
        return None
    return Span(
        process=row["process"],
        name=row["name"],
        start=row["start"],
        end=row["end"],
        id=row["id"],
        parent=row["parent"],
        fields=row.get("fields", {}),
    )
