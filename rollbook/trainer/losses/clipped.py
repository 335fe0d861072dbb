"""The clipped ratio: max(-r*A, -clip(r, 1-low, 1+high)*A) with r = current / old."""

import torch

from rollbook.trainer.losses.inputs import LossInputs, LossTerms


def clipped_ratio(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossTerms:
    """A token whose ratio has already moved beyond the clip in the direction its advantage wants gives no gradient."""
    ratio = torch.exp(inputs.current_N - inputs.old_N)
    plain = -ratio * inputs.advantages_N
    clipped = -torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * inputs.advantages_N
    return LossTerms(loss_N=torch.maximum(plain, clipped), is_clipped_N=(clipped > plain).detach())
