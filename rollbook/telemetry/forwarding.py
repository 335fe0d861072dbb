"""Carries rows of `metrics.jsonl`, whichever process wrote them, to the sinks. How far it came is kept beside the file.

One process forwards for all, so a run is one run everywhere. A sink that fails is told about once and never stops training.
"""

import json
import logging
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rollbook.telemetry.sinks.sink import Sink

LOOK_S = 2.0
NOT_MEASURED = frozenset({"time", "step", "replay", "process"})


class Forwarder:
    """A thread that follows the file while the `with` block lasts, and reads it to its end on leaving."""

    def __init__(self, metrics_file: Path, sinks: Mapping[str, Sink], *, position_file: Path) -> None:
        self._metrics_file = metrics_file
        self._sinks = dict(sinks)
        self._position_file = position_file
        self._failed: set[str] = set()
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

    def pump(self) -> int:
        """Forward the whole lines that are new. Returns how many."""
        if not self._metrics_file.exists():
            return 0
        position = int(self._position_file.read_text(encoding="utf-8")) if self._position_file.exists() else 0
        with self._metrics_file.open("rb") as file:
            file.seek(position)
            text = file.read()
        whole, _, _ = text.rpartition(b"\n")
        lines = whole.splitlines()
        for line in lines:
            self._forward(json.loads(line))
        if lines:
            self._position_file.write_text(str(position + len(whole) + 1), encoding="utf-8")
        return len(lines)

    def _forward(self, row: dict[str, Any]) -> None:
        process = str(row.get("process", ""))
        if process == "trainer":
            self._step = int(row.get("step", self._step))
        values = {
            name: float(value)
            for name, value in row.items()
            if name not in NOT_MEASURED and isinstance(value, int | float) and math.isfinite(value)
        }
        for name, sink in self._sinks.items():
            self._guarded(name, lambda sink=sink: sink.write(
                values, process=process, step=self._step, at=float(row.get("time", 0.0))
            ))  # fmt: skip

    def _follow(self) -> None:
        while not self._ending.wait(LOOK_S):
            self._guarded("metrics.jsonl", self.pump)
        self._guarded("metrics.jsonl", self.pump)
        for name, sink in self._sinks.items():
            self._guarded(name, sink.close)

    def _guarded(self, name: str, work: Any) -> None:
        try:
            work()
        except Exception as error:  # a foreign library; whatever it raises, training goes on
            if name not in self._failed:
                self._failed.add(name)
                logging.getLogger("rollbook.telemetry").warning("metrics are not shown in %s: %s", name, error)
