"""Forwards rows of `metrics.jsonl`, written by any process, to TensorBoard and Weights & Biases.

One process forwards for the whole run. The position reached is stored in a file, so a restart forwards nothing twice.
"""

import importlib
import json
import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rollbook.telemetry.config import TelemetryConfig
from rollbook.telemetry.events import FailureReport

POLL_S = 2.0
LABELS = frozenset({"time", "step", "replay", "process"})
"""Keys of a row that are not metrics."""


class Sink(Protocol):
    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        """Show metrics of one process, at trainer step `step`."""

    def close(self) -> None: ...


SINKS: dict[str, str] = {
    "tensorboard": "rollbook.telemetry.sinks.tensorboard",
    "wandb": "rollbook.telemetry.sinks.wandb",
}


def open_sinks(config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]) -> dict[str, Sink]:
    """`settings` is the resolved configuration of the run. Raises `ImportError` where a library is not installed."""
    opened: dict[str, Sink] = {}
    for name in config.sinks:
        try:
            # Only a run that uses a sink imports its library.
            module: Any = importlib.import_module(SINKS[name])
        except ImportError as error:
            raise ImportError(
                f"telemetry.sinks contains {name!r}, but its library is not installed ({error}): "
                f"pip install 'rollbook[{name}]'"
            ) from error
        opened[name] = module.open_sink(config, directory=directory, run_name=run_name, settings=settings)
    return opened


class Forwarder:
    """A thread that follows the file during the `with` block, and reads it to its end on exit."""

    def __init__(self, metrics_file: Path, sinks: Mapping[str, Sink], *, position_file: Path) -> None:
        self._metrics_file = metrics_file
        self._sinks = dict(sinks)
        self._position_file = position_file
        self._failures = {
            name: FailureReport(f"metrics are not shown in {name}") for name in (*self._sinks, metrics_file.name)
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
            self._guard(self._metrics_file.name, self._forward_new_rows)
        for name, sink in self._sinks.items():
            self._guard(name, sink.close)

    def _forward_new_rows(self) -> None:
        if not self._metrics_file.exists():
            return
        position = int(self._position_file.read_text(encoding="utf-8")) if self._position_file.exists() else 0
        with self._metrics_file.open("rb") as file:
            file.seek(position)
            text = file.read()
        # The last line may be incomplete: another process is writing it.
        whole, newline, _ = text.rpartition(b"\n")
        for line in whole.splitlines():
            self._forward(json.loads(line))
        if newline:
            self._position_file.write_text(str(position + len(whole) + 1), encoding="utf-8")

    def _forward(self, row: dict[str, Any]) -> None:
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
