"""Sends metrics to Weights & Biases."""

from pathlib import Path
from typing import Any

import wandb

from rollbook.telemetry.config import TelemetryConfig


class WandbSink:
    """One W&B run per run, also over restarts: its id is the name of the run."""

    def __init__(self, run: Any) -> None:
        self._run = run
        # Processes write at different times; all metrics are plotted over the trainer's steps.
        run.define_metric("trainer_step")
        run.define_metric("*", step_metric="trainer_step")

    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        self._run.log({**values, "trainer_step": step})

    def close(self) -> None:
        self._run.finish()


def open_sink(config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]) -> WandbSink:
    is_online = config.wandb_mode == "online"
    (directory / "wandb").mkdir(parents=True, exist_ok=True)
    return WandbSink(
        wandb.init(
            project=config.wandb_project,
            name=run_name,
            id=run_name if is_online else None,
            resume="allow" if is_online else None,
            dir=str(directory),
            mode=config.wandb_mode,
            config=settings,
            settings=wandb.Settings(silent=True, console="off"),
        )
    )
