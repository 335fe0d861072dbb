"""Samples the next token of many rows at once, with the exact logprob under the distribution each token was drawn from.

Temperature is applied first, then top_k, then top_p over the rest, renormalised, all in float32. Temperature 0 takes the most
likely token and reports its logprob at temperature 1. Each token has a key, made of the request's seed and the token's index, so a
request draws the same tokens in any batch. Here the key gives one uniform number and the cumulative distribution is inverted;
`kernels.py` has the GPU version.
"""

# N rows, R constrained rows, V vocabulary, B bytes of a mask

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK_53 = (1 << 53) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """The sampling settings of N rows. The flags say whether any row needs an operation; others are skipped."""

    keys_N: Tensor
    """int64: random bits."""
    temperatures_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor
    is_scaled: bool
    is_truncated: bool
    is_any_greedy: bool

    def to(self, device: torch.device) -> "RowSampling":
        return replace(
            self,
            keys_N=self.keys_N.to(device),
            temperatures_N=self.temperatures_N.to(device),
            top_k_N=self.top_k_N.to(device),
            top_p_N=self.top_p_N.to(device),
        )


def sample(logits_NV: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    """Token (int64) and logprob (float32) of each row. A row whose logits are not numbers has a logprob that is NaN."""
    logprobs_NV = torch.log_softmax(sampling_logits(logits_NV.float(), rows), dim=-1)
    cumulative_NV = logprobs_NV.exp().to(torch.float64).cumsum(dim=-1)
    uniforms_N = ((rows.keys_N >> 11) & _MASK_53).to(torch.float64) * 2.0**-53
    points_N1 = uniforms_N[:, None] * cumulative_NV[:, -1:]
    # right=True: the first entry *above* the point, so a token of probability 0 is never taken. NaN rows end outside: clamp.
    tokens_N1 = torch.searchsorted(cumulative_NV, points_N1, right=True).clamp_(max=logits_NV.shape[-1] - 1)
    if rows.is_any_greedy:
        is_greedy_N1 = rows.temperatures_N[:, None] == 0
        tokens_N1 = torch.where(is_greedy_N1, logprobs_NV.argmax(dim=-1, keepdim=True), tokens_N1)
    return tokens_N1[:, 0], logprobs_NV.gather(1, tokens_N1)[:, 0]


def constrained(logits_NV: Tensor, masks: Mapping[int, NDArray[np.uint8]]) -> Tensor:
    """Logits that are -inf for the tokens that a row's mask excludes. `masks`: by row, one bit per token, lowest bit first."""
    if not masks:
        return logits_NV
    bits_RB = torch.from_numpy(np.stack(list(masks.values()))).to(logits_NV.device)
    shifts_8 = torch.arange(8, dtype=torch.uint8, device=logits_NV.device)
    is_allowed_RV = ((bits_RB[:, :, None] >> shifts_8) & 1).flatten(1)[:, : logits_NV.shape[1]].bool()
    rows_R = torch.tensor(list(masks), device=logits_NV.device)
    return logits_NV.index_copy(0, rows_R, logits_NV[rows_R].masked_fill(~is_allowed_RV, float("-inf")))


def most_likely(logits_NV: Tensor, rows: RowSampling, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most likely tokens (N, K) of the sampling distribution, and their logprobs; -inf where it has fewer."""
    logprobs_NV = torch.log_softmax(sampling_logits(logits_NV.float(), rows), dim=-1)
    logprobs_NK, tokens_NK = logprobs_NV.topk(count, dim=-1)
    return tokens_NK, logprobs_NK


def sampling_logits(logits_NV: Tensor, rows: RowSampling) -> Tensor:
    """Logits of the sampling distribution, -inf where it is truncated."""
    if rows.is_scaled:
        # The maximum is subtracted first: a very small temperature must not overflow.
        logits_NV = logits_NV - logits_NV.amax(dim=-1, keepdim=True)
        temperatures_N1 = rows.temperatures_N[:, None]
        logits_NV = logits_NV / torch.where(temperatures_N1 == 0, 1.0, temperatures_N1)
    return truncated(logits_NV, rows) if rows.is_truncated else logits_NV


def truncated(logits_NV: Tensor, rows: RowSampling) -> Tensor:
    """Scaled logits, -inf beyond top_k and top_p. Greedy rows are not truncated."""
    vocab_size = logits_NV.shape[-1]
    top_k_N1, top_p_N1 = rows.top_k_N[:, None], rows.top_p_N[:, None]
    is_greedy_N1 = rows.temperatures_N[:, None] == 0
    # stable: of equal logits the lower token id is kept, on every device.
    sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab_size, device=logits_NV.device)
    is_out_NV = (rank_V >= top_k_N1) & (top_k_N1 > 0) & ~is_greedy_N1
    sorted_NV = sorted_NV.masked_fill(is_out_NV, float("-inf"))
    probabilities_NV = sorted_NV.softmax(dim=-1)
    # A token is kept while the probability before it is below top_p: the most likely always is.
    before_NV = probabilities_NV.cumsum(dim=-1) - probabilities_NV
    is_out_NV = (before_NV >= top_p_N1) & (top_p_N1 < 1.0) & (rank_V > 0) & ~is_greedy_N1
    sorted_NV = sorted_NV.masked_fill(is_out_NV, float("-inf"))
    return torch.empty_like(logits_NV).scatter_(1, order_NV, sorted_NV)
