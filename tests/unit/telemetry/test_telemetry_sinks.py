"""Metrics, rollouts and spans reach every sink and its real library once, also over restarts; a failing sink stops nothing."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import extend_search_path, plugin_fault
from rollbook.telemetry.config import SINKS, TelemetryConfig
from rollbook.telemetry.metrics import Metric, MetricRecorder
from rollbook.telemetry.sinks.forwarder import Forwarder, open_sinks
from rollbook.telemetry.sinks.opentelemetry import OpenTelemetrySink
from rollbook.telemetry.sinks.prometheus import PrometheusSink
from rollbook.telemetry.sinks.sink import Row, Sink
from rollbook.telemetry.spans import SpanRecorder

ROOT = Path(__file__).parents[3]
SINKS_PYTHON = ROOT / ".venvs" / "sinks" / "bin" / "python"
TABLE = (Metric("train/loss", "", "loss"), Metric("train/none", "", "never measured"))


class RecordingSink(Sink):
    def __init__(self, *, fails: bool = False) -> None:
        self.rows: list[tuple[str, int, dict[str, float]]] = []
        self.rollouts: list[tuple[int, list[Row]]] = []
        self.closed = False
        self._fails = fails

    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        if self._fails:
            raise OSError("no route")
        self.rows.append((process, step, values))

    def write_rollouts(self, rows: Sequence[Row], *, step: int) -> None:
        self.rollouts.append((step, list(rows)))

    def close(self) -> None:
        self.closed = True


def record_losses(path: Path, losses: list[float], *, first: int = 1) -> None:
    recorder = MetricRecorder("trainer", TABLE, path)
    for step, loss in enumerate(losses, start=first):
        recorder.add("train/loss", loss)
        recorder.tick(step=step, replay=False)


OWN_SINKS = """
import rollbook


class Mine(rollbook.Sink):
    def __init__(self, *, directory, run_name, settings):
        self.name = run_name


def wrong(**arguments):
    return 1


def raises(**arguments):
    return 1 / 0
