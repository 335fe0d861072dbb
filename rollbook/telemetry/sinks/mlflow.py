"""Sends metrics and rollouts to an MLflow tracking server, or stores them in `mlruns/` of the run directory."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric, Param

from rollbook.telemetry.config import TelemetryConfig
from rollbook.telemetry.sinks.sink import Row, Sink

MAX_PARAM_CHARS = 6000
"""MLflow's limit."""


class MlflowSink(Sink):
    def __init__(self, client: mlflow.MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        metrics = [Metric(name, value, int(at * 1000), step) for name, value in values.items()]
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def write_rollouts(self, rows: Sequence[Row], *, step: int) -> None:
        """One artifact for each step."""
        self._client.log_text(self._run_id, json.dumps(list(rows), ensure_ascii=False), f"rollouts/step_{step:06}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def open_sink(config: TelemetryConfig, *, directory: Path, run_name: str, settings: dict[str, Any]) -> MlflowSink:
    """Honours `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME`. A restart continues the same MLflow run."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or (directory / "mlruns").as_uri()
    if uri.startswith("file:"):
        # MLflow prefers a database, which needs its complete package.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=uri)
    id_file = directory / "mlflow_run_id"
    if id_file.exists():
        run_id = id_file.read_text(encoding="utf-8")
        client.update_run(run_id, status="RUNNING")
        return MlflowSink(client, run_id)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "rollbook"
    known = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if known is None else known.experiment_id
    run_id = client.create_run(experiment, run_name=run_name).info.run_id
    id_file.write_text(run_id, encoding="utf-8")
    params = [
        Param(section, json.dumps(value)[:MAX_PARAM_CHARS]) for section, value in settings.items() if value is not None
    ]
    client.log_batch(run_id, params=params)
    return MlflowSink(client, run_id)
