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
    "taught",
    "teacher_kl",
    "compared",
    "unequal",
    "mixed",
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
        self.largest: Tensor | None = None
        """The compared token whose logprobs differ most: difference, number of the pass, number of the target, logprob of the
        trainer, and of the sampler. A difference of -1: all are equal."""
        self.largest_rank = 0
        """The rank that computed it."""

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
        recorded_N: Tensor | None = None,
        lags_N: Tensor | None = None,
        is_mixed_N: Tensor | None = None,
        is_renormalised_N: Tensor | None = None,
        pass_number: int | None = None,
        correction: Correction | None = None,
        reference_kl_N: Tensor | None = None,
        teacher_kl_N: Tensor | None = None,
    ) -> None:
        """Add the tokens of one pass.

        `starting_N`: log-probabilities before the step; None: not computed. `measures_drift`: the pass is one of the last
        minibatch. `is_known_N`: the producer recorded the sampling log-probability. `recorded_N`: these log-probabilities without
        the bound of `inputs.sampled_N`; None: they have none. `lags_N`: -1 where unknown. `is_mixed_N`: see `mixed_caches`.
        `is_renormalised_N`: see `Microbatch`. `pass_number`: set if logprobs of lag 0 are compared to the bit. `teacher_kl_N`: NaN
        where a teacher gave no score.
        """
        one, none = torch.ones_like(entropy_N, dtype=torch.float64), torch.zeros_like(entropy_N, dtype=torch.float64)
        drifted = none if starting_N is None or not measures_drift else one
        known = none if starting_N is None else is_known_N.double()
        start_N = inputs.sampled_N if starting_N is None else starting_N
        moved = _bounded(inputs.current_N - start_N) * drifted
        # Exact, even for a token that is less likely than the bound.
        is_equal_N = start_N == (inputs.sampled_N if recorded_N is None else recorded_N)
        mismatch = _bounded(start_N - inputs.sampled_N).masked_fill(is_equal_N, 0.0) * known
        weight = mismatch.exp() * known
        mismatch_kl = _k3(mismatch)
        at_lag = [none if lags_N is None else known * (lags_N == lag) for lag in LAGS]
        mixed = none if is_mixed_N is None else known * is_mixed_N
        at_lag[0] = at_lag[0] * (1.0 - mixed)
        if is_renormalised_N is not None:
            at_lag[0] = at_lag[0] * ~is_renormalised_N
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
            none if teacher_kl_N is None else one - teacher_kl_N.isnan().double(),
            none if teacher_kl_N is None else teacher_kl_N.detach().double().nan_to_num(0.0),
            none,
            none,
            mixed,
            none,
            none,
            *at_lag,
            *(mismatch_kl * at for at in at_lag),
        ]
        sums = torch.stack([column.sum() for column in columns])
        self.sums = sums if self.sums is None else self.sums + sums
        if pass_number is not None:
            recorded = inputs.sampled_N if recorded_N is None else recorded_N
            self.compare(start_N, recorded, at_lag[0] > 0, pass_number=pass_number)

    @torch.no_grad()
    def compare(self, trained_N: Tensor, recorded_N: Tensor, is_compared_N: Tensor, *, pass_number: int) -> None:
        """Compare logprobs of the chosen tokens of a pass to the bit."""
        is_unequal_N = is_compared_N & (trained_N != recorded_N)
        sums = torch.zeros(len(NAMES), dtype=torch.float64, device=trained_N.device)
        at = NAMES.index("compared")
        sums[at], sums[at + 1] = is_compared_N.sum(), is_unequal_N.sum()
        self.sums = sums if self.sums is None else self.sums + sums
        # Not a number only where the trainer's logprob is none, which is the largest difference.
        difference_N = (trained_N - recorded_N).double().abs().nan_to_num(torch.inf, torch.inf)
        difference_N = torch.where(is_unequal_N, difference_N, -1.0)
        difference, index = difference_N.max(dim=0)
        number = torch.full_like(difference, float(pass_number))
        both = (logprobs_N[index].double() for logprobs_N in (trained_N, recorded_N))
        found = torch.stack([difference, number, index.double(), *both])
        self.largest = found if self.largest is None else torch.where(found[0] > self.largest[0], found, self.largest)

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
            largest = torch.full((ranks.size, 5), 0.0, dtype=torch.float64, device=device)
            largest[ranks.rank] = -1.0 if self.largest is None else self.largest
            largest = ranks.sum(largest.nan_to_num())
            self.largest_rank = int(largest[:, 0].argmax())
            self.largest = largest[self.largest_rank]

    def largest_difference(self) -> tuple[int, int, float, float] | None:
        """Numbers of pass and target, and both logprobs, of the token with the largest difference. None: all are equal."""
        if self.largest is None:
            return None
        difference, number, index, trained, sampled = self.largest.tolist()
        return (int(number), int(index), trained, sampled) if difference >= 0 else None

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
            "train/inexact_share": _mean(s["unequal"], s["compared"]),
            "train/compared_tokens": s["compared"],
            "train/mixed_cache_share": _mean(s["mixed"], s["known"]),
            **{f"train/lag_kl_{lag}": _mean(s[f"lag_kl_{lag}"], s[f"at_lag_{lag}"]) for lag in LAGS if lag},
            "train/mismatch_weight_mean": _mean(s["weight"], s["known"]),
            "train/ess": _effective(s["weight"], s["weight_squared"], s["known"]),
            "train/unknown_logprob_tokens": s["unknown"],
            "train/correction_mean": _mean(s["correction"], s["corrected"]),
            "train/correction_clip_frac": _mean(s["bounded"], s["corrected"]),
            "train/correction_ess": _effective(s["correction"], s["correction_squared"], s["corrected"]),
            "train/reference_kl": _mean(s["reference_kl"], s["referred"]),
            "train/teacher_kl": _mean(s["teacher_kl"], s["taught"]),
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
