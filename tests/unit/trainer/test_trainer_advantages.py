"""Advantages: length penalties, masked samples and normalisation over the batch."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rollbook.contracts.trajectory import EndReason
from rollbook.trainer.advantages.episodes import advantages, overlong_penalties
from rollbook.trainer.data.minibatches import plan_minibatch
from rollbook.trainer.data.rows import flatten
from tests.parts.trainer.batches import batch_of, quick, row, sample


def test_length_penalties_apply_before_the_baseline() -> None:
    costs = overlong_penalties(np.array([0, 60, 80, 90, 100, 500]), max_tokens=100, buffer=40, penalty=2.0)
    np.testing.assert_allclose(costs, [0.0, 0.0, 1.0, 1.5, 2.0, 2.0])
    long, short = row([1, 5, 6, 7, 8], [1, 2, 3, 4]), row([1, 5, 6], [2])
    batch = batch_of(1, [[sample(long, reward=1.0), sample(short, reward=1.0)]])
    assert {r.advantage for r in flatten(batch, quick())} == {0.0}
    penalised = flatten(batch, quick(overlong_tokens=4, overlong_buffer=2))
    assert [r.advantage < 0 for r in penalised] == [True, False]


def test_truncated_samples_can_be_masked_but_still_count_in_the_baseline() -> None:
    good, cut = sample(reward=1.0), replace(sample(reward=0.0), finish_reason=EndReason.MAX_TOKENS)
    batch = batch_of(1, [[good, cut]])
    assert len(flatten(batch, quick())) == 2
    (remaining,) = flatten(batch, quick(mask_truncated=True))
    assert remaining.advantage == pytest.approx(math.sqrt(0.5), rel=1e-3), "the mean is still that of both samples"


def test_reinforce_plus_plus_normalises_over_the_batch() -> None:
    rewards, groups = np.array([1.0, 0.0, 5.0, math.nan]), np.array([0, 0, 1, 1])
    normalised = advantages(rewards, groups, kind="reinforce_pp")
    scored = rewards[:3]
    np.testing.assert_allclose(normalised[:3], (scored - scored.mean()) / (scored.std(ddof=1) + 1e-4), rtol=1e-6)
    assert normalised[3] == 0
    by_group = advantages(rewards, groups, kind="reinforce_pp_baseline")
    centred = np.array([0.5, -0.5, 0.0])
    np.testing.assert_allclose(by_group[:3], centred / (centred.std(ddof=1) + 1e-4), rtol=1e-6)
    np.testing.assert_allclose(
        advantages(np.array([1.0, 0, 0, 0]), np.zeros(4, np.int64), kind="maxrl"), [3, -1, -1, -1]
    )


def test_token_weights_multiply_the_weight_of_the_reduction() -> None:
    weighted = row([1, 5, 6, 7], [1, 2, 3]).with_columns(weights=[9, 0.5, 2, 0])
    plain = row([1, 8, 9], [2])
    rows = flatten(batch_of(1, [[sample(weighted, reward=1.0), sample(plain, reward=0.0)]]), quick())
    for reduction, expected in (("token_mean", [0.125, 0.5, 0, 0.25]), ("sequence_mean", [1 / 12, 1 / 3, 0, 0.5])):
        (micro,) = plan_minibatch(rows, quick(reduction=reduction), is_packed=False).microbatches
        np.testing.assert_allclose(micro.weights_N[np.argsort(micro.targets_N)], expected)
