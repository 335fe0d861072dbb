"""Forwards metrics, rollouts and spans of a run, written to files by any process, to TensorBoard and other sinks.

One process forwards for the whole run. The position reached in each file is stored, so a restart forwards nothing twice.
"""

import importlib
import json
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

from rollbook.contracts.errors import RollbookError, RunError
from rollbook.contracts.plugin import install_command, load_plugin
from rollbook.contracts.user_errors import describe_error
from rollbook.telemetry.config import TelemetryConfig
from rollbook.telemetry.events import FailureReport, json_rows
from rollbook.telemetry.sinks.sink import Sink
from rollbook.telemetry.spans import span_of

POLL_S = 2.0
LABELS = frozenset({"time", "step", "replay", "process"})
"""Keys of a row that are not metrics."""
METRICS_FILE, ROLLOUTS_FILE, SPANS_FOLDER = "metrics.jsonl", "rollouts.jsonl", "spans"
POSITION_FILE = "telemetry_position"


def open_sinks(config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]) -> dict[str, Sink]:
    """`settings` is the resolved configuration of the run. Raises `ImportError` where a library is not installed."""
    opened: dict[str, Sink] = {}
    for name in config.sinks:
        if ":" in name:
            opened[name] = _open_own(name, directory=directory, run_name=run_name, settings=settings)
            continue
        try:
            # Only a run that uses a sink imports its library.
            module: Any = importlib.import_module(f"rollbook.telemetry.sinks.{name}")
        except ImportError as error:
            raise ImportError(
                f"telemetry.sinks contains {name!r}, but its library is not installed ({error}): {install_command(name)}"
            ) from error
        opened[name] = module.open_sink(config, directory=directory, run_name=run_name, settings=settings)
    return opened


def _open_own(name: str, **arguments: Any) -> Sink:
    """A user's sink. Raises `RunError`."""
    setting = f"telemetry.sinks contains {name!r}"
    try:
        sink = load_plugin(name, setting="telemetry.sinks")(**arguments)
    except RollbookError:
        raise
    except Exception as error:  # User code can raise anything.
        raise RunError(f"{setting}, which raised {describe_error(error)}") from error
    if not isinstance(sink, Sink):
        raise RunError(f"{setting}, which returned a {type(sink).__name__}; it must return a rollbook.Sink")
    return sink


class Forwarder:
    """A thread that follows the files of a run directory during the `with` block, and reads them to their end on exit."""

    def __init__(self, directory: Path, sinks: Mapping[str, Sink]) -> None:
        self._directory = directory
        self._sinks = dict(sinks)
        self._positions = _Positions(directory / POSITION_FILE)
        self._failures = {
            name: FailureReport(f"metrics are not shown in {name}") for name in (*self._sinks, "files of the run")
        }
        self._step = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="metric-sinks", daemon=True)

    def __enter__(self) -> "Forwarder":
        if self._sinks:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def _follow(self) -> None:
        is_ending = False
        while not is_ending:
            is_ending = self._ending.wait(POLL_S)
            self._guard("files of the run", self._forward_new_rows)
        for name, sink in self._sinks.items():
            self._guard(name, sink.close)

    def _forward_new_rows(self) -> None:
        for row in self._new_rows(METRICS_FILE):
            self._forward_metrics(row)
        for step, rows in groupby(self._new_rows(ROLLOUTS_FILE), key=lambda row: int(row.get("step", 0))):
            together = list(rows)
            for name, sink in self._sinks.items():
                self._guard(name, partial(sink.write_rollouts, together, step=step))
        span_sinks = {name: sink for name, sink in self._sinks.items() if sink.shows_spans}
        for file in sorted((self._directory / SPANS_FOLDER).glob("*.jsonl")) if span_sinks else ():
            spans = [
                span for row in self._new_rows(f"{SPANS_FOLDER}/{file.name}") if (span := span_of(row)) is not None
            ]
            for name, sink in span_sinks.items():
                self._guard(name, partial(sink.write_spans, spans))
        self._positions.save()

    def _new_rows(self, name: str) -> list[dict[str, Any]]:
        file = self._directory / name
        if not file.exists():
            return []
        position = self._positions.of(name)
        rows: list[dict[str, Any]] = []
        if file.stat().st_size < position:
            # The file was full and was renamed (`LineFile`). Its rest goes first.
            full = file.with_name(f"{file.name}.1")
            rows = json_rows(_read_from(full, position)) if full.exists() else []
            position = 0
        # The last line may be incomplete: another process is writing it.
        whole, newline, _ = _read_from(file, position).rpartition(b"\n")
        self._positions.advance(name, position + len(whole) + len(newline))
        return rows + json_rows(whole)

    def _forward_metrics(self, row: dict[str, Any]) -> None:
        process = str(row.get("process", ""))
        if process == "trainer":
            self._step = int(row.get("step", self._step))
        values = {
            name: float(value)
            for name, value in row.items()
            if name not in LABELS and isinstance(value, int | float) and math.isfinite(value)
        }
        at = float(row.get("time", 0.0))
        for name, sink in self._sinks.items():
            self._guard(name, partial(sink.write, values, process=process, step=self._step, at=at))

    def _guard(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # A sink's library may raise anything; training must continue.
            self._failures[name].report(error)


def _read_from(file: Path, position: int) -> bytes:
    with file.open("rb") as lines:
        lines.seek(position)
        return lines.read()


class _Positions:
    """How far each file was forwarded, in bytes. One JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_file: dict[str, int] = {}
        # A file that cannot be read, as after a full disk, costs double rows, not the run.
        with suppress(OSError, ValueError):
            stored = json.loads(path.read_text(encoding="utf-8"))
            # Runs of version 0.1 stored the position in the metrics only.
            self._by_file = {METRICS_FILE: stored} if isinstance(stored, int) else stored

    def of(self, name: str) -> int:
        return self._by_file.get(name, 0)

    def advance(self, name: str, position: int) -> None:
        self._by_file[name] = position

    def save(self) -> None:
        draft = self._path.with_name(f".{self._path.name}")
        draft.write_text(json.dumps(self._by_file), encoding="utf-8")
        draft.replace(self._path)
