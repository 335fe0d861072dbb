"""The plain policy gradient: -A log pi. With A = 1 it is the loss of a demonstration."""

import torch

from rollbook.trainer.losses.inputs import LossInputs, LossTerms


def reinforce(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossTerms:
    """Nothing is clipped: whatever the policy was when the token was sampled, its gradient counts in full."""
    nothing = torch.zeros_like(inputs.current_N, dtype=torch.bool)
    return LossTerms(loss_N=-inputs.current_N * inputs.advantages_N, is_clipped_N=nothing)
