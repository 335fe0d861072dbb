"""Clipped importance weights (CISPO): -sg(clip(r))*A*log current. A clipped token keeps a gradient; its weight is bounded."""

import torch

from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms


def clipped_importance(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    ratio_N = torch.exp(inputs.current_N - inputs.old_N).detach()
    weight_N = torch.clamp(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return LossTerms(loss_N=-weight_N * inputs.advantages_N * inputs.current_N, is_clipped_N=weight_N != ratio_N)
