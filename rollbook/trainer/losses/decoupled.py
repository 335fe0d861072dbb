"""The decoupled objective: clipped around a near policy, weighted by how far that one is from the policy that sampled.

u = current / old is clipped, with old the weights at the start of the step; b = old / sampled corrects for who sampled, however
many versions ago. A clip around the sampling policy itself would pull a lagging learner back to it.
"""

import torch

from rollbook.trainer.losses.clipped import clipped_ratio
from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms


def decoupled_clip(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    terms = clipped_ratio(inputs, settings)
    behaviour_N = torch.exp(inputs.old_N - inputs.sampled_N).detach()
    behaviour_N = torch.where(behaviour_N <= settings.behaviour_cap, behaviour_N, torch.zeros_like(behaviour_N))
    return LossTerms(loss_N=terms.loss_N * behaviour_N, is_clipped_N=terms.is_clipped_N | (behaviour_N == 0))
