"""Attention over sequences concatenated in one row, each attending to itself only. Registered with transformers by name.

Three kernels compute the same numbers. `varlen`: the variable-length kernel, in half precision on a GPU. `bucketed`: sequences of
similar length form a bucket, padded to its longest, for the ordinary kernel; only attention sees the padding. `equal`: only equal
lengths share a call, without padding. None of them needs a mask of tokens times tokens.
"""

import inspect
import time
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "rollbook_packed"
HALF = (torch.bfloat16, torch.float16)

try:
    from torch.nn.attention.varlen import varlen_attn

    # Its arguments differ between versions of PyTorch.
    _KNOWN = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:  # before PyTorch 2.10
    varlen_attn = None  # type: ignore[assignment]  # checked where it is called
    _KNOWN = frozenset()


HAS_VARLEN = bool(_KNOWN)

MIN_BUCKET_FILL = 0.75
"""A sequence shorter than this fraction of its bucket's longest starts a new bucket."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Offsets of the sequences in one packed row, longest first."""

    lengths: tuple[int, ...]
    positions_T: Tensor
    """Position of each token in its own sequence."""
    cumulative_lengths: Tensor
    """From 0; on the model's device."""
    kernel: str
    buckets: tuple[tuple[int, int], ...] = ()
    """For `bucketed`: number of sequences and padded length of each bucket."""
    padded_index_T: Tensor | None = None
    """For `bucketed`: index of each token in the padded layout."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: str | torch.device, *, kernel: str = "equal") -> "Packing":
        counts = np.array(lengths, dtype=np.int64)
        ends = np.cumsum(counts)
        positions_T = np.arange(ends[-1], dtype=np.int64) - np.repeat(ends - counts, counts)
        cumulative = np.concatenate([[0], ends]).astype(np.int32)
        buckets = length_buckets(lengths) if kernel == "bucketed" else ()
        padded_index = None
        if buckets:
            widths = np.repeat([width for _, width in buckets], [count for count, _ in buckets])
            starts = np.cumsum(widths) - widths
            padded_index = torch.from_numpy(np.repeat(starts, counts) + positions_T).to(device, non_blocking=True)
        return cls(
            lengths=lengths,
            positions_T=torch.from_numpy(positions_T).to(device, non_blocking=True),
            cumulative_lengths=torch.from_numpy(cumulative).to(device, non_blocking=True),
            kernel=kernel,
            buckets=buckets,
            padded_index_T=padded_index,
        )


def length_buckets(lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Buckets of neighbouring sequences: number of sequences and padded length of each."""
    buckets: list[tuple[int, int]] = []
    count = width = 0
    for length in lengths:
        if count and (length < MIN_BUCKET_FILL * width or length > width):
            buckets.append((count, width))
            count = 0
        if count == 0:
            width = length
        count += 1
    return (*buckets, (count, width)) if count else tuple(buckets)


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
    """Called by transformers in every layer. Without a packing, each row is one causal sequence."""
    unsupported = [name for name in ("softcap", "sliding_window") if others.get(name) is not None]
    if unsupported:
        raise ValueError(f"attention with {', '.join(unsupported)} is not supported in a packed row")
    if packing is None:
        ordinary: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_1HTD, key_1KTD, value_1KTD, attention_mask, scaling=scaling
        )
        return ordinary
    attend = KERNELS[packing.kernel]
    return attend(query_1HTD, key_1KTD, value_1KTD, scaling, packing), None


def _varlen(
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
        packing.cumulative_lengths,
        packing.cumulative_lengths,
        longest,
        longest,
        **options,
    )
    whole: Tensor = attended_THD.unsqueeze(0)
    return whole


def _bucketed(
    query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, scaling: float | None, packing: Packing
) -> Tensor:
    assert packing.padded_index_T is not None
    sizes = [count * width for count, width in packing.buckets]
    bucketed = []
    for heads in (query_1HTD, key_1KTD, value_1KTD):
        flat_THD = heads[0].transpose(0, 1)
        padded = flat_THD.new_zeros(sum(sizes), *flat_THD.shape[1:])
        # Padding comes after a sequence, where causal attention does not look; the padding's output is not read.
        bucketed.append(torch.split(padded.index_copy(0, packing.padded_index_T, flat_THD), sizes))
    pieces = []
    for (count, width), *parts in zip(packing.buckets, *bucketed, strict=True):
        query, key, value = (part.view(count, width, *part.shape[1:]).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        pieces.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces).index_select(0, packing.padded_index_T).unsqueeze(0)


def _equal_lengths(
    query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, scaling: float | None, packing: Packing
) -> Tensor:
    runs = [(length, len(list(same))) for length, same in groupby(packing.lengths)]
    sizes = [length * count for length, count in runs]
    # Split, not sliced: the gradient of each slice would be as long as the whole row.
    parts = [torch.split(heads[0], sizes, dim=1) for heads in (query_1HTD, key_1KTD, value_1KTD)]
    pieces: list[Tensor] = []
    for (length, count), *heads in zip(runs, *parts, strict=True):
        query, key, value = (part.reshape(-1, count, length, part.shape[-1]).transpose(0, 1) for part in heads)
        attended = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        pieces.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces).unsqueeze(0)


KERNELS = {"varlen": _varlen, "bucketed": _bucketed, "equal": _equal_lengths}


def fastest_kernel(*, device: str, dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> str:
    """Measured on a GPU: which kernel is faster depends on the card, the PyTorch version and the shape of the heads."""
    if device != "cuda":
        return "equal"
    if dtype not in HALF or not HAS_VARLEN:
        return "bucketed"
    seconds: dict[str, float] = {}
    lengths = tuple(range(1024, 64, -32))
    for kernel in ("varlen", "bucketed"):
        packing = Packing.of(lengths, device, kernel=kernel)
        shapes = [(1, count, sum(lengths), width) for count in (heads, kv_heads, kv_heads)]
        query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
        started = 0.0
        try:
            for number in range(4):
                if number == 1:  # the first is a warm-up
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                attended = KERNELS[kernel](query, key, value, None, packing)
                attended.backward(torch.ones_like(attended))  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.cuda.synchronize()
            seconds[kernel] = time.perf_counter() - started
        except RuntimeError:
            # The kernel does not support this card or head width.
            continue
    return min(seconds, key=seconds.__getitem__) if seconds else "equal"


AttentionInterface.register(NAME, packed_attention)
