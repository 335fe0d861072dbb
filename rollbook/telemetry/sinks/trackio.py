"""Stores metrics and rollouts with Trackio, on this machine or in a Space."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trackio

from rollbook.telemetry.config import TelemetryConfig
from rollbook.telemetry.sinks.sink import ROLLOUT_COLUMNS, Row, Sink


class TrackioSink(Sink):
    """Tables are stored for each step."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        self._run.log(values, step=step)

    def write_rollouts(self, rows: Sequence[Row], *, step: int) -> None:
        data = [[row.get(column) for column in ROLLOUT_COLUMNS] for row in rows]
        self._run.log({"rollouts": trackio.Table(columns=list(ROLLOUT_COLUMNS), data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


def open_sink(config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]) -> TrackioSink:
    """Trackio itself reads `TRACKIO_DIR` and `TRACKIO_SPACE_ID`."""
    return TrackioSink(
        trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or "rollbook",
            name=run_name,
            config=settings,
            resume="allow",
            embed=False,
        )
    )
