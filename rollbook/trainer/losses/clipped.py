"""The clipped ratio r = current / old, of tokens (grpo, dr_grpo, dapo) or of whole sequences (gspo)."""

import torch
from torch import Tensor

from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms


def clipped_ratio(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """max(-r*A, -clip(r, 1-low, 1+high)*A), and where A < 0 at most -dual*A.

    A token whose ratio has already moved beyond the clip in the direction its advantage wants gives no gradient.
    """
    return clipped_terms(torch.exp(inputs.current_N - inputs.old_N), inputs.advantages_N, settings)


def clipped_sequence_ratio(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """As above with one ratio a sequence: exp of the mean of log r over its trained tokens, so length does not inflate it.

    Every token has its sequence's loss; the gradient reaches every token of the sequence through the mean.
    """
    ratio_N = torch.exp(inputs.sequence_mean_N(inputs.current_N - inputs.old_N))
    return clipped_terms(ratio_N, inputs.advantages_N, settings)


def clipped_terms(ratio_N: Tensor, advantages_N: Tensor, settings: LossSettings) -> LossTerms:
    plain = -ratio_N * advantages_N
    clipped = -torch.clamp(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantages_N
    loss = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    if settings.dual_clip < float("inf"):
        ceiling = -settings.dual_clip * advantages_N
        is_beyond = (advantages_N < 0) & (loss > ceiling)
        loss = torch.where(is_beyond, ceiling, loss)
        is_clipped = is_clipped | is_beyond
    return LossTerms(loss_N=loss, is_clipped_N=is_clipped.detach())
