"""Losses that clip the ratio r = current / old, of tokens (grpo, dr_grpo, dapo, cispo, decoupled) or of whole sequences (gspo)."""

import torch
from torch import Tensor

from rollbook.trainer.losses.inputs import MAX_LOG_RATIO, LossInputs, LossSettings, LossTerms


def clipped_ratio(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """max(-r*A, -clip(r, 1-low, 1+high)*A), and where A < 0 at most -dual*A.

    A token whose ratio is beyond the clip in the direction of its advantage has no gradient.
    """
    return _clipped_terms(inputs.ratio_N, inputs.advantages_N, settings)


def clipped_sequence_ratio(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """As `clipped_ratio`, with one ratio per sequence: exp of the mean of log r over its trained tokens, independent of length.

    Every token has the loss of its sequence; the gradient reaches every token through the mean.
    """
    ratio_N = torch.exp(inputs.sequence_mean_N(inputs.current_N - inputs.old_N).clamp(max=MAX_LOG_RATIO))
    return _clipped_terms(ratio_N, inputs.advantages_N, settings)


def clipped_importance(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-sg(clip(r))*A*log current, as in CISPO. A clipped token keeps a gradient; its weight is bounded."""
    ratio_N = inputs.ratio_N.detach()
    weight_N = torch.clamp(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return LossTerms(loss_N=-weight_N * inputs.advantages_N * inputs.current_N, is_clipped_N=weight_N != ratio_N)


def decoupled_clip(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """The clipped ratio current / old, weighted by old / sampled, with old the weights at the start of the step.

    Clipping around the sampling policy itself would pull a lagging learner back to it.
    """
    terms = clipped_ratio(inputs, settings)
    behaviour_N = torch.exp((inputs.old_N - inputs.sampled_N).clamp(max=MAX_LOG_RATIO)).detach()
    behaviour_N = torch.where(behaviour_N <= settings.behaviour_cap, behaviour_N, torch.zeros_like(behaviour_N))
    return LossTerms(loss_N=terms.loss_N * behaviour_N, is_clipped_N=terms.is_clipped_N | (behaviour_N == 0))


def _clipped_terms(ratio_N: Tensor, advantages_N: Tensor, settings: LossSettings) -> LossTerms:
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
