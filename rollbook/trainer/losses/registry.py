"""The losses and their table by name. `LOSS_DEFAULTS` in `trainer/loss_settings.py` lists the settings each one reads.

r = current / old is the ratio of a token, or with `gspo` of a whole sequence.
"""

import torch
from torch import Tensor

from rollbook.contracts.errors import RollbookError, RunError, is_out_of_memory
from rollbook.contracts.plugin import load_plugin
from rollbook.contracts.user_errors import describe_error
from rollbook.trainer.losses.inputs import MAX_LOG_RATIO, Loss, LossInputs, LossSettings, LossTerms


def clipped_ratio(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """max(-r*A, -clip(r, 1-low, 1+high)*A), and where A < 0 at most -dual*A.

    A token whose ratio is beyond the clip in the direction of its advantage has no gradient.
    """
    return _clipped_terms(inputs.ratio_N, inputs.advantages_N, settings)


def clipped_sequence_ratio(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """Like `clipped_ratio`, with one ratio per sequence: exp of the mean of log r over its trained tokens, independent of length.

    Every token has the loss of its sequence; the gradient reaches every token through the mean.
    """
    ratio_N = torch.exp(inputs.sequence_mean_N(inputs.current_N - inputs.old_N).clamp(max=MAX_LOG_RATIO))
    return _clipped_terms(ratio_N, inputs.advantages_N, settings)


def clipped_token_of_sequence(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """GSPO-token: the value of `clipped_sequence_ratio`, but the gradient of a token is that of its own log-probability.

    The same gradient if all tokens of a sequence have one advantage; with advantages of turns or tokens, each keeps its own.
    """
    ratio_N = torch.exp(inputs.sequence_mean_N(inputs.current_N - inputs.old_N).clamp(max=MAX_LOG_RATIO)).detach()
    own_N = torch.exp(inputs.current_N - inputs.current_N.detach())
    return _clipped_terms(ratio_N * own_N, inputs.advantages_N, settings)


def soft_gate(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-4/tau*sigmoid(tau*(r - 1))*A, as in SAPO: the gradient fades smoothly where the ratio leaves 1. No token is clipped."""
    advantages_N = inputs.advantages_N
    low_N = torch.full_like(advantages_N, settings.sapo_tau_negative)
    tau_N = torch.where(advantages_N > 0, torch.full_like(advantages_N, settings.sapo_tau), low_N)
    loss_N = -4.0 / tau_N * torch.sigmoid(tau_N * (inputs.ratio_N - 1.0)) * advantages_N
    return LossTerms(loss_N=loss_N, is_clipped_N=torch.zeros_like(advantages_N, dtype=torch.bool))


def divergence_mask(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-r*A, and 0 where the probability moved by more than the bound in the direction of the advantage, as in DPPO (binary TV).

    A ratio says little about rare tokens: from 1e-5 to 1e-4 it is 10, and the distribution is the same.
    """
    ratio_N, advantages_N = inputs.ratio_N, inputs.advantages_N
    moved_N = (inputs.current_N.exp() - inputs.old_N.exp()).detach()
    is_beyond_N = moved_N * torch.sign(advantages_N) > settings.divergence_bound
    return LossTerms(loss_N=(-ratio_N * advantages_N).masked_fill(is_beyond_N, 0.0), is_clipped_N=is_beyond_N)


def second_moment(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-r*A without the tokens with the largest (log r)^2: those that are left have a mean of at most the bound, as in M2PO.

    The mean is taken over the tokens of the pass, not of the whole batch.
    """
    squared_N = (inputs.current_N - inputs.old_N).detach().square()
    sorted_N, order_N = torch.sort(squared_N)
    counts_N = torch.arange(1, len(sorted_N) + 1, device=sorted_N.device, dtype=sorted_N.dtype)
    # Means of the smallest ones never fall, so the tokens that are kept come first.
    is_beyond_N = torch.zeros_like(squared_N, dtype=torch.bool)
    is_beyond_N[order_N] = sorted_N.cumsum(0) / counts_N > settings.m2_bound
    loss_N = (-inputs.ratio_N * inputs.advantages_N).masked_fill(is_beyond_N, 0.0)
    return LossTerms(loss_N=loss_N, is_clipped_N=is_beyond_N)


def clipped_importance(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-sg(clip(r))*A*log current, as in CISPO. A clipped token keeps a gradient; its weight is bounded."""
    ratio_N = inputs.ratio_N.detach()
    weight_N = torch.clamp(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return LossTerms(loss_N=-weight_N * inputs.advantages_N * inputs.current_N, is_clipped_N=weight_N != ratio_N)


def decoupled_clip(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """The clipped ratio current / old, weighted by old / sampled, with old the weights at the start of the step.

    Clipping around the sampling policy itself would pull a lagging learner back to it.
    """
    terms = clipped_ratio(inputs, settings)
    behaviour_N = torch.exp((inputs.old_N - inputs.sampled_N).clamp(max=MAX_LOG_RATIO)).detach()
    behaviour_N = torch.where(behaviour_N <= settings.behaviour_cap, behaviour_N, torch.zeros_like(behaviour_N))
    return LossTerms(loss_N=terms.loss_N * behaviour_N, is_clipped_N=terms.is_clipped_N | (behaviour_N == 0))


def _clipped_terms(ratio_N: Tensor, advantages_N: Tensor, settings: LossSettings) -> LossTerms:
    plain = -ratio_N * advantages_N
    clipped = -torch.clamp(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantages_N
    loss = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    if settings.dual_clip < float("inf"):
        ceiling = -settings.dual_clip * advantages_N
        is_beyond = (advantages_N < 0) & (loss > ceiling)
        loss = torch.where(is_beyond, ceiling, loss)
        is_clipped = is_clipped | is_beyond
    return LossTerms(loss_N=loss, is_clipped_N=is_clipped.detach())


def importance_sampling(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-r*A with r = current / old: unbiased, and unbounded."""
    return LossTerms(
        loss_N=-inputs.ratio_N * inputs.advantages_N,
        is_clipped_N=torch.zeros_like(inputs.advantages_N, dtype=torch.bool),
    )


def reinforce(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-A*log current: the ratio is assumed to be 1."""
    return LossTerms(
        loss_N=-inputs.advantages_N * inputs.current_N,
        is_clipped_N=torch.zeros_like(inputs.advantages_N, dtype=torch.bool),
    )


def direct_reward(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-(A*log current - beta/2*(log current - log old)^2): a quadratic penalty in place of the clip."""
    moved_N = inputs.current_N - inputs.old_N
    loss_N = -(inputs.advantages_N * inputs.current_N - 0.5 * settings.dro_beta * moved_N.square())
    return LossTerms(loss_N=loss_N, is_clipped_N=torch.zeros_like(moved_N, dtype=torch.bool))


LOSSES: dict[str, Loss] = {
    "grpo": clipped_ratio,
    "dr_grpo": clipped_ratio,
    "dapo": clipped_ratio,
    "gspo": clipped_sequence_ratio,
    "cispo": clipped_importance,
    "importance_sampling": importance_sampling,
    "reinforce": reinforce,
    "decoupled": decoupled_clip,
    "dro": direct_reward,
    "gspo_token": clipped_token_of_sequence,
    "sapo": soft_gate,
    "dppo": divergence_mask,
    "m2po": second_moment,
    "distill": importance_sampling,
}


def loss_named(name: str) -> Loss:
    """A built-in loss, or the user's own as `package.module:function`."""
    if ":" not in name:
        return LOSSES[name]
    return _fenced(load_plugin(name, setting="trainer.loss"), name)


def _fenced(loss: Loss, name: str) -> Loss:
    """A user's loss. An exception or a result of the wrong shape stops the run: another attempt would fail in the same way."""

    def compute(inputs: LossInputs, settings: LossSettings) -> LossTerms:
        try:
            terms = loss(inputs, settings)
        except RollbookError:
            raise
        except Exception as error:
            if is_out_of_memory(error):  # the trainer tries smaller passes
                raise
            raise RunError(f"trainer.loss = {name!r} raised {describe_error(error)}") from error
        if not isinstance(terms, LossTerms):
            raise RunError(f"trainer.loss = {name!r} returned a {type(terms).__name__}; it must return LossTerms")
        expected = tuple(inputs.current_N.shape)
        for field in ("loss_N", "is_clipped_N"):
            if (shape := tuple(getattr(terms, field).shape)) != expected:
                raise RunError(f"trainer.loss = {name!r} returned {field} of shape {shape}; it must be {expected}")
        return terms

    return compute
