"""Samples the next token of many rows at once, with the exact logprob of the distribution each token was drawn from.

Temperature first, then top_k, then top_p over what is left, renormalised, all in float32. Temperature 0 takes the likeliest token
and reports its logprob at temperature 1. One uniform a token decides it (inverse of the cumulative distribution, in float64), so a
seeded request draws the same tokens whatever it is batched with.
"""

# N rows, V vocabulary

from collections.abc import Sequence

import torch
from torch import Tensor

from rollbook.contracts.policy import SamplingParams


def sample(
    logits_NV: Tensor, samplings: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Token and logprob of each row. A row whose logits are not numbers has a logprob that is NaN."""
    logits_NV = logits_NV.float()
    greedy = [sampling.temperature == 0 for sampling in samplings]
    logprobs_NV = torch.log_softmax(_shaped(logits_NV, samplings), dim=-1)
    cumulative_NV = logprobs_NV.exp().to(torch.float64).cumsum(dim=-1)
    points_N1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_NV.device)[:, None] * cumulative_NV[:, -1:]
    # right=True: the first entry *above* the point, so a token of probability 0 is never taken. NaN rows land outside: clamp.
    tokens_N1 = torch.searchsorted(cumulative_NV, points_N1, right=True).clamp_(max=logits_NV.shape[-1] - 1)
    if any(greedy):
        is_greedy_N1 = torch.tensor(greedy, device=logits_NV.device)[:, None]
        tokens_N1 = torch.where(is_greedy_N1, logprobs_NV.argmax(dim=-1, keepdim=True), tokens_N1)
    tokens: list[int] = tokens_N1[:, 0].tolist()
    logprobs: list[float] = logprobs_NV.gather(1, tokens_N1)[:, 0].tolist()
    return tokens, logprobs


def _shaped(logits_NV: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """Logits of the distribution that is sampled from, -inf where it was truncated. Usually the logits themselves."""
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    if any(temperature != 1.0 for temperature in temperatures):
        # The maximum is taken off first: a tiny temperature must not overflow.
        logits_NV = logits_NV - logits_NV.amax(dim=-1, keepdim=True)
        logits_NV = logits_NV / torch.tensor(temperatures, dtype=torch.float32, device=logits_NV.device)[:, None]
    truncated = [row for row, s in enumerate(samplings) if s.temperature > 0 and (s.top_k > 0 or s.top_p < 1.0)]
    if not truncated:
        return logits_NV
    rows = torch.tensor(truncated, device=logits_NV.device)
    shaped_NV = logits_NV.clone()
    shaped_NV[rows] = _truncated(logits_NV[rows], [samplings[row] for row in truncated])
    return shaped_NV


def _truncated(logits_NV: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    vocab_size = logits_NV.shape[-1]
    kept = [min(sampling.top_k or vocab_size, vocab_size) for sampling in samplings]
    kept_N1 = torch.tensor(kept, device=logits_NV.device)[:, None]
    top_p_N1 = torch.tensor([s.top_p for s in samplings], dtype=torch.float32, device=logits_NV.device)[:, None]
    # stable: of equal logits the lower token id stays, on every device.
    sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab_size, device=logits_NV.device)
    sorted_NV = sorted_NV.masked_fill(rank_V >= kept_N1, float("-inf"))
    probabilities_NV = sorted_NV.softmax(dim=-1)
    # A token stays while the probability before it is below top_p: the likeliest always does.
    before_NV = probabilities_NV.cumsum(dim=-1) - probabilities_NV
    is_out_NV = (before_NV >= top_p_N1) & (top_p_N1 < 1.0) & (rank_V > 0)
    sorted_NV = sorted_NV.masked_fill(is_out_NV, float("-inf"))
    return torch.empty_like(logits_NV).scatter_(1, order_NV, sorted_NV)
