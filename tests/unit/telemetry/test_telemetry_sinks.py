"""Metrics reach TensorBoard and Weights & Biases (offline) once, also over restarts; a failing sink stops nothing."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollbook.telemetry.config import TelemetryConfig
from rollbook.telemetry.metrics import Metric, MetricRecorder
from rollbook.telemetry.sinks.forwarder import SINKS, Forwarder, open_sinks

TABLE = (Metric("train/loss", "", "loss"), Metric("train/none", "", "never measured"))


class RecordingSink:
    def __init__(self, *, fails: bool = False) -> None:
        self.rows: list[tuple[str, int, dict[str, float]]] = []
        self.closed = False
        self._fails = fails

    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        if self._fails:
            raise OSError("no route")
        self.rows.append((process, step, values))

    def close(self) -> None:
        self.closed = True


def record_losses(path: Path, losses: list[float], *, first: int = 1) -> None:
    recorder = MetricRecorder("trainer", TABLE, path)
    for step, loss in enumerate(losses, start=first):
        recorder.add("train/loss", loss)
        recorder.tick(step=step, replay=False)


def test_rows_are_forwarded_once_with_the_trainer_step_also_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record_losses(path, [3.0, 2.0])
    MetricRecorder("rollout", (Metric("rollout/raw_reward", "", "reward"),), path).tick()
    first, second = RecordingSink(), RecordingSink()
    with Forwarder(path, {"a": first}, position_file=tmp_path / "position"):
        pass
    record_losses(path, [1.0], first=3)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"half a line')
    with Forwarder(path, {"a": second}, position_file=tmp_path / "position"):
        pass
    assert first.rows == [("trainer", 1, {"train/loss": 3.0}), ("trainer", 2, {"train/loss": 2.0}), ("rollout", 2, {})]
    assert second.rows == [("trainer", 3, {"train/loss": 1.0})]
    assert first.closed


def test_a_sink_that_fails_stops_neither_training_nor_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record_losses(tmp_path / "metrics.jsonl", [3.0, 2.0])
    good = RecordingSink()
    sinks = {"bad": RecordingSink(fails=True), "good": good}
    with Forwarder(tmp_path / "metrics.jsonl", sinks, position_file=tmp_path / "position"):
        pass
    assert len(good.rows) == 2
    assert [r.getMessage() for r in caplog.records] == ["metrics are not shown in bad: no route"]


def test_tensorboard_reads_the_metrics(tmp_path: Path) -> None:
    config = TelemetryConfig(sinks=("tensorboard",))
    record_losses(tmp_path / "metrics.jsonl", [3.0, 2.0, 1.0])
    sinks = open_sinks(config, directory=tmp_path, run_name="r", settings={})
    with Forwarder(tmp_path / "metrics.jsonl", sinks, position_file=tmp_path / "position"):
        pass
    read: Any = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(1, 3.0), (2, 2.0), (3, 1.0)]


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_stores_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    config = TelemetryConfig(sinks=("wandb",), wandb_mode="offline", wandb_project="p")
    record_losses(tmp_path / "metrics.jsonl", [3.0, 2.0])
    sinks = open_sinks(config, directory=tmp_path, run_name="r", settings={"lr": 1})
    with Forwarder(tmp_path / "metrics.jsonl", sinks, position_file=tmp_path / "position"):
        pass
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    # A separate process of wandb writes the file, a moment later.
    until = time.monotonic() + 60
    while b"train/loss" not in kept.read_bytes() and time.monotonic() < until:
        time.sleep(0.1)
    content = kept.read_bytes()
    assert b"train/loss" in content
    assert b"trainer_step" in content


def test_every_sink_of_the_config_has_a_module() -> None:
    named = json.dumps(TelemetryConfig.model_json_schema()["properties"]["sinks"])
    assert all(f'"{name}"' in named for name in SINKS)
