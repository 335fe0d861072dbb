"""Start and end of busy periods."""

from pathlib import Path

from rollbook.inference.engines.busy import IDLE_GAP_S, MAX_PERIOD_S, BusyPeriods
from rollbook.telemetry.spans import Span, SpanRecorder, read_spans


def recorded(tmp_path: Path, steps: list[tuple[float, float, int]], *, update_at: int | None = None) -> list[Span]:
    path = tmp_path / "spans.jsonl"
    spans = SpanRecorder("policy", path)
    busy = BusyPeriods(spans, wall=lambda: 0.0)
    for index, (started, ended, publication) in enumerate(steps):
        if index == update_at:
            busy.updated(0.0, publication=publication, step=publication)
        busy.step(started, ended, requests=1, tokens=2, publication=publication)
    busy.end_period()
    spans.close()
    return [span for span in read_spans(path) if span.name == "policy.generate"]


def test_steps_close_together_are_one_period(tmp_path: Path) -> None:
    spans = recorded(tmp_path, [(0.0, 0.01, 1), (0.012, 0.02, 1), (0.03, 0.04, 1)])
    assert [(span.start, span.end) for span in spans] == [(0.0, 0.04)]
    assert spans[0].fields == {"requests": 3, "tokens": 6, "publication": 1}


def test_an_idle_gap_ends_a_period(tmp_path: Path) -> None:
    spans = recorded(tmp_path, [(0.0, 0.01, 1), (0.01 + 2 * IDLE_GAP_S, 0.1, 1)])
    assert len(spans) == 2


def test_new_weights_end_a_period(tmp_path: Path) -> None:
    assert [s.fields["publication"] for s in recorded(tmp_path, [(0.0, 0.01, 1), (0.01, 0.02, 2)])] == [1, 2]
    assert len(recorded(tmp_path / "same", [(0.0, 0.01, 1), (0.01, 0.02, 1)], update_at=1)) == 2


def test_a_long_period_is_recorded_in_pieces(tmp_path: Path) -> None:
    steps = [(index * 0.1, (index + 1) * 0.1, 1) for index in range(25)]
    spans = recorded(tmp_path, steps)
    assert len(spans) == 3
    assert max(span.seconds for span in spans) <= MAX_PERIOD_S + 0.11
    assert sum(span.fields["tokens"] for span in spans) == 50


def test_without_a_recorder_busy_seconds_are_summed() -> None:
    busy = BusyPeriods(None)
    busy.step(1.0, 1.5, requests=0, tokens=1, publication=1)
    busy.step(9.0, 9.25, requests=0, tokens=1, publication=1)
    assert busy.busy_s == 0.75
    assert not busy.is_open
