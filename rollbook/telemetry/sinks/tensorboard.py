"""Writes TensorBoard event files, without torch."""

import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rollbook.telemetry.config import TelemetryConfig


class TensorBoardSink:
    """Writes one event file per process start; TensorBoard joins them."""

    def __init__(self, directory: Path) -> None:
        self._writer = EventFileWriter(str(directory))

    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        summary = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=at or time.time(), step=step, summary=Summary(value=summary)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_sink(config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]) -> TensorBoardSink:
    return TensorBoardSink(directory / "tensorboard")
