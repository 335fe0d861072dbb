"""Losses of tests, which a trainer loads by name."""

import torch
import torch.distributed as dist

from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms


def of_a_small_second_rank(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """Policy gradient. At rank 1, passes with more than `max_trained` trained tokens run out of memory."""
    if dist.get_rank() == 1 and len(inputs.current_N) > settings.options["max_trained"]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 850.00 MiB")
    return LossTerms(
        loss_N=-inputs.advantages_N * inputs.current_N,
        is_clipped_N=torch.zeros(len(inputs.current_N), dtype=torch.bool, device=inputs.current_N.device),
    )
