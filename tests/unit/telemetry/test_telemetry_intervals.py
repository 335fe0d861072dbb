"""Intervals of spans: union, clipping and concurrency."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.telemetry.intervals import Intervals, read_intervals
from tests.parts.dashboard.run_dir import append_rows, write_run

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=30)


def intervals(pairs: list[tuple[int, int]]) -> Intervals:
    return Intervals(np.array([a for a, _ in pairs], float), np.array([b for _, b in pairs], float))


def seconds(disjoint: Intervals) -> float:
    return float((disjoint.ends - disjoint.starts).sum())


def covered(pairs: list[tuple[int, int]]) -> set[int]:
    """Unit cells of time that some span covers, computed naively."""
    return {cell for a, b in pairs for cell in range(a, b)}


@given(pairs=spans)
def test_the_union_covers_the_same_time_without_overlap(pairs: list[tuple[int, int]]) -> None:
    union = intervals(pairs).union()
    assert seconds(union) == pytest.approx(len(covered(pairs)))
    assert all(union.starts[1:] > union.ends[:-1])


@given(pairs=spans)
def test_concurrency_equals_a_count_of_each_cell(pairs: list[tuple[int, int]]) -> None:
    running = intervals(pairs).mean_concurrency(np.arange(0.0, 91.0))
    assert running == pytest.approx([sum(a <= cell < b for a, b in pairs) for cell in range(90)])


@given(pairs=spans, begin=st.integers(0, 80), width=st.integers(1, 40))
def test_clipping_keeps_exactly_the_time_inside_the_window(
    pairs: list[tuple[int, int]], begin: int, width: int
) -> None:
    inside = intervals(pairs).union().within(begin, begin + width)
    assert seconds(inside) == pytest.approx(len(covered(pairs) & set(range(begin, begin + width))))


def test_gaps_too_thin_to_draw_are_closed() -> None:
    assert len(intervals([(0, 1), (2, 3), (9, 10)]).union(gap_s=1.5)) == 2


def test_spans_of_all_processes_are_found_by_name_and_broken_rows_skipped(tmp_path: Path) -> None:
    write_run(tmp_path, steps=5)
    append_rows(
        tmp_path / "spans" / "worker-1.jsonl",
        {"name": "trainer.train", "start": "soon", "end": 2.0},
        {"name": "trainer.train", "start": 9.0, "end": 2.0},
        {"name": ["trainer.train"], "start": 1.0, "end": 2.0},
        {"name": "trainer.train", "start": 1.0, "end": 2.0},
    )
    found = read_intervals(tmp_path, ["trainer.train", "never.recorded"])
    assert len(found["trainer.train"]) == 6
    assert len(found["never.recorded"]) == 0
