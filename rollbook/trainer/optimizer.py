"""The learning rate schedule, and the check that keeps bad gradients away from the weights."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rollbook.contracts.errors import RunError
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.distributed.sharding import gathered

RATE_OF_WIDE_MODELS, WIDE = 1e-6, 4096
"""Reinforcement learning of models with 7 billion parameters commonly uses this rate; they have this width."""
LORA_FACTOR = 10.0


def peak_rate(config: TrainerConfig, *, width: int) -> float:
    """`trainer.lr`, or a rate that suits the width of the model (decision 0031)."""
    if config.lr is not None:
        return config.lr
    rate = RATE_OF_WIDE_MODELS * max(1.0, (WIDE / width) ** 1.5)
    # Two digits, so that the rate in reports is the rate that is used.
    return float(f"{rate * (1.0 if config.lora is None else LORA_FACTOR):.1e}")


def learning_rate(config: TrainerConfig, step: int, *, peak: float) -> float:
    """Rate for batch `step` (1, 2, ...): linear warm-up to `peak`, then constant or decaying to 0 just after the last step.

    A pure function of the step: there is no scheduler state to restore.
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.schedule == "constant" or config.max_steps is None:
        return peak
    progress = min(1.0, (step - 1 - config.warmup_steps) / (config.max_steps - config.warmup_steps))
    if config.schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def clip_large_gradient(gradients: Sequence[Tensor], max_norm: float) -> float:
    """Clip a gradient whose squares overflow. Returns its norm; infinity if the gradient itself is not finite.

    One group with extreme values must not cost the other groups of its minibatch their step.
    """
    largest = max(float(gathered(gradient.abs().max())) for gradient in gradients)
    if not math.isfinite(largest):
        return math.inf
    torch._foreach_div_(list(gradients), largest)
    norm = float(gathered(torch.nn.utils.get_total_norm(gradients, foreach=True)))
    torch._foreach_mul_(list(gradients), max_norm / norm)
    return norm * largest


class GradientGuard:
    """Skips optimizer steps with a bad gradient, and stops the run after too many in a row. Its count is part of a checkpoint."""

    def __init__(self, *, max_in_a_row: int, max_norm: float | None) -> None:
        self._max_in_a_row = max_in_a_row
        self._max_norm = max_norm
        self.skipped_in_a_row = 0

    def allows(self, *, norm: float, loss: float, step: int) -> bool:
        cause = self._fault(norm, loss)
        if cause is None:
            self.skipped_in_a_row = 0
            return True
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self._max_in_a_row:
            raise RunError(
                f"batch {step}: {cause}; {self.skipped_in_a_row} minibatches in a row were skipped. Lower trainer.lr or"
                " trainer.max_grad_norm, inspect the rewards and logprobs of the last batches (`rollbook replay` trains them"
                " again), or raise trainer.max_skipped_steps."
            )
        return False

    def _fault(self, norm: float, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm} with a loss of {loss:.4g}"
        if self._max_norm is not None and norm > self._max_norm:
            return f"the gradient norm {norm:.4g} is above skip_grad_norm_above {self._max_norm:g}"
        return None
