"""Sums over the trained tokens of a step, from which its means are taken: each token counts once, whatever pass it was in."""

import math

import torch
from torch import Tensor

from rollbook.trainer.losses.inputs import LossInputs, LossTerms

# Beyond this a ratio is not told apart from infinity; it keeps one broken token from turning every mean of the step into inf.
MAX_LOG_RATIO = 20.0


class TokenStatistics:
    """d = log current - log old says how far the step moved; m = log starting - log sampled how sampler and trainer disagree."""

    def __init__(self) -> None:
        self._sums = [0.0] * 9

    @torch.no_grad()
    def add(
        self, inputs: LossInputs, terms: LossTerms, *, starting_N: Tensor, entropy_N: Tensor, is_known_N: Tensor
    ) -> None:
        """Add the tokens of one pass. `starting_N`: their log-probabilities before the step; `is_known_N`: the producer said
        with which log-probability the token was sampled."""
        moved = _bounded(inputs.current_N - inputs.old_N)
        mismatch = _bounded(starting_N - inputs.sampled_N)[is_known_N]
        weight = mismatch.exp()
        sums = torch.stack(
            [
                torch.ones_like(moved).sum(),
                moved.exp().sum(),
                _k3(moved).sum(),
                terms.is_clipped_N.double().sum(),
                entropy_N.double().sum(),
                weight.sum(),
                (weight * weight).sum(),
                _k3(mismatch).sum(),
                torch.ones_like(mismatch).sum(),
            ]
        )
        self._sums = [before + more for before, more in zip(self._sums, sums.tolist(), strict=True)]

    def metrics(self) -> dict[str, float | None]:
        """Means over the trained tokens; None where there were none."""
        tokens, ratio, ppo_kl, clipped, entropy, weight, weight_squared, mean_kl, known = self._sums
        return {
            "train/ratio_mean": _mean(ratio, tokens),
            "train/ppo_kl": _mean(ppo_kl, tokens),
            "train/ppo_clip_frac": _mean(clipped, tokens),
            "train/entropy": _mean(entropy, tokens),
            "train/mean_kl": _mean(mean_kl, known),
            "train/mismatch_weight_mean": _mean(weight, known),
            "train/ess": weight**2 / (known * weight_squared) if known and weight_squared else None,
            "train/unknown_logprob_tokens": tokens - known,
        }


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.detach().double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k3(log_ratio: Tensor) -> Tensor:
    """The low-variance estimator exp(d) - d - 1: never negative, and 0 only where both agree."""
    return torch.expm1(log_ratio) - log_ratio


def _mean(total: float, count: float) -> float | None:
    return total / count if count and math.isfinite(total) else None
