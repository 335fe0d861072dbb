"""Samplers, and each part of the score."""

from typing import Any

import numpy as np
import pytest

from rollbook.tasks.samplers import (
    NEVER,
    MasterySampler,
    SequentialSampler,
    TaskStates,
    WeightedSampler,
    random_numbers,
)
from tests.parts.tasks.curriculum import rules


def task_states(count: int = 4, **changed: Any) -> TaskStates:
    """Tasks that were all drawn once, long ago, and never succeeded."""
    given: dict[str, Any] = {
        "is_open": np.ones(count, dtype=np.bool_),
        "open_since": np.zeros(count, dtype=np.int64),
        "num_draws": np.ones(count, dtype=np.int64),
        "last_position": np.arange(count),
        "rate": np.zeros(count),
        "is_graduated": np.zeros(count, dtype=np.bool_),
        "reviews": np.zeros(count, dtype=np.int64),
        "weight": np.ones(count),
    }
    return TaskStates(**given | {name: np.array(value) for name, value in changed.items()})


def scores(position: int = 8, *, weights: dict[str, float] | None = None, **changed: Any) -> list[float]:
    zero = {"novelty": 0.0, "weakness": 0.0, "repetition": 1e-9, "recency": 0.0}
    sampler = MasterySampler(rules(**(zero | (weights or {}))), seed=0)
    return [round(float(score), 6) for score in sampler.scores(task_states(**changed), position)]


def test_novelty_fades_with_the_number_of_draws() -> None:
    assert scores(weights={"novelty": 6.0}, num_draws=[0, 1, 2, 5]) == [6, 3, 2, 1]


def test_weakness_is_one_minus_the_rate() -> None:
    assert scores(weights={"weakness": 2.0}, rate=[0.0, 0.25, 0.5, 1.0]) == [2, 1.5, 1, 0]


def test_recency_falls_to_0_within_one_round() -> None:
    assert scores(weights={"recency": 1.0}, last_position=[7, 6, 4, NEVER]) == [-0.75, -0.5, 0, 0]


@pytest.mark.parametrize(
    ("reviews", "interval_rounds"), [(0, 2), (1, 4), (2, 8), (3, 16), (4, 16), (1000, 16)], ids=str
)
def test_intervals_of_a_graduated_task_double_up_to_the_longest(reviews: int, interval_rounds: int) -> None:
    due = 4 * interval_rounds
    changed = {"last_position": [0] * 4, "is_graduated": [True] * 4, "reviews": [reviews] * 4}
    assert scores(due, weights={"repetition": 1.0}, **changed) == [0] * 4
    assert scores(due + 3, weights={"repetition": 1.0}, **changed) == [3] * 4


def test_the_intervals_are_settings() -> None:
    changed = {"last_position": [0] * 4, "is_graduated": [True, True, False, False], "reviews": [0, 9, 0, 0]}
    settings = {"repetition": 1.0, "repeat_after": 1.0, "repeat_at_most": 3.0, "longest_wait": 2.0}
    assert scores(20, weights=settings, **changed) == [16, 8, 12, 12]


def test_waiting_starts_when_the_tier_opens() -> None:
    changed = {"open_since": [0, 0, 90, 90], "last_position": [NEVER, 50, NEVER, 50]}
    assert scores(100, weights={"repetition": 1.0}, **changed) == [84, 34, 0, 0]


def test_a_closed_task_is_never_chosen() -> None:
    closed = task_states(
        4, is_open=[False, True, False, False], num_draws=[0, 9, 0, 0], weight=[99.0, 1e-9, 99.0, 99.0]
    )
    for sampler in (MasterySampler(rules(), 0), WeightedSampler(0), SequentialSampler()):
        assert {sampler.choose(closed, position) for position in range(50)} == {1}


def test_the_seed_decides_among_equal_scores() -> None:
    equal = task_states(8, last_position=[0] * 8)
    chosen = [[MasterySampler(rules(), seed).choose(equal, at) for at in range(20, 40)] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) > 3


def test_random_numbers_are_uniform_and_the_same_on_every_machine() -> None:
    drawn = np.concatenate([random_numbers(3, position, 100) for position in range(100)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.02
    start = mixed(mixed(3) + 5)
    assert random_numbers(3, 5, 3).tolist() == [
        (mixed(start + n * 0x9E3779B97F4A7C15) >> 11) / 2**53 for n in (1, 2, 3)
    ]
    assert random_numbers(-1, 5, 1).tolist() == random_numbers(2**64 - 1, 5, 1).tolist()


def mixed(value: int) -> int:
    """Splitmix64 with Python integers."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def test_the_weighted_sampler_draws_in_proportion() -> None:
    chosen = [WeightedSampler(2).choose(task_states(3, weight=[1.0, 2.0, 7.0]), at) for at in range(4000)]
    shares = np.bincount(chosen, minlength=3) / len(chosen)
    assert np.allclose(shares, [0.1, 0.2, 0.7], atol=0.03)


def test_the_sequential_sampler_follows_the_order_of_the_source() -> None:
    assert SequentialSampler().choose(task_states(4, num_draws=[2, 1, 2, 1]), 0) == 1
