"""Statistics over the trained tokens of a step. Each token counts once, independent of the pass it was in.

The sums stay on the model's device and are read once per step: reading after every pass would stall a GPU.
"""

import math

import torch
from torch import Tensor

from rollbook.trainer.distributed.sharding import Ranks
from rollbook.trainer.losses.corrections import Correction
from rollbook.trainer.losses.inputs import MAX_LOG_RATIO, LossInputs, LossTerms
from rollbook.trainer.metrics import MOST_LAG

LAGS = range(MOST_LAG + 1)
NAMES = (
    "tokens",
    "drifted",
    "ratio",
    "ppo_kl",
    "clipped",
    "entropy",
    "unknown",
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
    "observed",
    "observed_logprob",
    *(f"{name}_{lag}" for name in ("at_lag", "lag_kl") for lag in LAGS),
)


class TokenStatistics:
    """d = log current - log starting measures the drift within the step, m = log starting - log sampled the distance to the
    sampler.

    Tokens whose log-probabilities at the start of the step were not computed are in neither."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    @torch.no_grad()
    def add(
        self,
        inputs: LossInputs,
        terms: LossTerms,
        *,
        starting_N: Tensor | None,
        measures_drift: bool,
        entropy_N: Tensor,
        is_known_N: Tensor,
        lags_N: Tensor | None = None,
        correction: Correction | None = None,
        reference_kl_N: Tensor | None = None,
    ) -> None:
        """Add the tokens of one pass.

        `starting_N`: log-probabilities before the step; None: not computed. `measures_drift`: the pass is one of the last
        minibatch. `is_known_N`: the producer recorded the sampling log-probability. `lags_N`: -1 where unknown.
        """
        one, none = torch.ones_like(entropy_N, dtype=torch.float64), torch.zeros_like(entropy_N, dtype=torch.float64)
        drifted = none if starting_N is None or not measures_drift else one
        known = none if starting_N is None else is_known_N.double()
        start_N = inputs.sampled_N if starting_N is None else starting_N
        moved = _bounded(inputs.current_N - start_N) * drifted
        mismatch = _bounded(start_N - inputs.sampled_N) * known
        weight = mismatch.exp() * known
        mismatch_kl = _k3(mismatch)
        at_lag = [none if lags_N is None else known * (lags_N == lag) for lag in LAGS]
        corrected = none if correction is None else correction.weights_N.double()
        columns = [
            one,
            drifted,
            moved.exp() * drifted,
            _k3(moved),
            terms.is_clipped_N.double(),
            entropy_N.double(),
            one - is_known_N.double(),
            known,
            weight,
            weight.square(),
            mismatch_kl,
            none if correction is None else one,
            corrected,
            corrected.square(),
            none if correction is None else correction.is_bounded_N.double(),
            none if reference_kl_N is None else one,
            none if reference_kl_N is None else reference_kl_N.detach().double(),
            none,
            none,
            *at_lag,
            *(mismatch_kl * at for at in at_lag),
        ]
        sums = torch.stack([column.sum() for column in columns])
        self.sums = sums if self.sums is None else self.sums + sums

    @torch.no_grad()
    def add_observed(self, logprobs_O: Tensor) -> None:
        """Add the tokens of the environment in one pass, after `add`."""
        assert self.sums is not None
        at = NAMES.index("observed")
        self.sums[at] += len(logprobs_O)
        self.sums[at + 1] += logprobs_O.detach().double().sum()

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
            "train/ratio_mean": _mean(s["ratio"], s["drifted"]),
            "train/ppo_kl": _mean(s["ppo_kl"], s["drifted"]),
            "train/ppo_clip_frac": _mean(s["clipped"], s["tokens"]),
            "train/entropy": _mean(s["entropy"], s["tokens"]),
            "train/mean_kl": _mean(s["mean_kl"], s["known"]),
            "train/numerics_kl": _mean(s["lag_kl_0"], s["at_lag_0"]),
            **{f"train/lag_kl_{lag}": _mean(s[f"lag_kl_{lag}"], s[f"at_lag_{lag}"]) for lag in LAGS if lag},
            "train/mismatch_weight_mean": _mean(s["weight"], s["known"]),
            "train/ess": _effective(s["weight"], s["weight_squared"], s["known"]),
            "train/unknown_logprob_tokens": s["unknown"],
            "train/correction_mean": _mean(s["correction"], s["corrected"]),
            "train/correction_clip_frac": _mean(s["bounded"], s["corrected"]),
            "train/correction_ess": _effective(s["correction"], s["correction_squared"], s["corrected"]),
            "train/reference_kl": _mean(s["reference_kl"], s["referred"]),
            "train/observation_loss": _mean(-s["observed_logprob"], s["observed"]),
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
