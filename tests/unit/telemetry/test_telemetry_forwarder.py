"""The forwarder reads files of processes that may be killed at any moment, on a disk that may be full."""

from collections.abc import Sequence
from pathlib import Path

from rollbook.telemetry.metrics import Metric, MetricRecorder
from rollbook.telemetry.sinks.forwarder import Forwarder
from rollbook.telemetry.sinks.sink import Row, Sink
from rollbook.telemetry.spans import Span, SpanRecorder


class RecordingSink(Sink):
    shows_spans = True

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rollouts: list[int] = []
        self.spans: list[str] = []

    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        self.steps.append(step)

    def write_rollouts(self, rows: Sequence[Row], *, step: int) -> None:
        self.rollouts.append(step)

    def write_spans(self, spans: Sequence[Span]) -> None:
        self.spans += [span.name for span in spans]


def record_step(path: Path, step: int) -> None:
    recorder = MetricRecorder("trainer", (Metric("train/loss", "", "loss"),), path)
    recorder.add("train/loss", 1.0)
    recorder.tick(step=step, replay=False)


def test_a_line_that_a_kill_has_torn_costs_no_other_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record_step(path, 1)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"half a line\n')
    record_step(path, 2)
    (tmp_path / "rollouts.jsonl").write_text('{"step": 2}\n', encoding="utf-8")
    sink = RecordingSink()
    with Forwarder(tmp_path, {"a": sink}):
        pass
    assert sink.steps == [1, 2]
    assert sink.rollouts == [2]


def test_a_position_file_that_a_full_disk_has_emptied_does_not_stop_the_trainer(tmp_path: Path) -> None:
    record_step(tmp_path / "metrics.jsonl", 1)
    (tmp_path / "telemetry_position").touch()
    sink = RecordingSink()
    with Forwarder(tmp_path, {"a": sink}):
        pass
    assert sink.steps == [1]


def test_spans_are_forwarded_after_their_file_was_full_and_another_one_was_begun(tmp_path: Path) -> None:
    sink, file = RecordingSink(), tmp_path / "spans" / "rollout.jsonl"
    recorder = SpanRecorder("rollout", file)
    for name in ("a", "b"):
        recorder.record(name, 1.0, 2.0)
    with Forwarder(tmp_path, {"a": sink}):
        pass
    recorder.record("c", 1.0, 2.0)
    recorder.close()
    file.replace(file.with_name("rollout.jsonl.1"))
    recorder = SpanRecorder("rollout", file)
    recorder.record("d", 1.0, 2.0)
    recorder.close()
    with Forwarder(tmp_path, {"a": sink}):
        pass
    assert sink.spans == ["a", "b", "c", "d"]
