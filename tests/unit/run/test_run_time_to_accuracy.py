"""When a learning curve has reached an accuracy, and how runs are compared by it."""

from typing import Any

from benchmarks.learning.asynchrony import figures_of
from benchmarks.learning.runs import first_in_a_row


def row(bound: int, seed: int, seconds: float | None) -> dict[str, Any]:
    common = {"start_s": 10.0, "step_s": 1.0, "generation_s": 0.5, "training_s": 0.5}
    return {"bound": bound, "seed": seed, "seconds": {"0.4": seconds}, "steps": {"0.4": seconds and 20}, **common}


def test_one_lucky_evaluation_does_not_reach_the_mark() -> None:
    assert first_in_a_row([0.1, 0.5, 0.3, 0.4, 0.45, 0.2], 0.4, 2) == 3
    assert first_in_a_row([0.1, 0.5, 0.3, 0.4], 0.4, 2) is None
    assert first_in_a_row([0.1, 0.5, 0.3], 0.4, 1) == 1
    assert first_in_a_row([], 0.4, 1) is None


def test_the_ratio_compares_medians_of_seeds_that_both_kinds_have() -> None:
    rows = [row(0, 0, 80.0), row(2, 0, 40.0), row(0, 1, 90.0), row(2, 1, 50.0), row(0, 2, 100.0), row(2, 1000, 1.0)]
    (figure,) = figures_of(rows, bound=2, marks=[0.4])
    assert (figure.ours, figure.peer) == (45.0, 85.0)
    assert figure.more["seeds"] == [0, 1]


def test_a_run_that_missed_the_accuracy_counts_as_infinitely_long() -> None:
    rows = [row(0, 0, 80.0), row(0, 1, 90.0), row(0, 2, None), *(row(2, seed, 40.0) for seed in range(3))]
    (figure,) = figures_of(rows, bound=2, marks=[0.4])
    assert figure.peer == 90.0
    assert figure.more["synchronous_s"] == [80.0, 90.0, None]
    assert figures_of([row(0, 0, None), row(2, 0, 40.0)], bound=2, marks=[0.4]) == []
    assert figures_of([], bound=2, marks=[0.4]) == []
