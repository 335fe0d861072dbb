"""The loss of one forward pass: the loss of the settings, with the corrections and penalties that they add to it."""

import math
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.passes import Microbatch
from rollbook.trainer.data.rows import distill_weight
from rollbook.trainer.loss_settings import LOSS_NUMBERS, Recipe
from rollbook.trainer.losses.corrections import (
    correction,
    k3_divergence,
    kl_penalty,
    off_policy_mask,
    top_k_divergence,
)
from rollbook.trainer.losses.inputs import LossInputs, LossSettings
from rollbook.trainer.losses.registry import loss_named
from rollbook.trainer.losses.statistics import TokenStatistics
from rollbook.trainer.model.policy_model import PolicyModel

MIN_SAMPLED_LOGPROB = -20.0
"""Less likely tokens are sampled about once in 500 million."""


class PassLoss:
    """`reference`: the policy of the penalty `kl_coef`; None: the model without its adapters."""

    def __init__(self, model: PolicyModel, config: TrainerConfig, *, reference: PolicyModel | None) -> None:
        self._model = model
        self._config = config
        self._recipe = config.recipe
        self._reference = reference
        self._loss = loss_named(config.loss)
        self._settings = loss_settings(self._recipe)

    def __call__(
        self,
        micro: Microbatch,
        current: Tensor,
        starting: Tensor | None,
        entropy: Tensor,
        *,
        step: int,
        tops: Tensor | None,
        statistics: TokenStatistics | None,
        measures_drift: bool,
        pass_number: int | None,
    ) -> Tensor:
        """The weighted sum of the token losses of one pass. Adds its tokens to `statistics`; None: they do not count.

        `starting`: None if the loss does not need the log-probabilities at the start of the step. `tops`: the log-probabilities of
        the tokens that the teacher likes best, if the divergence from it is trained. `measures_drift` and `pass_number`: see
        `TokenStatistics.add`.
        """
        old = current.detach() if starting is None else starting
        inputs, is_known = self._inputs(micro, current, old)
        terms = self._loss(inputs, self._settings)
        loss_N = terms.loss_N
        corrected = reference_kl = None
        if self._config.correction != "none":
            corrected = correction(
                inputs,
                old,
                kind=self._config.correction,
                level=self._recipe.correction_level,
                bound=self._recipe.correction_bound,
                low=self._recipe.correction_low or 0.0,
            )
            loss_N = loss_N * corrected.weights_N
        if self._config.off_policy_mask is not None:
            is_masked_N = off_policy_mask(inputs, bound=self._config.off_policy_mask)
            loss_N = loss_N.masked_fill(is_masked_N, 0.0)
            terms = replace(terms, is_clipped_N=terms.is_clipped_N | is_masked_N)
        if self._config.kl_coef > 0:
            reference = self._reference_logprobs(micro)
            penalty_N = kl_penalty(inputs, reference, estimator=self._recipe.kl_estimator or "k2")
            loss_N = loss_N + self._config.kl_coef * penalty_N
            reference_kl = k3_divergence(current.detach(), reference)
        teacher_kl = None
        if tops is not None:
            given = self._model.tensor(micro.top_logprobs_NK)
            teacher_kl = top_k_divergence(tops, given, kind=self._config.distill_kl)
            loss_N = loss_N + distill_weight(self._config, step) * teacher_kl
            teacher_kl = teacher_kl.detach().masked_fill(given.isnan().all(-1), math.nan)
        elif micro.teacher_logprobs_N is not None:
            teacher_kl = k3_divergence(current.detach(), self._model.tensor(micro.teacher_logprobs_N))
        if self._config.entropy_bonus > 0:
            loss_N = loss_N - self._config.entropy_bonus * entropy
        if statistics is not None:
            statistics.add(
                inputs,
                terms,
                starting_N=starting,
                measures_drift=measures_drift,
                lags_N=None if micro.lags_N is None else self._model.tensor(micro.lags_N),
                is_mixed_N=None if micro.mixed_N is None else self._model.tensor(micro.mixed_N),
                is_renormalised_N=None if micro.renormalised_N is None else self._model.tensor(micro.renormalised_N),
                pass_number=pass_number,
                entropy_N=entropy.detach(),
                is_known_N=is_known,
                recorded_N=self._model.tensor(micro.sampled_logprobs_N),
                correction=corrected,
                reference_kl_N=reference_kl,
                teacher_kl_N=teacher_kl,
            )
        return (loss_N * self._model.tensor(micro.weights_N)).sum()

    @torch.no_grad()
    def _reference_logprobs(self, micro: Microbatch) -> Tensor:
        """Log-probabilities under the reference policy: those that the producer sent, else of the initial policy (a frozen copy, or
        the model with its adapters disabled)."""
        given = None if micro.reference_logprobs_N is None else self._model.tensor(micro.reference_logprobs_N)
        if given is not None and not bool(torch.isnan(given).any()):
            return given
        model = self._reference or self._model
        with self._model.adapters_off() if self._reference is None else nullcontext():
            # The reference is a policy of its own, with its own choices of experts.
            computed = model.token_logprobs(micro, is_replayed=False)[0]
        return computed if given is None else torch.where(torch.isnan(given), computed, given)

    def _inputs(self, micro: Microbatch, current: Tensor, starting: Tensor) -> tuple[LossInputs, Tensor]:
        tensor = self._model.tensor
        # A recorded logprob far below those of sampled tokens would make ratios infinite, and gradients NaN.
        recorded = tensor(micro.sampled_logprobs_N).clamp(min=MIN_SAMPLED_LOGPROB)
        is_known = ~torch.isnan(recorded)
        sampled = torch.where(is_known, recorded, starting)
        inputs = LossInputs(
            current_N=current,
            old_N=sampled if self._recipe.old_logprobs == "engine" else starting,
            sampled_N=sampled,
            advantages_N=tensor(micro.advantages_N),
            row_of_N=tensor(micro.row_of_N),
            num_rows=micro.num_rows,
        )
        return inputs, is_known

    def sampler_kl(self, micro: Microbatch, logprobs_N: Tensor) -> float | None:
        """Divergence of these log-probabilities from the recorded ones; None if none is recorded."""
        sampled_N = self._model.tensor(micro.sampled_logprobs_N).clamp(min=MIN_SAMPLED_LOGPROB)
        known_N = ~torch.isnan(sampled_N)
        return float(k3_divergence(sampled_N, logprobs_N)[known_N].mean()) if bool(known_N.any()) else None


def loss_settings(recipe: Recipe) -> LossSettings:
    """The loss's settings as numbers; unset bounds keep the infinite defaults of `LossSettings`."""
    named = {name: getattr(recipe, name) for name in LOSS_NUMBERS}
    return LossSettings(
        options=dict(recipe.loss_options), **{name: value for name, value in named.items() if value is not None}
    )
