"""Direct reward optimisation: -(A*log current - beta/2*(log current - log old)^2). A soft pull takes the place of the clip."""

import torch

from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms


def direct_reward(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    moved_N = inputs.current_N - inputs.old_N
    loss_N = -(inputs.advantages_N * inputs.current_N - 0.5 * settings.dro_beta * moved_N.square())
    return LossTerms(loss_N=loss_N, is_clipped_N=torch.zeros_like(moved_N, dtype=torch.bool))
