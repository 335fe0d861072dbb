"""Statistics over the trained tokens of a step. Each token counts once, independent of the pass it was in.

The sums stay on the model's device and are read once per step: reading after every pass would stall a GPU.
"""

import math

import torch
from torch import Tensor

from rollbook.trainer.distributed.sharding import Ranks
from rollbook.trainer.losses.corrections import Correction
from rollbook.trainer.losses.inputs import MAX_LOG_RATIO, LossInputs, LossTerms

NAMES = (
    "tokens",
    "ratio",
    "ppo_kl",
    "clipped",
    "entropy",
    "known",
    "weight",
    "weight_squared",
    "mean_kl",
    "corrected",
    "correction",
    "correction_squared",
    "bounded",
    "referred",
    "reference_kl",
)


class TokenStatistics:
    """d = log current - log old measures the change within the step; m = log starting - log sampled the engine mismatch."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    @torch.no_grad()
    def add(
        self,
        inputs: LossInputs,
        terms: LossTerms,
        *,
        starting_N: Tensor,
        entropy_N: Tensor,
        is_known_N: Tensor,
        correction: Correction | None = None,
        reference_kl_N: Tensor | None = None,
    ) -> None:
        """Add the tokens of one pass.

        `starting_N`: log-probabilities before the step. `is_known_N`: the producer recorded the sampling log-probability.
        """
        moved = _bounded(inputs.current_N - inputs.old_N)
        known = is_known_N.double()
        mismatch = _bounded(starting_N - inputs.sampled_N) * known
        weight = mismatch.exp() * known
        one, none = torch.ones_like(moved), torch.zeros_like(moved)
        corrected = none if correction is None else correction.weights_N.double()
        columns = [
            one,
            moved.exp(),
            _k3(moved),
            terms.is_clipped_N.double(),
            entropy_N.double(),
            known,
            weight,
            weight.square(),
            _k3(mismatch),
            none if correction is None else one,
            corrected,
            corrected.square(),
            none if correction is None else correction.is_bounded_N.double(),
            none if reference_kl_N is None else one,
            none if reference_kl_N is None else reference_kl_N.detach().double(),
        ]
        sums = torch.stack([column.sum() for column in columns])
        self.sums = sums if self.sums is None else self.sums + sums

    def sum_over(self, ranks: Ranks, device: str) -> None:
        """Sum over all ranks. Every rank must call this, even one without tokens."""
        if ranks.size > 1:
            own = torch.zeros(len(NAMES), dtype=torch.float64, device=device) if self.sums is None else self.sums
            self.sums = ranks.sum(own)

    def metrics(self) -> dict[str, float | None]:
        """Means over the trained tokens; None where there were none."""
        values = [0.0] * len(NAMES) if self.sums is None else self.sums.tolist()
        s = dict(zip(NAMES, values, strict=True))
        return {
            "train/ratio_mean": _mean(s["ratio"], s["tokens"]),
            "train/ppo_kl": _mean(s["ppo_kl"], s["tokens"]),
            "train/ppo_clip_frac": _mean(s["clipped"], s["tokens"]),
            "train/entropy": _mean(s["entropy"], s["tokens"]),
            "train/mean_kl": _mean(s["mean_kl"], s["known"]),
            "train/mismatch_weight_mean": _mean(s["weight"], s["known"]),
            "train/ess": _effective(s["weight"], s["weight_squared"], s["known"]),
            "train/unknown_logprob_tokens": s["tokens"] - s["known"],
            "train/correction_mean": _mean(s["correction"], s["corrected"]),
            "train/correction_clip_frac": _mean(s["bounded"], s["corrected"]),
            "train/correction_ess": _effective(s["correction"], s["correction_squared"], s["corrected"]),
            "train/reference_kl": _mean(s["reference_kl"], s["referred"]),
        }


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.detach().double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k3(log_ratio: Tensor) -> Tensor:
    """The low-variance KL estimator exp(d) - d - 1, never negative."""
    return torch.expm1(log_ratio) - log_ratio


def _mean(total: float, count: float) -> float | None:
    return total / count if count and math.isfinite(total) else None


def _effective(total: float, squares: float, count: float) -> float | None:
    """Effective sample size of weights, as a fraction of their number."""
    return total**2 / (count * squares) if count and squares and math.isfinite(total) else None
