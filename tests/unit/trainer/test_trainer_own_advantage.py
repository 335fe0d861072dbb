"""A user's own advantage: by sample or by token; its errors stop the run and name the function."""

from pathlib import Path

import numpy as np
import pytest

from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import extend_search_path
from rollbook.trainer.advantages.registry import credit
from rollbook.trainer.data.rows import flatten
from tests.parts.trainer.batches import batch_of, quick, row, sample

CODE = """
import numpy as np


def by_sample(group, rewards):
    return rewards - np.nanmean(rewards)


def by_token(group, rewards):
    return [[np.arange(len(row)) for row in sample.sequences] for sample in group.samples]


def raises(group, rewards):
    return group.reward


def too_few(group, rewards):
    return [0.0]


def infinite(group, rewards):
    return [float("inf")] * len(rewards)


def short_arrays(group, rewards):
    return [[[0.0]] for _ in rewards]
"""


@pytest.fixture(autouse=True)
def own_functions(tmp_path: Path) -> None:
    (tmp_path / "own_advantages.py").write_text(CODE)
    extend_search_path([tmp_path])


def test_one_value_a_sample_is_used_for_its_tokens_and_an_unscorable_sample_has_none() -> None:
    batch = batch_of(1, [[sample(reward=1.0), sample(reward=None), sample(reward=0.0)], [sample(reward=3.0)]])
    config = quick(advantage="own_advantages:by_sample")
    np.testing.assert_array_equal(credit(batch, config).by_sample, [0.5, 0.0, -0.5, 0.0])
    assert [row.advantage for row in flatten(batch, config)] == [0.5, -0.5, 0.0]


def test_values_by_token_reach_the_trained_tokens_and_replace_those_of_the_producer() -> None:
    first, second = row([1, 5, 6, 7], [1, 3]), row([1, 8, 9], [2]).with_columns(advantages=[0.0, 0.0, -9.0])
    batch = batch_of(1, [[sample(first, second, reward=1.0), sample(reward=0.0)]])
    rows = flatten(batch, quick(advantage="own_advantages:by_token"))
    found = [None if row.token_advantages is None else row.token_advantages.tolist() for row in rows]
    assert found == [[1.0, 3.0], [2.0], [2.0]]
    assert credit(batch, quick(advantage="own_advantages:by_token")).by_sample.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"(?s)raised AttributeError: .*own_advantages\.py\", line \d+, in raises"),
        ("too_few", r"returned 1 values for the 2 samples of t0@1"),
        ("infinite", r"returned inf for sample 0 of t0@1"),
        ("short_arrays", r"shape \(1,\) for sequence 0 of sample 0 of t0@1, which has 3 tokens"),
    ],
)
def test_a_wrong_result_stops_the_run_and_says_what_is_wrong(name: str, message: str) -> None:
    batch = batch_of(1, [[sample(reward=1.0), sample(reward=0.0)]])
    with pytest.raises(RunError, match=message):
        flatten(batch, quick(advantage=f"own_advantages:{name}"))
