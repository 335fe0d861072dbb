"""Spans nest by context, so that concurrent tasks do not mix."""

import asyncio
import logging
from pathlib import Path

import pytest

from rollbook.telemetry.spans import Span, SpanRecorder, read_spans


def by_name(path: Path) -> dict[str, Span]:
    return {span.name: span for span in read_spans(path)}


def test_a_span_knows_its_parent(tmp_path: Path) -> None:
    recorder = SpanRecorder("trainer", tmp_path / "spans" / "trainer.jsonl")
    with recorder.span("step", number=4), recorder.span("forward"):
        pass
    with recorder.span("after"):
        pass
    recorder.close()
    spans = by_name(tmp_path / "spans" / "trainer.jsonl")
    assert spans["forward"].parent == spans["step"].id
    assert spans["step"].parent is None
    assert spans["after"].parent is None
    assert spans["step"].fields == {"number": 4}
    assert spans["step"].start <= spans["forward"].start <= spans["forward"].end <= spans["step"].end + 1e-4


def test_fields_added_during_a_span_are_kept(tmp_path: Path) -> None:
    recorder = SpanRecorder("policy", tmp_path / "policy.jsonl")
    with recorder.span("generate") as fields:
        fields["tokens"] = 17
    recorder.close()
    assert by_name(tmp_path / "policy.jsonl")["generate"].fields == {"tokens": 17}


async def test_concurrent_tasks_nest_separately(tmp_path: Path) -> None:
    recorder = SpanRecorder("rollout", tmp_path / "rollout.jsonl")
    both_are_open = asyncio.Barrier(2)

    async def play(name: str) -> None:
        with recorder.span(f"group {name}"):
            await both_are_open.wait()
            with recorder.span(f"turn {name}"):
                await both_are_open.wait()

    with recorder.span("run"):
        await asyncio.gather(play("a"), play("b"))
    recorder.close()
    spans = by_name(tmp_path / "rollout.jsonl")
    for name in "ab":
        assert spans[f"turn {name}"].parent == spans[f"group {name}"].id
        assert spans[f"group {name}"].parent == spans["run"].id


def test_a_span_whose_block_raises_is_recorded(tmp_path: Path) -> None:
    recorder = SpanRecorder("trainer", tmp_path / "trainer.jsonl")
    with pytest.raises(ZeroDivisionError), recorder.span("step"):
        _ = 1 / 0
    recorder.close()
    assert list(by_name(tmp_path / "trainer.jsonl")) == ["step"]


def test_a_span_with_given_times_is_recorded(tmp_path: Path) -> None:
    recorder = SpanRecorder("policy", tmp_path / "policy.jsonl")
    recorder.record("generate", 100.0, 100.5, tokens=3)
    recorder.close()
    (span,) = read_spans(tmp_path / "policy.jsonl")
    assert (span.start, span.end, span.fields) == (100.0, 100.5, {"tokens": 3})
    assert span.seconds == pytest.approx(0.5)


def test_spans_without_a_file_are_discarded() -> None:
    with SpanRecorder("trainer").span("step") as fields:
        fields["kept"] = False


def test_a_restarted_process_appends_to_the_same_file(tmp_path: Path) -> None:
    for _ in range(2):
        recorder = SpanRecorder("trainer", tmp_path / "trainer.jsonl")
        recorder.record("step", 1.0, 2.0)
        recorder.close()
    assert len(read_spans(tmp_path / "trainer.jsonl")) == 2


def test_a_field_that_is_not_json_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = SpanRecorder("trainer", tmp_path / "trainer.jsonl")
    with caplog.at_level(logging.WARNING, logger="rollbook.telemetry"):
        with recorder.span("odd", table={(1, 2): 3}):
            pass
        with recorder.span("even"):
            pass
    recorder.close()
    assert "even" in by_name(tmp_path / "trainer.jsonl")


def test_a_cut_or_foreign_line_is_ignored(tmp_path: Path) -> None:
    recorder = SpanRecorder("trainer", tmp_path / "trainer.jsonl")
    recorder.record("step", 1.0, 2.0)
    recorder.close()
    with (tmp_path / "trainer.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"not": "a span"}\n{"process": "trainer", "na')
    assert [span.name for span in read_spans(tmp_path / "trainer.jsonl")] == ["step"]
