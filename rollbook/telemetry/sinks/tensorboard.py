"""Writes TensorBoard event files, without torch."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rollbook.telemetry.config import TelemetryConfig
from rollbook.telemetry.sinks.sink import Row, Sink


class TensorBoardSink(Sink):
    """Writes one event file per process start; TensorBoard joins them."""

    def __init__(self, directory: Path) -> None:
        self._writer = EventFileWriter(str(directory))

    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        summary = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=at or time.time(), step=step, summary=Summary(value=summary)))
        self._writer.flush()

    def write_rollouts(self, rows: Sequence[Row], *, step: int) -> None:
        """Rows as Markdown: a line of facts, then the text as it is."""
        blocks = []
        for row in rows:
            facts = ", ".join(f"{name} {row.get(name)}" for name in ("group", "sample", "reward", "advantage", "end"))
            indented = "\n".join(f"    {line}" for line in str(row.get("text", "")).splitlines())
            blocks.append(f"**{facts}**\n\n{indented}")
        summary = text_pb("rollouts", "\n\n".join(blocks))
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_sink(config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]) -> TensorBoardSink:
    return TensorBoardSink(directory / "tensorboard")
