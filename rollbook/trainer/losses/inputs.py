"""What every loss is given and gives: flat arrays over the trained tokens of one pass."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


# N trained tokens of the pass, R sequences they belong to
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Only trained tokens are here, so no mask is needed. Gradient flows through `current_N` alone.

    A sequence's trained tokens are all in one pass, so what is said about a whole sequence can be computed here.
    """

    current_N: Tensor
    """Log-probabilities under the weights being trained."""
    old_N: Tensor
    """Under the policy that the ratio is taken to: the weights at the start of the step, or those that sampled."""
    sampled_N: Tensor
    """Under the policy that sampled; equal to the step's starting policy where it is unknown."""
    advantages_N: Tensor
    row_of_N: Tensor
    """Number of the token's sequence in this pass, below `num_rows`."""
    num_rows: int

    def sequence_mean_N(self, values_N: Tensor) -> Tensor:
        """Mean of the values over each token's own sequence, at every token. Gaps between turns are not in it."""
        sums_R = torch.zeros(self.num_rows, dtype=values_N.dtype, device=values_N.device)
        sums_R = sums_R.index_add(0, self.row_of_N, values_N)
        counts_R = torch.zeros_like(sums_R).index_add(0, self.row_of_N, torch.ones_like(values_N))
        return (sums_R / counts_R.clamp(min=1.0)).index_select(0, self.row_of_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What a loss may be told. Each reads its own part; `trainer/config.py` says which, and refuses the rest."""

    clip_low: float = math.nan
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = math.nan
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float = math.inf
    """Where the advantage is negative, the loss grows to this times the advantage and no further."""
    dro_beta: float = math.nan
    """Weight of the squared distance to the old policy."""
    behaviour_cap: float = math.inf
    """Tokens whose weight old / sampled lies above are left out."""
    options: Mapping[str, float] = field(default_factory=dict)
    """For a loss of one's own: `trainer.loss_options`, as it was written."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTerms:
    loss_N: Tensor
    """Loss of each token, not yet reduced."""
    is_clipped_N: Tensor
    """Whether the token's gradient was cut off or bounded by a clip."""


class Loss(Protocol):
    def __call__(self, inputs: LossInputs, settings: LossSettings) -> LossTerms: ...
