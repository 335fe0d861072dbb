"""Forwards a run directory to Trackio or MLflow and prints what the library stored. Runs in `.venvs/sinks`.

Usage: `sink_program.py SINK DIRECTORY`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rollbook.telemetry.config import TelemetryConfig
from rollbook.telemetry.sinks.forwarder import Forwarder, open_sinks


def stored_by_trackio(directory: Path) -> dict[str, Any]:
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(Api().runs("rollbook"))
    rows = SQLiteStorage.get_logs("rollbook", "r")
    losses = [[row["step"], row["train/loss"]] for row in rows if "train/loss" in row]
    tables = [json.dumps(row["rollouts"]) for row in rows if "rollouts" in row]
    return {"runs": len(runs), "losses": losses, "rollouts": "".join(tables)}


def stored_by_mlflow(directory: Path) -> dict[str, Any]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=(directory / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("rollbook")
    runs = client.search_runs([experiment.experiment_id])
    losses = [[m.step, m.value] for m in client.get_metric_history(runs[0].info.run_id, "train/loss")]
    tables = [path.read_text() for path in (directory / "mlruns").rglob("rollouts/*.json")]
    return {"runs": len(runs), "losses": losses, "rollouts": "".join(tables)}


if __name__ == "__main__":
    name, directory = sys.argv[1], Path(sys.argv[2])
    config = TelemetryConfig.model_validate({"sinks": [name]})
    with Forwarder(directory, open_sinks(config, directory=directory, run_name="r", settings={"lr": 1})):
        pass
    stored = stored_by_trackio(directory) if name == "trackio" else stored_by_mlflow(directory)
    sys.stdout.write("\n" + json.dumps(stored) + "\n")
