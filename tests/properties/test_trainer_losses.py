"""The clipped loss against a float64 reference written case by case, and its gradient against finite differences."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollbook.trainer.losses.clipped import clipped_ratio
from rollbook.trainer.losses.inputs import LossInputs, LossTerms

TOKENS = st.lists(
    st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-3, 3)).filter(lambda t: abs(t[0] - t[1]) < 3),
    min_size=1,
    max_size=20,
)


def reference_token(current: float, old: float, advantage: float, low: float, high: float) -> float:
    """Written as a case distinction: which way the advantage pulls, and whether the ratio has gone that way already."""
    ratio = math.exp(current) / math.exp(old)
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    return -advantage * max(ratio, 1 - low)


def evaluate(current: torch.Tensor, old: NDArray[np.float64], advantages: NDArray[np.float64]) -> LossTerms:
    olds = torch.from_numpy(old)
    inputs = LossInputs(
        current_N=current,
        old_N=olds,
        sampled_N=olds,
        advantages_N=torch.from_numpy(advantages),
        row_of_N=torch.zeros(len(old), dtype=torch.int64),
    )
    return clipped_ratio(inputs, clip_low=0.2, clip_high=0.28)


@given(tokens=TOKENS)
@settings(deadline=None)
def test_the_loss_is_that_of_the_reference(tokens: list[tuple[float, float, float]]) -> None:
    current, old, advantages = (np.array(column, dtype=np.float64) for column in zip(*tokens, strict=True))
    found = evaluate(torch.from_numpy(current), old, advantages).loss_N.numpy()
    expected = [reference_token(c, o, a, 0.2, 0.28) for c, o, a in tokens]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@given(tokens=TOKENS)
@settings(deadline=None, max_examples=50)
def test_the_gradient_is_the_slope_of_the_loss(tokens: list[tuple[float, float, float]]) -> None:
    # At the very edge of the clip there is no slope; a step of the difference must not straddle it.
    tokens = [t for t in tokens if all(abs(math.exp(t[0] - t[1]) - edge) > 1e-3 for edge in (0.8, 1.28))]
    if not tokens:
        return
    values, old, advantages = (np.array(column, dtype=np.float64) for column in zip(*tokens, strict=True))
    current = torch.from_numpy(values).requires_grad_()
    evaluate(current, old, advantages).loss_N.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    step = 1e-6
    above = evaluate(torch.from_numpy(values + step), old, advantages).loss_N
    below = evaluate(torch.from_numpy(values - step), old, advantages).loss_N
    assert current.grad is not None
    np.testing.assert_allclose(current.grad.numpy(), ((above - below) / (2 * step)).numpy(), rtol=1e-4, atol=1e-6)


def test_only_tokens_beyond_the_clip_in_the_wanted_direction_count_as_clipped() -> None:
    ratios = np.array([1.5, 1.5, 0.5, 0.5, 1.1, 1.5])
    advantages = np.array([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    current = torch.from_numpy(np.log(ratios)).requires_grad_()
    terms = evaluate(current, np.zeros(6), advantages)
    assert terms.is_clipped_N.tolist() == [True, False, False, True, False, False]
    terms.loss_N.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert current.grad is not None
    assert (current.grad == 0).tolist() == [True, False, False, True, False, True]
