"""Policy gradients without a clip: by importance ratio, and plain."""

import torch

from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms


def importance_sampling(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-r*A with r = current / old: unbiased, and unbounded."""
    ratio_N = torch.exp(inputs.current_N - inputs.old_N)
    return LossTerms(
        loss_N=-ratio_N * inputs.advantages_N, is_clipped_N=torch.zeros_like(inputs.advantages_N, dtype=torch.bool)
    )


def reinforce(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-A*log current: the ratio is taken to be 1, whoever sampled."""
    return LossTerms(
        loss_N=-inputs.advantages_N * inputs.current_N,
        is_clipped_N=torch.zeros_like(inputs.advantages_N, dtype=torch.bool),
    )
