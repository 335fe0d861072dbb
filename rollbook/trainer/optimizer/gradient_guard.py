"""Gradients that must not reach the weights: one such update would destroy them for good."""

import math

from rollbook.contracts.errors import RunError


class GradientGuard:
    """Lets a minibatch pass, or has it skipped; stops the run when too many in a row were. Its count is part of a checkpoint."""

    def __init__(self, *, most_in_a_row: int, norm_above: float | None) -> None:
        self._most = most_in_a_row
        self._norm_above = norm_above
        self.skipped_in_a_row = 0

    def lets_pass(self, *, norm: float, loss: float, step: int) -> bool:
        cause = self._fault(norm, loss)
        if cause is None:
            self.skipped_in_a_row = 0
            return True
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self._most:
            raise RunError(
                f"batch {step}: {cause}, and so it was for {self.skipped_in_a_row} minibatches in a row; nothing would be learned"
                " any more. Lower trainer.lr or trainer.max_grad_norm, look at the rewards and logprobs of the last batches"
                " (`rollbook replay` trains them again), or raise trainer.max_skipped_steps."
            )
        return False

    def _fault(self, norm: float, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm} with a loss of {loss:.4g}"
        if self._norm_above is not None and norm > self._norm_above:
            return f"the gradient's norm {norm:.4g} lies above skip_grad_norm_above {self._norm_above:g}"
        return None
