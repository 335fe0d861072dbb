"""Attention over sequences that stand end to end in one row, each seeing itself alone. Registered with transformers by name.

Three ways to the same numbers. `varlen`: the variable-length kernel, in half precision on a GPU. `ladder`: sequences of similar
length are laid side by side, padded to the longest of them, for the ordinary kernel; the rest of the layer never sees the padding.
`equal`: only equal lengths share a call, which pads nothing. None needs a mask of tokens times tokens.
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

    # Its arguments have changed between versions of PyTorch; what it computes has not.
    _KNOWN = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:  # before PyTorch 2.10
    varlen_attn = None  # type: ignore[assignment]  # checked where it is called
    _KNOWN = frozenset()


HAS_VARLEN = bool(_KNOWN)

RUNG = 0.75
"""On the ladder, a sequence shorter than this part of the longest beside it begins another step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Where the sequences of one row lie, longest first."""

    lengths: tuple[int, ...]
    positions_T: Tensor
    """Position of each token in its own sequence."""
    borders: Tensor
    """Cumulative lengths, from 0; on the model's device."""
    way: str
    rungs: tuple[tuple[int, int], ...] = ()
    """On the ladder: sequences and padded length of each step."""
    places_T: Tensor | None = None
    """On the ladder: where each token stands among the padded ones."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: str | torch.device, *, way: str = "equal") -> "Packing":
        counts = np.array(lengths, dtype=np.int64)
        ends = np.cumsum(counts)
        positions_T = np.arange(ends[-1], dtype=np.int64) - np.repeat(ends - counts, counts)
        borders = np.concatenate([[0], ends]).astype(np.int32)
        rungs = ladder(lengths) if way == "ladder" else ()
        places = None
        if rungs:
            widths = np.repeat([width for _, width in rungs], [count for count, _ in rungs])
            starts = np.cumsum(widths) - widths
            places = torch.from_numpy(np.repeat(starts, counts) + positions_T).to(device, non_blocking=True)
        return cls(
            lengths=lengths,
            positions_T=torch.from_numpy(positions_T).to(device, non_blocking=True),
            borders=torch.from_numpy(borders).to(device, non_blocking=True),
            way=way,
            rungs=rungs,
            places_T=places,
        )


def ladder(lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Steps of neighbouring sequences: how many, and padded to what."""
    rungs: list[tuple[int, int]] = []
    count = width = 0
    for length in lengths:
        if count and (length < RUNG * width or length > width):
            rungs.append((count, width))
            count = 0
        if count == 0:
            width = length
        count += 1
    return (*rungs, (count, width)) if count else tuple(rungs)


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
    attend = WAYS[packing.way]
    return attend(query_1HTD, key_1KTD, value_1KTD, scaling, packing), None


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


def _on_ladder(
    query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, scaling: float | None, packing: Packing
) -> Tensor:
    assert packing.places_T is not None
    sizes = [count * width for count, width in packing.rungs]
    laid_out = []
    for heads in (query_1HTD, key_1KTD, value_1KTD):
        flat_THD = heads[0].transpose(0, 1)
        padded = flat_THD.new_zeros(sum(sizes), *flat_THD.shape[1:])
        # What pads a sequence stands behind it, where causal attention never looks; its own output is not read.
        laid_out.append(torch.split(padded.index_copy(0, packing.places_T, flat_THD), sizes))
    pieces = []
    for (count, width), *parts in zip(packing.rungs, *laid_out, strict=True):
        query, key, value = (part.view(count, width, *part.shape[1:]).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        pieces.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces).index_select(0, packing.places_T).unsqueeze(0)


def _by_length(
    query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, scaling: float | None, packing: Packing
) -> Tensor:
    runs = [(length, len(list(same))) for length, same in groupby(packing.lengths)]
    sizes = [length * count for length, count in runs]
    # Split, not sliced: the gradient of a slice is as long as the whole row, once for every slice.
    parts = [torch.split(heads[0], sizes, dim=1) for heads in (query_1HTD, key_1KTD, value_1KTD)]
    pieces: list[Tensor] = []
    for (length, count), *heads in zip(runs, *parts, strict=True):
        query, key, value = (part.reshape(-1, count, length, part.shape[-1]).transpose(0, 1) for part in heads)
        attended = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        pieces.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces).unsqueeze(0)


WAYS = {"varlen": _by_kernel, "ladder": _on_ladder, "equal": _by_length}


def fastest_way(*, device: str, dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> str:
    """By trying, where there is a choice: which kernel is quick depends on the card, the version and the shape of the heads."""
    if device != "cuda":
        return "equal"
    if dtype not in HALF or not HAS_VARLEN:
        return "ladder"
    seconds: dict[str, float] = {}
    lengths = tuple(range(1024, 64, -32))
    for way in ("varlen", "ladder"):
        packing = Packing.of(lengths, device, way=way)
        shapes = [(1, count, sum(lengths), width) for count in (heads, kv_heads, kv_heads)]
        query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
        started = 0.0
        try:
            for number in range(4):
                if number == 1:  # the first warms up
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                attended = WAYS[way](query, key, value, None, packing)
                attended.backward(torch.ones_like(attended))  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.cuda.synchronize()
            seconds[way] = time.perf_counter() - started
        except RuntimeError:
            # A kernel that does not know this card or width is no choice.
            continue
    return min(seconds, key=seconds.__getitem__) if seconds else "equal"


AttentionInterface.register(NAME, packed_attention)
