"""Importance weights that correct for numerical differences between engine and trainer, the KL penalty, and the divergence from a
teacher.

w = old / sampled multiplies the policy loss of each token: the ratio of the token, the geometric mean of the ratios of its
sequence, or their product. The kinds of correction differ in how they bound w. They are independent of the loss and of its clip on
current / old.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rollbook.trainer.losses.inputs import MAX_LOG_RATIO, LossInputs

MIN_REST = 1e-5
"""The least probability of all tokens that a teacher did not list: rounding of their complement is far below it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    weights_N: Tensor
    """Factor of each token's policy loss. Carries no gradient."""
    is_bounded_N: Tensor
    """Whether the token's weight was clipped or set to 0."""


def correction(
    inputs: LossInputs, starting_N: Tensor, *, kind: str, level: str, bound: float, low: float = 0.0
) -> Correction:
    """`starting_N`: log-probabilities under the weights at the start of the step. `level`: token, sequence_mean or sequence_sum.

    tis: min(w, bound). mis: 0 where w is outside [low, bound]. icepop: 0 where w is outside [1/bound, bound].
    """
    log_weight_N = (starting_N - inputs.sampled_N).detach()
    if level == "sequence_mean":
        log_weight_N = inputs.sequence_mean_N(log_weight_N)
    elif level == "sequence_sum":
        log_weight_N = inputs.sequence_sum_N(log_weight_N)
    weights_N = torch.exp(log_weight_N)
    is_high_N = weights_N > bound
    if kind == "tis":
        return Correction(weights_N=weights_N.clamp(max=bound), is_bounded_N=is_high_N)
    if kind not in ("mis", "icepop"):
        raise ValueError(f"unknown correction {kind!r}")
    is_outside_N = is_high_N | (weights_N < (low if kind == "mis" else 1.0 / bound))
    return Correction(weights_N=weights_N.masked_fill(is_outside_N, 0.0), is_bounded_N=is_outside_N)


def off_policy_mask(inputs: LossInputs, *, bound: float) -> Tensor:
    """True for tokens whose loss is 0: their advantage is negative, and their sequence became much less likely than it was sampled.

    The distance is the mean of log sampled - log current over the sequence. Punishing such a sequence further moves the policy by
    what it would hardly sample (DeepSeek-V3.2).
    """
    distance_N = inputs.sequence_mean_N((inputs.sampled_N - inputs.current_N).detach())
    return (inputs.advantages_N < 0) & (distance_N > bound)


def kl_penalty(inputs: LossInputs, reference_N: Tensor, *, estimator: str) -> Tensor:
    """The penalty of each token for its distance to the reference policy. The gradient flows through `current_N`.

    The expected gradient of k2, and of k3 weighted by current / sampled, is that of KL(policy || reference). That of the plain k3
    is the gradient of KL(reference || policy).
    """
    if estimator == "k2":
        return k2_divergence(inputs.current_N, reference_N)
    divergence_N = k3_divergence(inputs.current_N, reference_N)
    if estimator == "k3":
        return divergence_N
    if estimator == "k3_weighted":
        return divergence_N * torch.exp((inputs.current_N - inputs.sampled_N).clamp(max=MAX_LOG_RATIO))
    raise ValueError(f"unknown KL estimator {estimator!r}")


def top_k_divergence(current_NK: Tensor, teacher_NK: Tensor, *, kind: str) -> Tensor:
    """The divergence of each token's distribution from the teacher's, over the K tokens that the teacher likes best.

    `current_NK`: log p of these tokens under the policy; `teacher_NK`: log q, NaN where there is none. All other tokens count as
    one, with the probability that is left: p_r = 1 - sum p, q_r = 1 - sum q. So the value is never negative, at most that of the
    whole vocabulary, and 0 only where p = q for all K tokens. forward: sum q (log q - log p). reverse: sum p (log p - log q). Both
    sums are over K + 1 tokens. The gradient flows through `current_NK`.
    """
    is_known_NK = ~torch.isnan(teacher_NK)
    log_p_NK = torch.where(is_known_NK, current_NK, torch.zeros_like(current_NK))
    log_q_NK = torch.where(is_known_NK, teacher_NK, torch.zeros_like(teacher_NK))
    p_NK, q_NK = log_p_NK.exp() * is_known_NK, log_q_NK.exp() * is_known_NK
    p_N, q_N = (1.0 - p_NK.sum(-1)).clamp(min=MIN_REST), (1.0 - q_NK.sum(-1)).clamp(min=MIN_REST)
    if kind == "forward":
        return (q_NK * (log_q_NK - log_p_NK)).sum(-1) + q_N * (q_N.log() - p_N.log())
    if kind == "reverse":
        return (p_NK * (log_p_NK - log_q_NK)).sum(-1) + p_N * (p_N.log() - q_N.log())
    raise ValueError(f"unknown divergence {kind!r}")


def k2_divergence(current_N: Tensor, reference_N: Tensor) -> Tensor:
    """d²/2 with d = log reference - log current, linear beyond `MAX_LOG_RATIO`, so that its gradient is bounded."""
    return torch.nn.functional.huber_loss(current_N, reference_N, reduction="none", delta=MAX_LOG_RATIO)


def k3_divergence(current_N: Tensor, reference_N: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log reference - log current: non-negative and of low variance.

    Linear in d above `MAX_LOG_RATIO`, so that it is finite. The gradient flows through `current_N`.
    """
    distance_N = reference_N - current_N
    bounded_N = distance_N.clamp(max=MAX_LOG_RATIO)
    divergence_N = torch.expm1(bounded_N) - bounded_N
    slope = math.expm1(MAX_LOG_RATIO)
    is_far_N = distance_N > MAX_LOG_RATIO
    return torch.where(is_far_N, divergence_N + slope * (distance_N - MAX_LOG_RATIO), divergence_N)
