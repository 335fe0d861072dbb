"""Losses without a clip: importance sampling, REINFORCE and direct reward optimisation."""

import torch

from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms


def importance_sampling(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-r*A with r = current / old: unbiased, and unbounded."""
    return LossTerms(
        loss_N=-inputs.ratio_N * inputs.advantages_N,
        is_clipped_N=torch.zeros_like(inputs.advantages_N, dtype=torch.bool),
    )


def reinforce(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-A*log current: the ratio is assumed to be 1."""
    return LossTerms(
        loss_N=-inputs.advantages_N * inputs.current_N,
        is_clipped_N=torch.zeros_like(inputs.advantages_N, dtype=torch.bool),
    )


def direct_reward(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-(A*log current - beta/2*(log current - log old)^2): a quadratic penalty in place of the clip."""
    moved_N = inputs.current_N - inputs.old_N
    loss_N = -(inputs.advantages_N * inputs.current_N - 0.5 * settings.dro_beta * moved_N.square())
    return LossTerms(loss_N=loss_N, is_clipped_N=torch.zeros_like(moved_N, dtype=torch.bool))
