"""What every loss is given and gives: flat arrays over the trained tokens of one pass."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


# N trained tokens of the pass
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Only trained tokens are here, so no mask is needed. Gradient flows through `current_N` alone."""

    current_N: Tensor
    """Log-probabilities under the weights being trained."""
    old_N: Tensor
    """Under the weights at the start of the step."""
    sampled_N: Tensor
    """Under the policy that sampled; equal to `old_N` where it is unknown."""
    advantages_N: Tensor
    row_of_N: Tensor
    """Number of the token's sequence in its minibatch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTerms:
    loss_N: Tensor
    """Loss of each token, not yet reduced."""
    is_clipped_N: Tensor
    """Whether the token's gradient was cut off by a clip."""


class Loss(Protocol):
    def __call__(self, inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossTerms: ...
