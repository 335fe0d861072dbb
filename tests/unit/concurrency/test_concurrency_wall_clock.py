"""Times of a process on another machine are those of the ledger's clock."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.concurrency.clock import OFFSET_SAMPLES, WallClock
from rollbook.telemetry import spans
from rollbook.telemetry.spans import SpanRecorder

DELAYS = st.floats(0.0, 5.0)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(DELAYS, DELAYS), min_size=1, max_size=20))
def test_the_error_is_at_most_the_shortest_recent_round_trip(offset: float, delays: list[tuple[float, float]]) -> None:
    clock, sent = WallClock(), 1e9
    for to_ledger, back in delays:
        clock.measure(sent=sent, received=sent + to_ledger + back, reported=sent + to_ledger + offset)
        sent += 10.0
    shortest = min(to_ledger + back for to_ledger, back in delays[-OFFSET_SAMPLES:])
    assert abs(clock.offset_s - offset) <= shortest + 1e-3


def test_an_offset_within_the_error_is_none() -> None:
    clock = WallClock()
    assert not clock.measure(sent=100.0, received=100.2, reported=100.15)
    assert clock.corrected(100.0) == 100.0


def test_a_clock_that_is_set_during_the_run_is_measured_again() -> None:
    clock = WallClock()
    for number in range(OFFSET_SAMPLES):
        clock.measure(sent=number, received=number + 0.01, reported=number + 0.005)
    for number in range(OFFSET_SAMPLES):
        clock.measure(sent=number, received=number + 0.02, reported=number + 60.0)
    assert clock.offset_s == pytest.approx(60.0, abs=0.02)


def test_spans_are_written_on_the_clock_of_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WallClock()
    clock.measure(sent=0.0, received=0.01, reported=50.0)
    monkeypatch.setattr(spans, "WALL_CLOCK", clock)
    recorder = SpanRecorder("policy-2", tmp_path / "spans.jsonl")
    recorder.record("engine.step", 100.0, 101.0)
    recorder.close()
    row = json.loads((tmp_path / "spans.jsonl").read_text())
    assert row["start"] == pytest.approx(150.0, abs=0.01)
    assert row["end"] - row["start"] == pytest.approx(1.0)