"""


def test_a_sink_of_a_user_is_opened_by_name_and_its_faults_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "own_sinks.py").write_text(OWN_SINKS, encoding="utf-8")
    extend_search_path([tmp_path])

    def opened(name: str) -> dict[str, Sink]:
        config = TelemetryConfig(sinks=(f"own_sinks:{name}",))
        return open_sinks(config, directory=tmp_path, run_name="first", settings={})

    assert opened("Mine")["own_sinks:Mine"].name == "first"  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"returned a int; it must return a rollbook\.Sink"):
        opened("wrong")
    with pytest.raises(RunError, match="raised ZeroDivisionError"):
        opened("raises")
    with pytest.raises(ValueError, match="did you mean 'wandb'"):
        TelemetryConfig(sinks=("wandbb",))


def test_rows_are_forwarded_once_with_the_trainer_step_also_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record_losses(path, [3.0, 2.0])
    MetricRecorder("rollout", (Metric("rollout/raw_reward", "", "reward"),), path).tick()
    first, second = RecordingSink(), RecordingSink()
    with Forwarder(tmp_path, {"a": first}):
        pass
    record_losses(path, [1.0], first=3)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"half a line')
    with Forwarder(tmp_path, {"a": second}):
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
    with Forwarder(tmp_path, sinks):
        pass
    assert len(good.rows) == 2
    assert [r.getMessage() for r in caplog.records] == ["metrics are not shown in bad: no route"]


def record_rollouts(directory: Path, step: int, *texts: str) -> None:
    with (directory / "rollouts.jsonl").open("a", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            row = {"step": step, "group": f"g{step}", "task": "t", "sample": number, "reward": 1.0, "advantage": 0.5}
            file.write(json.dumps({**row, "turns": 1, "tokens": 9, "end": "done", "text": text}) + "\n")


def test_rollouts_are_forwarded_by_step_once_and_an_old_position_file_is_understood(tmp_path: Path) -> None:
    record_losses(tmp_path / "metrics.jsonl", [3.0])
    (tmp_path / "telemetry_position").write_text(str((tmp_path / "metrics.jsonl").stat().st_size))
    record_rollouts(tmp_path, 1, "a", "b")
    record_rollouts(tmp_path, 2, "c")
    first, second = RecordingSink(), RecordingSink()
    with Forwarder(tmp_path, {"a": first}):
        pass
    record_rollouts(tmp_path, 3, "d")
    with Forwarder(tmp_path, {"a": second}):
        pass
    assert first.rows == []
    assert [(step, [row["text"] for row in rows]) for step, rows in first.rollouts] == [(1, ["a", "b"]), (2, ["c"])]
    assert [step for step, _ in second.rollouts] == [3]


def test_tensorboard_reads_the_metrics(tmp_path: Path) -> None:
    config = TelemetryConfig(sinks=("tensorboard",))
    record_losses(tmp_path / "metrics.jsonl", [3.0, 2.0, 1.0])
    record_rollouts(tmp_path, 1, "first answer")
    record_rollouts(tmp_path, 2, "second answer")
    sinks = open_sinks(config, directory=tmp_path, run_name="r", settings={})
    with Forwarder(tmp_path, sinks):
        pass
    read: Any = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(1, 3.0), (2, 2.0), (3, 1.0)]
    texts = [(event.step, event.tensor_proto.string_val[0].decode()) for event in read.Tensors("rollouts")]
    assert [step for step, _ in texts] == [1, 2]
    assert "reward 1.0" in texts[0][1]
    assert "    first answer" in texts[0][1]


@pytest.mark.filterwarnings("ignore")
def test_wandb_honours_its_variables_keeps_every_step_and_continues_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"PROJECT": "mine", "ENTITY": "team", "RUN_GROUP": "sweep", "TAGS": "a,b", "MODE": "offline"}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    config = TelemetryConfig(sinks=("wandb",))
    for steps in ((1, 2), (3,)):
        for step in steps:
            record_losses(tmp_path / "metrics.jsonl", [3.0], first=step)
            record_rollouts(tmp_path, step, f"answer {step}")
        sinks = open_sinks(config, directory=tmp_path, run_name="r", settings={"lr": 1})
        run = sinks["wandb"]._run  # type: ignore[attr-defined]  # what the library made of the settings
        assert (run.project, run.group, run.tags, run.name) == ("mine", "sweep", ("a", "b"), "r")
        assert run.settings.entity == "team"
        with Forwarder(tmp_path, sinks):
            pass
    run_id = (tmp_path / "wandb" / "run_id").read_text()
    kept = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))
    assert kept
    assert len(kept) == len(list((tmp_path / "wandb").glob("offline-run-*")))
    # A separate process of wandb writes the files, a moment later.
    until = time.monotonic() + 60
    while len(tables := [*(tmp_path / "wandb").rglob("*.table.json")]) < 3 and time.monotonic() < until:
        time.sleep(0.1)
    kept_rows = [
        dict(zip(table["columns"], row, strict=True))
        for file in tables
        for table in [json.loads(file.read_text())]
        for row in table["data"]
    ]
    shown = sorted((row["step"], row["text"], row["reward"], row["advantage"]) for row in kept_rows)
    assert shown == [(step, f"answer {step}", 1.0, 0.5) for step in (1, 2, 3)]
    assert any(b"train/loss" in file.read_bytes() for file in (tmp_path / "wandb").rglob("*.wandb"))


def test_prometheus_scrapes_the_latest_values(tmp_path: Path) -> None:
    config = TelemetryConfig(sinks=("prometheus",), prometheus_port=0)
    sink = open_sinks(config, directory=tmp_path, run_name='my "run"', settings={})["prometheus"]
    assert isinstance(sink, PrometheusSink)
    for step, loss in ((1, 3.0), (2, 2.5)):
        sink.write({"train/loss": loss}, process="trainer", step=step, at=0.0)
    response = httpx.get(f"http://127.0.0.1:{sink.port}/metrics", timeout=60)
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families["rollbook_train_loss"].samples[0].value == 2.5
    assert families["rollbook_train_loss"].samples[0].labels == {"run": 'my "run"', "process": "trainer"}
    assert families["rollbook_trainer_step"].samples[0].value == 2
    assert httpx.get(f"http://127.0.0.1:{sink.port}/", timeout=60).status_code == 404
    with pytest.raises(OSError, match="prometheus_port"):
        PrometheusSink("127.0.0.1", sink.port, run_name="other")
    sink.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{sink.port}/metrics", timeout=60)


def test_every_episode_is_a_trace_with_its_turns(tmp_path: Path) -> None:
    (tmp_path / "spans").mkdir()
    spans = SpanRecorder("rollout", tmp_path / "spans" / "rollout.jsonl")
    turns = [(100.0, 101.0), (101.0, 103.0)]
    for number, reward in enumerate((1.0, None)):
        spans.record("rollout.episode", 100.0, 104.0, group_id="g", episode=number, reward=reward, turns=turns)
    spans.record("trainer.train", 104.0, 105.0, step=1)
    spans.close()
    exporter = InMemorySpanExporter()
    with Forwarder(tmp_path, {"opentelemetry": OpenTelemetrySink(exporter, run_name="r")}):
        pass
    finished = exporter.get_finished_spans()
    episodes = [span for span in finished if span.name == "rollout.episode"]
    assert len({span.context.trace_id for span in episodes}) == 2
    assert episodes[0].attributes is not None
    assert episodes[0].attributes["rollbook.reward"] == 1.0
    for episode in episodes:
        children = [span for span in finished if span.parent == episode.context]
        assert [(span.name, span.start_time, span.end_time) for span in children] == [
            ("rollout.turn", int(start * 1e9), int(end * 1e9)) for start, end in turns
        ]
        assert {span.context.trace_id for span in children} == {episode.context.trace_id}
    assert [span.name for span in finished if span.parent is None] == ["rollout.episode"] * 2 + ["trainer.train"]


def test_traces_are_sent_over_otlp_to_the_endpoint_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    (tmp_path / "spans").mkdir()
    spans = SpanRecorder("rollout", tmp_path / "spans" / "rollout.jsonl")
    spans.record("rollout.episode", 100.0, 104.0, group_id="g", turns=[(100.0, 101.0)])
    spans.close()
    config = TelemetryConfig(sinks=("opentelemetry",))
    with Forwarder(tmp_path, open_sinks(config, directory=tmp_path, run_name="r", settings={})):
        pass
    collector.shutdown()
    collector.server_close()
    sent = [
        span.name
        for request in received
        for part in request.resource_spans
        for s in part.scope_spans
        for span in s.spans
    ]
    assert sent == ["rollout.episode", "rollout.turn"]


@pytest.mark.skipif(not SINKS_PYTHON.exists(), reason="make test-sinks installs Trackio and MLflow")
@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_trackio_and_mlflow_store_metrics_and_the_rollouts_of_every_step_in_one_run(tmp_path: Path, name: str) -> None:
    for step in (1, 2):
        record_losses(tmp_path / "metrics.jsonl", [4.0 - step], first=step)
        record_rollouts(tmp_path, step, f"answer {step}")
        done = subprocess.run(
            [
                str(SINKS_PYTHON),
                "-W",
                "ignore",
                str(ROOT / "tests/parts/telemetry/sink_program.py"),
                name,
                str(tmp_path),
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TRACKIO_DIR": str(tmp_path / "trackio"),
                "HF_HUB_OFFLINE": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    # Trackio prints lines of its own.
    stored = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert stored["runs"] == 1
    assert stored["losses"] == [[1, 3.0], [2, 2.0]]
    assert "answer 1" in stored["rollouts"]
    assert "answer 2" in stored["rollouts"]


def test_every_sink_of_the_config_has_a_module() -> None:
    for name in SINKS:
        assert plugin_fault(f"rollbook.telemetry.sinks.{name}:open_sink", setting="sink", search_path=()) is None
