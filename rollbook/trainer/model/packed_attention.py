"""Attention over sequences concatenated in one row, each attending to itself only. Registered with transformers by name.

Sequences may share tokens at their start (`data/prefixes`). The model computes shared tokens once; attention copies their keys and
values to every sequence that has them, and computes queries of the tokens that a sequence adds.

`exact` has the bits of the sampler (`rollbook.numerics`). Three others compute the same numbers, but for rounding.
`varlen`: the variable-length kernel, in half precision on a GPU. `bucketed`: sequences of
similar length form a bucket, padded to its longest, for the ordinary kernel; only attention sees the padding. `equal`: only equal
lengths share a call, without padding. None of them needs a mask of tokens times tokens, unless a layer has a window or sinks: then
the last two have masks for the sequences of a call.
"""

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollbook.contracts.errors import is_out_of_memory
from rollbook.numerics import operations
from rollbook.numerics.gradients import with_torch_gradient
from rollbook.trainer.data.prefixes import PackedSequences, prefix_tree
from rollbook.trainer.model.gather import Gather, on_device
from rollbook.trainer.model.packed_delta import Chunks

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
HAS_WINDOWS = "window_size" in _KNOWN

PROBED_WINDOW = 7
SINK_WIDTH = 8
"""Kernels of a GPU need heads whose width is a multiple of it."""
MIN_BUCKET_FILL = 0.75
"""A sequence shorter than this fraction of its bucket's longest starts a new bucket."""


