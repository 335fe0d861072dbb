"""Inputs and outputs of a loss: flat tensors over the trained tokens of one pass."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Larger ratios of probabilities count as this one: it is far beyond every clip, and an infinite ratio would make gradients NaN."""


# N trained tokens of the pass, R sequences they belong to
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Trained tokens only, so no mask is needed. The gradient flows through `current_N` only.

    All trained tokens of a sequence are in one pass, so sequence-level values can be computed here.
    """

    current_N: Tensor
    """Log-probabilities under the weights being trained."""
    old_N: Tensor
    """Log-probabilities in the denominator of the ratio: under the weights at the start of the step, or under the sampling
    policy."""
    sampled_N: Tensor
    """Log-probabilities under the sampling policy; those of the step's starting policy where they are unknown."""
    advantages_N: Tensor
    row_of_N: Tensor
    """Index of the token's sequence in this pass, below `num_rows`."""
    num_rows: int

    @property
    def ratio_N(self) -> Tensor:
        """current / old."""
        return torch.exp((self.current_N - self.old_N).clamp(max=MAX_LOG_RATIO))

    def sequence_mean_N(self, values_N: Tensor) -> Tensor:
        """At every token, the mean of the values over the trained tokens of its sequence."""
        sums_R = self._sums_R(values_N)
        counts_R = self._sums_R(torch.ones_like(values_N))
        return (sums_R / counts_R.clamp(min=1.0)).index_select(0, self.row_of_N)

    def sequence_sum_N(self, values_N: Tensor) -> Tensor:
        """At every token, the sum of the values over the trained tokens of its sequence."""
        return self._sums_R(values_N).index_select(0, self.row_of_N)

    def _sums_R(self, values_N: Tensor) -> Tensor:
        zeros_R = torch.zeros(self.num_rows, dtype=values_N.dtype, device=values_N.device)
        return zeros_R.index_add(0, self.row_of_N, values_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Settings of a loss. `LOSS_DEFAULTS` in `trainer/loss_settings.py` lists which ones each loss reads; others are rejected."""

    clip_low: float = math.nan
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = math.nan
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float = math.inf
    """Where the advantage is negative, the loss is capped at this times the advantage."""
    dro_beta: float = math.nan
    """Weight of the squared distance to the old policy."""
    behaviour_cap: float = math.inf
    """Tokens whose weight old / sampled is above this are masked."""
    sapo_tau: float = math.nan
    """Steepness of the sigmoid where the advantage is positive."""
    sapo_tau_negative: float = math.nan
    """Steepness of the sigmoid where the advantage is negative."""
    divergence_bound: float = math.inf
    """Tokens whose probability moved by more than this are masked."""
    m2_bound: float = math.inf
    """Bound of the mean of (log ratio)² of the tokens that are not masked."""
    options: Mapping[str, float] = field(default_factory=dict)
    """`trainer.loss_options`, for a user's own loss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTerms:
    loss_N: Tensor
    """Loss of each token, not yet reduced."""
    is_clipped_N: Tensor
    """Whether the token's gradient was clipped."""


class Loss(Protocol):
    def __call__(self, inputs: LossInputs, settings: LossSettings) -> LossTerms: ...
