"""Advantages equal a reference written with plain Python numbers."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.trainer.advantages.episodes import advantages

REWARDS = st.lists(
    st.tuples(st.integers(0, 4), st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0]), st.floats(-100, 100))),
    max_size=30,
)


def reference(rewards: list[float | None], kind: str) -> list[float]:
    scored = [r for r in rewards if r is not None]
    if len(scored) < 2 or statistics.stdev(scored) < 1e-8:
        return [0.0] * len(rewards)
    mean, std = statistics.fmean(scored), statistics.stdev(scored)
    formulas = {
        "group": lambda r: (r - mean) / (std + 1e-4),
        "dr_grpo": lambda r: r - mean,
        "rloo": lambda r: r - (math.fsum(scored) - r) / (len(scored) - 1),
    }
    return [0.0 if r is None else formulas[kind](r) for r in rewards]


@pytest.mark.parametrize("kind", ["group", "dr_grpo", "rloo"])
@given(members=REWARDS)
def test_each_group_is_normalised_over_its_own_scorable_samples(
    kind: str, members: list[tuple[int, float | None]]
) -> None:
    rewards = np.array([math.nan if r is None else r for _, r in members], dtype=np.float64)
    found = advantages(rewards, np.array([g for g, _ in members], dtype=np.int64), kind=kind)
    for group in {g for g, _ in members}:
        at = [n for n, (g, _) in enumerate(members) if g == group]
        expected = reference([members[n][1] for n in at], kind)
        np.testing.assert_allclose(found[at], expected, rtol=1e-6, atol=1e-6)


def test_tiny_differences_between_rewards_do_not_become_large_advantages() -> None:
    found = advantages(np.array([0.5, 0.5 + 1e-6]), np.zeros(2, dtype=np.int64), kind="group")
    assert 0 < found[1] < 0.01


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline"])
@given(members=st.lists(st.tuples(st.integers(0, 2), st.floats(-9, 9), st.integers(1, 9)), min_size=2, max_size=12))
def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_batch(
    kind: str, members: list[tuple[int, float, int]]
) -> None:
    groups, rewards, lengths = (np.array(column) for column in zip(*members, strict=True))
    values = rewards if kind == "reinforce_pp" else advantages(rewards, groups, kind="dr_grpo")
    tokens = np.repeat(values, lengths)
    expected = (values - tokens.mean()) / (tokens.std(ddof=1) + 1e-4)
    found = advantages(rewards, groups, kind=kind, num_tokens=lengths)
    np.testing.assert_allclose(found, expected if tokens.std(ddof=1) >= 1e-8 else 0 * values, rtol=1e-6, atol=1e-3)


def test_a_failed_environment_never_lowers_its_siblings() -> None:
    group = np.zeros(3, dtype=np.int64)
    with_failure = advantages(np.array([1.0, 0.0, math.nan]), group, kind="group")
    without = advantages(np.array([1.0, 0.0]), group[:2], kind="group")
    np.testing.assert_array_equal(with_failure, [*without, 0.0])


@pytest.mark.parametrize("kind", ["group", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [3.0], [math.nan, 2.0], [math.nan, math.nan]])
def test_equal_rewards_and_single_samples_have_advantage_zero(kind: str, rewards: list[float]) -> None:
    found = advantages(np.array(rewards), np.zeros(len(rewards), dtype=np.int64), kind=kind)
    np.testing.assert_array_equal(found, np.zeros(len(rewards)))


def test_arrays_of_unequal_length_are_rejected() -> None:
    with pytest.raises(ValueError, match="2 rewards, but 1 group numbers"):
        advantages(np.array([1.0, 2.0]), np.array([0]), kind="group")