# H heads, K heads of keys and values, T computed tokens, F tokens of all sequences, D width of a head
class Kernel(Protocol):
    """Attention over the sequences that it was made for."""

    def __call__(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        scaling: float | None,
        window: int | None = None,
        *,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """`window`: a token sees so many tokens, itself included. None: all before it. `sinks_H`: a score of each head that takes
        part in the softmax, and has no value. Only kernels with masks compute it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """The sequences of one packed row, on the model's device."""

    positions_T: Tensor
    """Position of each computed token in its own sequence."""
    kernel: Kernel
    chunks: Chunks | None = None
    """How gated delta layers are computed; None without such layers."""

    @classmethod
    def of(
        cls,
        sequences: PackedSequences,
        device: str | torch.device,
        *,
        kernel: str = "equal",
        heads: tuple[int, int, int] | None = None,
        convolution: int | None = None,
    ) -> "Packing":
        """`heads`: how many, how many of keys, and their size. What depends on them is then prepared before the first layer.
        `convolution`: tokens of the convolutions of gated delta layers, if there are such layers."""
        added = np.array(sequences.added, dtype=np.int64)
        # The added tokens are at the end of each sequence.
        shifts = np.array(sequences.lengths, dtype=np.int64) - np.cumsum(added)
        positions_T = np.arange(sequences.num_computed, dtype=np.int64) + np.repeat(shifts, added)
        attend = KERNELS[kernel](sequences, positions_T, device)
        if heads is not None and isinstance(attend, _Exact):
            attend.tiles_of(heads)
        chunks = None if convolution is None else Chunks.of(sequences, convolution, device)
        return cls(positions_T=on_device(positions_T, device), kernel=attend, chunks=chunks)


def packed_attention(
    module: Any,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in every layer. Without a packing, each row is one causal sequence."""
    if others.get("softcap") is not None:
        raise ValueError("attention with softcap is not supported in a packed row")
    sinks_H: Tensor | None = others.get("s_aux")
    if packing is None:
        count = key_1KTD.shape[2]
        window = sliding_window if sliding_window is not None and sliding_window < count else None
        if attention_mask is None and (window is not None or sinks_H is not None):
            attention_mask = _seen_keys(count, count, window, device=key_1KTD.device)
        if sinks_H is not None:
            assert attention_mask is not None, "made above"
            attended = _attend_with_sinks(
                query_1HTD, key_1KTD, value_1KTD, attention_mask, scaling=scaling, sinks_H=sinks_H
            )
            return attended.transpose(1, 2), None
        ordinary: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_1HTD, key_1KTD, value_1KTD, attention_mask, scaling=scaling
        )
        return ordinary
    query_THD, key_TKD, value_TKD = (heads[0].transpose(0, 1) for heads in (query_1HTD, key_1KTD, value_1KTD))
    return packing.kernel(query_THD, key_TKD, value_TKD, scaling, sliding_window, sinks_H=sinks_H).unsqueeze(0), None


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float | None, sinks_H: Tensor
) -> Tensor:
    """Over heads (B, heads, tokens, D). `mask`: which keys are seen, or what is added to their scores.

    The sink is one more key, whose product with a query is the score of the head: queries get a number that holds it, keys one that
    is 1 for the sink only. So ordinary kernels compute it, with its gradient.
    """
    width = query.shape[-1]
    scale = width**-0.5 if scaling is None else scaling
    more = SINK_WIDTH - width % SINK_WIDTH
    of_heads = (sinks_H / scale).to(query.dtype)[:, None, None].expand(*query.shape[:-1], 1)
    query = F.pad(torch.cat((query, of_heads), dim=-1), (0, more - 1))
    key, value = (F.pad(heads, (0, more, 0, 1)) for heads in (key, value))
    key[..., -1, width] = 1.0
    mask = F.pad(mask, (0, 1), value=True if mask.dtype is torch.bool else 0.0)
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return attended[..., :width]


def _seen_keys(queries: int, keys: int, window: int | None, *, device: torch.device) -> Tensor:
    """Which keys each query sees. Queries are aligned with the end of the keys."""
    is_seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return is_seen if window is None else is_seen.triu(keys - queries + 1 - window)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Varlen:
    """One call for all sequences. Queries are aligned with the end of the keys."""

    keys: Gather | None
    """Copies keys and values of shared tokens; None where nothing is shared."""
    query_ends: Tensor
    key_ends: Tensor
    """Cumulative lengths, from 0."""
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, sequences: PackedSequences, positions_T: NDArray[np.int64], device: str | torch.device) -> "_Varlen":
        added, lengths = (np.cumsum([0, *counts]).astype(np.int32) for counts in (sequences.added, sequences.lengths))
        return cls(
            keys=_gather(sequences.sources_F, len(positions_T), device),
            query_ends=on_device(added, device),
            key_ends=on_device(lengths, device),
            longest_query=max(sequences.added),
            longest_key=max(sequences.lengths),
        )

    def __call__(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        scaling: float | None,
        window: int | None = None,
        *,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        if sinks_H is not None:
            raise RuntimeError("the variable-length kernel has no sinks")
        query, key, value = query_THD, key_TKD, value_TKD
        if self.keys is not None:
            key, value = self.keys(key), self.keys(value)
        # Keys before the token itself.
        earlier = -1 if window is None else window - 1
        options: dict[str, Any] = {"window_size": (earlier, 0)} if HAS_WINDOWS else {"is_causal": True}
        if window is not None and not HAS_WINDOWS:
            raise RuntimeError(f"the variable-length kernel of PyTorch {torch.__version__} has no windows")
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and "enable_gqa" in _KNOWN:
            options["enable_gqa"] = True
        elif groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        if scaling is not None and "scale" in _KNOWN:
            options["scale"] = scaling
        elif scaling is not None:
            query = query * (scaling * query.shape[-1] ** 0.5)
        attended_THD: Any = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            self.query_ends,
            self.key_ends,
            self.longest_query,
            self.longest_key,
            **options,
        )
        attended: Tensor = attended_THD
        return attended


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Exact:
    """The bits of the sampler; the gradient is that of the variable-length kernel, in a fixed order."""

    varlen: _Varlen
    first_keys: NDArray[np.int64]
    added: NDArray[np.int64]
    before: NDArray[np.int64]
    """Of each sequence: its first key, the tokens that it adds, and the keys before them."""
    tiles: dict[tuple[int, int, int], Tensor]
    """By the numbers of heads."""
    device: str | torch.device

    @classmethod
    def of(cls, sequences: PackedSequences, positions_T: NDArray[np.int64], device: str | torch.device) -> "_Exact":
        lengths, added = (np.array(counts, dtype=np.int64) for counts in (sequences.lengths, sequences.added))
        return cls(
            varlen=_Varlen.of(sequences, positions_T, device),
            first_keys=np.cumsum(lengths) - lengths,
            added=added,
            before=lengths - added,
            tiles={},
            device=device,
        )

    def __call__(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        scaling: float | None,
        window: int | None = None,
        *,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        if sinks_H is not None:
            raise RuntimeError("the exact kernel has no sinks")
        key, value = key_TKD, value_TKD
        if self.varlen.keys is not None:
            key, value = self.varlen.keys(key), self.varlen.keys(value)
        tiles_4B = self.tiles_of((query_THD.shape[1], key.shape[1], key.shape[2]))
        scale = query_THD.shape[-1] ** -0.5 if scaling is None else scaling
        plain = replace(self.varlen, keys=None)
        return with_torch_gradient(
            lambda query, key, value: operations.attention(query, key, value, tiles_4B, scale=scale, window=window),
            lambda query, key, value: plain(query, key, value, scaling, window),
            query_THD,
            key,
            value,
        )

    def tiles_of(self, heads: tuple[int, int, int]) -> Tensor:
        """The same in all layers with the same heads: how many, how many of keys, and their size."""
        if heads not in self.tiles:
            size = operations.tokens_per_tile(heads=heads[0], key_heads=heads[1], size=heads[2])
            counts = -(-self.added // size)
            offsets = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * size
            tiles_4B = np.stack(
                [
                    np.repeat(np.cumsum(self.added) - self.added, counts) + offsets,
                    np.minimum(size, np.repeat(self.added, counts) - offsets),
                    np.repeat(self.before, counts) + offsets,
                    np.repeat(self.first_keys, counts),
                ]
            )
            # Long sequences first: their tiles take the longest.
            order = np.argsort(-tiles_4B[2], kind="stable")
            sorted_4B = np.ascontiguousarray(tiles_4B[:, order], dtype=np.int32)
            self.tiles[heads] = on_device(sorted_4B, self.device)
        return self.tiles[heads]


@dataclass(frozen=True, slots=True)
class _Call:
    """Neighbouring sequences that one call computes."""

    count: int
    queries: int
    """Queries per sequence, aligned with the end of the keys."""
    keys: int
    """Keys per sequence, padding included."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Grouped:
    """One call of the ordinary kernel for each group of sequences."""

    calls: tuple[_Call, ...]
    queries: Gather | None
    keys: Gather | None
    """Copy the computed tokens to the layout of the calls; None where it is the same."""
    results_T: Tensor | None
    """Index of the computed tokens in the layout of the queries; None where it is the same."""
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)
    """By queries, keys and window. The same in all layers."""

    @classmethod
    def of(
        cls,
        calls: Sequence[_Call],
        sequences: PackedSequences,
        positions_T: NDArray[np.int64],
        device: str | torch.device,
    ) -> "_Grouped":
        lengths, added = np.array(sequences.lengths), np.array(sequences.added)
        counts = [call.count for call in calls]
        num_keys = np.repeat([call.keys for call in calls], counts)
        num_queries = np.repeat([call.queries for call in calls], counts)
        # Padding is after a sequence, where causal attention does not look, and its output is not read. So it may hold any token:
        # the sequence is repeated.
        at = np.arange(num_keys.sum()) - np.repeat(np.cumsum(num_keys) - num_keys, num_keys)
        starts = np.cumsum(lengths) - lengths
        key_sources = sequences.sources_F[np.repeat(starts, num_keys) + at % np.repeat(lengths, num_keys)]
        # Keys before the first query of their sequence.
        num_before = num_keys - num_queries
        query_sources = key_sources[at >= np.repeat(num_before, num_keys)]
        results_T = positions_T + np.repeat(np.cumsum(num_queries) - num_queries - num_before, added)
        queries = _gather(query_sources, len(positions_T), device)
        return cls(
            calls=tuple(calls),
            queries=queries,
            keys=_gather(key_sources, len(positions_T), device) if num_before.any() else queries,
            results_T=None if queries is None else on_device(results_T, device),
        )

    def __call__(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        scaling: float | None,
        window: int | None = None,
        *,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        num_queries = [call.count * call.queries for call in self.calls]
        num_keys = [call.count * call.keys for call in self.calls]
        pieces = []
        for call, *parts in zip(
            self.calls,
            _split(query_THD, self.queries, num_queries),
            _split(key_TKD, self.keys, num_keys),
            _split(value_TKD, self.keys, num_keys),
            strict=True,
        ):
            query, key, value = (part.view(call.count, -1, *part.shape[1:]).transpose(1, 2) for part in parts)
            if sinks_H is not None:
                seen = self._seen(call, window, query.device)
                attended = _attend_with_sinks(query, key, value, seen, scaling=scaling, sinks_H=sinks_H)
                pieces.append(attended.transpose(1, 2).flatten(0, 1))
                continue
            mask = self._mask(call, window, query.device)
            attended = scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            pieces.append(attended.transpose(1, 2).flatten(0, 1))
        whole = torch.cat(pieces)
        return whole if self.results_T is None else whole.index_select(0, self.results_T)

    def _mask(self, call: _Call, window: int | None, device: torch.device) -> Tensor | None:
        """None: the call is causal, with as many queries as keys."""
        is_causal = (window is None or window >= call.keys) and call.queries == call.keys
        return None if is_causal else self._seen(call, window, device)

    def _seen(self, call: _Call, window: int | None, device: torch.device) -> Tensor:
        shape = (call.queries, call.keys, None if window is None or window >= call.keys else window)
        if shape not in self.masks:
            self.masks[shape] = _seen_keys(*shape, device=device)
        return self.masks[shape]


def _split(heads: Tensor, gather: Gather | None, sizes: list[int]) -> tuple[Tensor, ...]:
    # Split, not sliced: the gradient of each slice would be as long as the whole row.
    return torch.split(heads if gather is None else gather(heads), sizes)


def _gather(index: NDArray[np.int64], num_rows: int, device: str | torch.device) -> Gather | None:
    """None where the index changes nothing."""
    is_same = len(index) == num_rows and bool((index == np.arange(num_rows)).all())
    return None if is_same else Gather.of(index, num_rows, device)


def _bucketed(sequences: PackedSequences, positions_T: NDArray[np.int64], device: str | torch.device) -> _Grouped:
    # Shared tokens have queries in each sequence: padded keys have no common end to align fewer queries with.
    calls = [_Call(count, width, width) for count, width in length_buckets(sequences.lengths)]
    return _Grouped.of(calls, sequences, positions_T, device)


def _equal_lengths(sequences: PackedSequences, positions_T: NDArray[np.int64], device: str | torch.device) -> _Grouped:
    """Sequences that share tokens are computed apart from those that do not, with as many queries as one of them adds."""
    calls = []
    pairs = zip(sequences.lengths, sequences.added, strict=True)
    for (length, _), same in groupby(pairs, key=lambda pair: (pair[0], pair[0] == pair[1])):
        added = [own for _, own in same]
        calls.append(_Call(len(added), max(added), length))
    return _Grouped.of(calls, sequences, positions_T, device)


def length_buckets(lengths: Sequence[int]) -> list[tuple[int, int]]:
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
    return [*buckets, (count, width)] if count else buckets


KERNELS: dict[str, Callable[[PackedSequences, NDArray[np.int64], str | torch.device], Kernel]] = {
    "varlen": _Varlen.of,
    "exact": _Exact.of,
    "bucketed": _bucketed,
    "equal": _equal_lengths,
}


def fastest_kernel(
    *,
    device: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
    window: int | None = None,
    has_sinks: bool = False,
) -> str:
    """Measured on a GPU: which kernel is faster depends on the card, the PyTorch version and the shape of the heads. `window`: of
    some layers."""
    if device != "cuda":
        return "equal"
    if dtype not in HALF or not HAS_VARLEN or has_sinks:
        return "bucketed"
    seconds: dict[str, float] = {}
    sequences = PackedSequences.unshared(range(1024, 64, -32))
    for kernel in ("varlen", "bucketed"):
        attend = Packing.of(sequences, device, kernel=kernel).kernel
        shapes = [(sequences.num_computed, count, width) for count in (heads, kv_heads, kv_heads)]
        query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
        started = 0.0
        try:
            if not aligns_with_the_end(kernel, query, key, value, window=window):
                continue
            for number in range(4):
                if number == 1:  # the first is a warm-up
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                attended = attend(query, key, value, None, window)
                attended.backward(torch.ones_like(attended))  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.cuda.synchronize()
            seconds[kernel] = time.perf_counter() - started
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            # The kernel does not support this card or head width.
            continue
    return min(seconds, key=seconds.__getitem__) if seconds else "equal"


def aligns_with_the_end(
    kernel: str, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, *, window: int | None = None
) -> bool:
    """Whether fewer queries than keys are the last ones, in both passes, and windows have the right size. PyTorch does not document
    it for `varlen`."""
    window = None if window is None else PROBED_WINDOW
    sequences, _ = prefix_tree([40, 33], [0, 20])
    heads = query_THD, key_TKD, value_TKD
    results = []
    for name in (kernel, "equal"):
        query, key, value = (tensor[: sequences.num_computed].detach().requires_grad_() for tensor in heads)
        attended = Packing.of(sequences, query.device, kernel=name).kernel(query, key, value, None, window)
        results.append([attended, *torch.autograd.grad(attended.sum(), (query, key, value))])
    return all(torch.allclose(found, expected, rtol=0.05, atol=0.05) for found, expected in zip(*results, strict=True))


AttentionInterface.register(NAME, packed_attention)
