"""Sends metrics and rollouts to Weights & Biases."""

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from rollbook.telemetry.config import TelemetryConfig
from rollbook.telemetry.sinks.sink import ROLLOUT_COLUMNS, Row, Sink


class WandbSink(Sink):
    def __init__(self, run: Any) -> None:
        self._run = run
        # Processes write at different times; all metrics are plotted over the trainer's steps.
        run.define_metric("trainer_step")
        run.define_metric("*", step_metric="trainer_step")
        # Rows are added to one table; a new table for each step would hide those of earlier steps.
        self._table: Any = wandb.Table(columns=list(ROLLOUT_COLUMNS), log_mode="INCREMENTAL")

    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        self._run.log({**values, "trainer_step": step})

    def write_rollouts(self, rows: Sequence[Row], *, step: int) -> None:
        for row in rows:
            self._table.add_data(*(row.get(column) for column in ROLLOUT_COLUMNS))
        self._run.log({"rollouts": self._table, "trainer_step": step})

    def close(self) -> None:
        self._run.finish()


def open_sink(config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]) -> WandbSink:
    """What the config leaves out is read from W&B's environment variables. A restart continues the same W&B run."""
    (directory / "wandb").mkdir(parents=True, exist_ok=True)
    id_file = directory / "wandb" / "run_id"
    if not id_file.exists():
        id_file.write_text(os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8], encoding="utf-8")
    mode: Any = config.wandb_mode or os.environ.get("WANDB_MODE") or "online"
    return WandbSink(
        wandb.init(
            project=config.wandb_project or os.environ.get("WANDB_PROJECT") or "rollbook",
            entity=config.wandb_entity,
            group=config.wandb_group,
            tags=config.wandb_tags or None,
            name=os.environ.get("WANDB_NAME") or run_name,
            id=id_file.read_text(encoding="utf-8"),
            resume="allow" if mode == "online" else None,
            dir=str(directory),
            mode=mode,
            config=settings,
            settings=wandb.Settings(silent=True, console="off"),
        )
    )
