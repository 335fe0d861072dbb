"""Attention over sequences that stand end to end in one row, each seeing itself alone. Registered with transformers by name.

On a GPU in half precision it is the variable-length kernel. Elsewhere sequences of equal length, which the plan puts side by side,
go through the ordinary kernel as one batch: the same numbers as without packing, and no mask of tokens times tokens.
"""

import inspect
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "rollbook_packed"
HALF = (torch.bfloat16, torch.float16)

try:
    from torch.nn.attention.varlen import varlen_attn

    # Its arguments have changed between versions of PyTorch; what it computes has not.
    _KNOWN = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:  # before PyTorch 2.10
    varlen_attn = None  # type: ignore[assignment]  # checked where it is called
    _KNOWN = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Where the sequences of one row lie."""

    lengths: tuple[int, ...]
    positions_T: Tensor
    """Position of each token in its own sequence."""
    borders: Tensor
    """Cumulative lengths, from 0; on the model's device."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: str | torch.device) -> "Packing":
        counts = torch.tensor(lengths, dtype=torch.int64)
        ends = torch.cumsum(counts, 0)
        starts_T = torch.repeat_interleave(ends - counts, counts)
        borders = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32)
        positions_T = torch.arange(int(ends[-1]), dtype=torch.int64) - starts_T
        return cls(lengths=lengths, positions_T=positions_T.to(device), borders=borders.to(device))


# H heads, K heads of keys and values, T tokens of all sequences, D width of a head
def packed_attention(
    module: Any,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer. Without a packing each row is one causal sequence."""
    refused = [name for name in ("softcap", "sliding_window") if others.get(name) is not None]
    if refused:
        raise ValueError(f"attention with {', '.join(refused)} is not supported in a packed row")
    if packing is None:
        ordinary: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_1HTD, key_1KTD, value_1KTD, attention_mask, scaling=scaling
        )
        return ordinary
    if query_1HTD.is_cuda and query_1HTD.dtype in HALF and varlen_attn is not None:
        return _by_kernel(query_1HTD, key_1KTD, value_1KTD, scaling, packing), None
    return _by_length(query_1HTD, key_1KTD, value_1KTD, scaling, packing), None


def _by_kernel(
    query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, scaling: float | None, packing: Packing
) -> Tensor:
    query, key, value = (heads[0].transpose(0, 1) for heads in (query_1HTD, key_1KTD, value_1KTD))
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _KNOWN else {"is_causal": True}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" in _KNOWN:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if scaling is not None and "scale" in _KNOWN:
        options["scale"] = scaling
    elif scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    longest = max(packing.lengths)
    attended_THD: Any = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        packing.borders,
        packing.borders,
        longest,
        longest,
        **options,
    )
    whole: Tensor = attended_THD.unsqueeze(0)
    return whole


def _by_length(
    query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, scaling: float | None, packing: Packing
) -> Tensor:
    pieces: list[Tensor] = []
    start = 0
    for length, same in groupby(packing.lengths):
        count = len(list(same))
        end = start + count * length
        query, key, value = (
            heads[0, :, start:end].reshape(-1, count, length, heads.shape[-1]).transpose(0, 1)
            for heads in (query_1HTD, key_1KTD, value_1KTD)
        )
        attended = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        pieces.append(attended.transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(pieces).unsqueeze(0)


AttentionInterface.register(NAME, packed_attention)
