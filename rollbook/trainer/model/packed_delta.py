"""Gated delta layers over sequences concatenated in one row. A token that several sequences share is computed once.

The computed tokens are a forest: each token follows the one before it in its sequence, and the last shared token is followed by one
token of each sequence that has it. A chunk is a run of tokens that follow one another, so it starts from one state: nothing, or the
state after another chunk. Everything that does not depend on states is computed for all chunks at once. Then a loop computes the
states, for all chunks of one level at a time: level 0 starts from nothing, level 1 follows level 0, and so on.

The layout is made from numbers that the host has; the loop does not wait for the device.
"""

# T computed tokens, L chunks of B places, K tokens of the convolution, C its channels, H heads, D key size, V value size

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rollbook.numerics.delta import CHUNK, ChunkTerms, DeltaInputs, DeltaLayer
from rollbook.numerics.module_parts import DELTA_PARTS, GROUPED_DELTA_PARTS
from rollbook.numerics.recipe import DELTA
from rollbook.trainer.data.prefixes import PackedSequences
from rollbook.trainer.model.gather import Gather, on_device

NOTHING = -1
"""In place of a token or a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """Chunks that are computed together, one after the other in the order of all chunks."""

    chunks: slice
    num_followed: int
    """So many of them, the first ones, are followed by chunks of the next level."""
    followers: Gather | None
    """Copies the states after them to the chunks of the next level. None: one follows each, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """Where the computed tokens of a pass are in chunks. The same in all layers."""

    levels: tuple[Level, ...]
    inputs: Gather
    """To L x (K - 1 + B) places: the tokens of each chunk, after those that its convolution sees before them."""
    is_empty_LI1: Tensor
    """Which of these places have no token."""
    places_T: Tensor
    """Index of each token in L x B places."""

    @classmethod
    def of(cls, sequences: PackedSequences, width: int, device: str | torch.device) -> "Chunks":
        """`width`: K."""
        before_T = _tokens_before(sequences)
        starts_L, counts_L = _runs(before_T)
        levels = _levels(before_T, starts_L)
        order_L = np.concatenate([chunks for chunks, _ in levels])
        starts_L, counts_L = starts_L[order_L], counts_L[order_L]
        size = int(counts_L.max())
        at_B = np.arange(size)
        tokens_LB = np.where(at_B < counts_L[:, None], starts_L[:, None] + at_B, NOTHING)
        columns = [tokens_LB]
        seen_L = starts_L
        for _ in range(width - 1):
            seen_L = np.where(seen_L == NOTHING, NOTHING, before_T[seen_L])
            columns.insert(0, seen_L[:, None])
        inputs_LI = np.concatenate(columns, axis=1)
        places_T = np.empty(len(before_T), dtype=np.int64)
        filled = np.flatnonzero(tokens_LB != NOTHING)
        places_T[tokens_LB.flat[filled]] = filled
        ends = np.cumsum([len(chunks) for chunks, _ in levels]).tolist()
        followed = [*(parents for _, parents in levels[1:]), np.empty(0, dtype=np.int64)]
        return cls(
            levels=tuple(
                Level(
                    chunks=slice(end - len(chunks), end),
                    num_followed=(count := int(parents.max(initial=-1)) + 1),
                    followers=None
                    if len(parents) == count and (parents == np.arange(count)).all()
                    else Gather.of(parents, count, device),
                )
                for (chunks, _), end, parents in zip(levels, ends, followed, strict=True)
            ),
            inputs=Gather.of(np.maximum(inputs_LI, 0).ravel(), len(before_T), device),
            is_empty_LI1=on_device((inputs_LI == NOTHING)[..., None], device),
            places_T=on_device(places_T, device),
        )

    def inputs_of(self, tokens_TC: Tensor) -> Tensor:
        """In chunks (L, K - 1 + B, C), 0 where there is no token."""
        inputs_LIC: Tensor = self.inputs(tokens_TC).view(*self.is_empty_LI1.shape[:2], -1)
        return inputs_LIC.masked_fill(self.is_empty_LI1, 0.0)


def _tokens_before(sequences: PackedSequences) -> NDArray[np.int64]:
    """For each computed token, the one before it in its sequence."""
    lengths, added = (np.array(counts, dtype=np.int64) for counts in (sequences.lengths, sequences.added))
    before_T = np.arange(sequences.num_computed, dtype=np.int64) - 1
    last_shared = np.cumsum(lengths) - added - 1
    starts = np.cumsum(added) - added
    before_T[starts] = np.where(lengths == added, NOTHING, sequences.sources_F[last_shared])
    return before_T


def _runs(before_T: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first token of each chunk, and how many it has. Only the last token of a chunk is followed by tokens of others."""
    count = len(before_T)
    tokens = np.arange(count)
    is_start = before_T != tokens - 1
    is_start[0] = True
    branches = before_T[is_start]
    after = branches[branches != NOTHING] + 1
    is_start[after[after < count]] = True
    starts = np.flatnonzero(is_start)
    lengths = np.diff(starts, append=count)
    pieces = -(-lengths // CHUNK)
    offsets = (np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * CHUNK
    return np.repeat(starts, pieces) + offsets, np.minimum(CHUNK, np.repeat(lengths, pieces) - offsets)


def _levels(
    before_T: NDArray[np.int64], starts_L: NDArray[np.int64]
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The chunks of each level, those with the most levels after them first, and for each its parent: the place in the level before
    of the chunk that it follows."""
    previous = before_T[starts_L]
    parents = np.where(previous == NOTHING, NOTHING, np.searchsorted(starts_L, previous, side="right") - 1).tolist()
    followers: list[list[int]] = [[] for _ in parents]
    for chunk, parent in enumerate(parents):
        if parent != NOTHING:
            followers[parent].append(chunk)
    levels = [[chunk for chunk, parent in enumerate(parents) if parent == NOTHING]]
    while after := [chunk for parent in levels[-1] for chunk in followers[parent]]:
        levels.append(after)
    heights = [0] * len(parents)
    for level in reversed(levels[1:]):
        for chunk in level:
            heights[parents[chunk]] = max(heights[parents[chunk]], heights[chunk] + 1)
    places = dict.fromkeys([NOTHING], NOTHING)
    found = []
    for level in levels:
        level.sort(key=lambda chunk: (-heights[chunk], places[parents[chunk]]))
        found.append((np.array(level), np.array([places[parents[chunk]] for chunk in level])))
        places |= {chunk: place for place, chunk in enumerate(level)}
    return found


class _States(torch.autograd.Function):
    """What the tokens of each chunk write, W (L, H, B, V), and the state before each chunk, S (L, H, D, V).

    One write for each number, and products only where a state is needed: recorded operations would keep each state twice.
    """

    @staticmethod
    def forward(ctx: Any, levels: tuple[Level, ...], *terms: Tensor) -> tuple[Tensor, Tensor]:
        own, of_state, key, decay = terms
        states = own.new_zeros(*key.shape[:2], key.shape[-1], own.shape[-1])
        written = own.clone(memory_format=torch.contiguous_format)
        for number, level in enumerate(levels):
            if number:
                _flat(written[level.chunks]).baddbmm_(
                    _flat(of_state[level.chunks]), _flat(states[level.chunks]), alpha=-1
                )
            if level.num_followed:
                first, following = _followed(level), states[levels[number + 1].chunks]
                after = following if level.followers is None else torch.empty_like(states[first])
                torch.mul(states[first], decay[first], out=after)
                _flat(after).baddbmm_(_flat(key[first]).transpose(1, 2), _flat(written[first]))
                if level.followers is not None:
                    torch.index_select(after, 0, level.followers.index_F, out=following)
        ctx.levels = levels
        ctx.save_for_backward(of_state, key, decay, written, states)
        return written, states

    @staticmethod
    def backward(ctx: Any, written_grad: Tensor, states_grad: Tensor) -> tuple[Tensor | None, ...]:
        of_state, key, decay, written, states = ctx.saved_tensors
        levels: tuple[Level, ...] = ctx.levels
        own_grad = written_grad.clone(memory_format=torch.contiguous_format)
        before_grad = states_grad.clone(memory_format=torch.contiguous_format)
        after_grad = torch.zeros_like(states)
        for number in reversed(range(len(levels))):
            level = levels[number]
            if level.num_followed:
                first, following = _followed(level), before_grad[levels[number + 1].chunks]
                after_grad[first] = following if level.followers is None else level.followers.sums(following)
                _flat(own_grad[first]).baddbmm_(_flat(key[first]), _flat(after_grad[first]))
                before_grad[first].addcmul_(after_grad[first], decay[first])
            if number:
                _flat(before_grad[level.chunks]).baddbmm_(
                    _flat(of_state[level.chunks]).transpose(1, 2), _flat(own_grad[level.chunks]), alpha=-1
                )
        return (
            None,
            own_grad,
            (own_grad @ states.transpose(-1, -2)).neg_(),
            written @ after_grad.transpose(-1, -2),
            (states * after_grad).sum(dim=(-1, -2), keepdim=True),
        )


def _flat(x_LHMN: Tensor) -> Tensor:
    return x_LHMN.view(-1, *x_LHMN.shape[2:])


def _followed(level: Level) -> slice:
    return slice(level.chunks.start, level.chunks.start + level.num_followed)


def _chunk_results(terms: ChunkTerms, levels: tuple[Level, ...]) -> Tensor:
    """The results (L, H, B, V) of the tokens of chunks."""
    written, states = _States.apply(levels, terms.own, terms.of_state, terms.key, terms.decay)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    results: Tensor = terms.query @ states + terms.seen @ written
    return results


def _mixed(layer: DeltaLayer, chunks: Chunks, new: DeltaInputs) -> Tensor:
    """The results (T, H x V) of the layer before its last projection."""
    channels, _, width = layer.kernel_C1K.shape
    inputs_LIC = chunks.inputs_of(torch.cat((new.mixed, new.rates, new.times), dim=-1))
    mixed_LIC, rates_LIH, times_LIH = torch.split(inputs_LIC, [channels, layer.value_heads, layer.value_heads], dim=-1)
    convolved_LCB = F.conv1d(mixed_LIC.transpose(1, 2), layer.kernel_C1K, groups=channels)
    tokens = slice(width - 1, None)
    decays = layer.decays(rates_LIH[:, tokens], times_LIH[:, tokens])
    # Places without a token write nothing and forget nothing.
    is_empty_LB1 = chunks.is_empty_LI1[:, tokens]
    rates, log_decays = (x.masked_fill(is_empty_LB1, 0.0).transpose(1, 2)[..., None] for x in decays)
    query, key, value = (x.transpose(1, 2).contiguous() for x in layer.heads(F.silu(convolved_LCB).transpose(1, 2)))
    results_LHBV = _chunk_results(ChunkTerms.of(query, key, value, rates, log_decays), chunks.levels)
    results_THV = results_LHBV.transpose(1, 2).flatten(0, 1).index_select(0, chunks.places_T)
    return layer.gated(results_THV.to(new.mixed.dtype), new.gates)


def _forward(module: Any, hidden_states: Tensor, *inputs: Any, packing: Any = None, **others: Any) -> Tensor:
    """In place of the forward of a gated delta module, which computes rows that are not packed."""
    if packing is None:
        unpacked: Tensor = type(module).forward(module, hidden_states, *inputs, **others)
        return unpacked
    layer = DeltaLayer.of(module)
    names = GROUPED_DELTA_PARTS if layer.is_grouped else DELTA_PARTS
    new = layer.inputs_of([getattr(module, name)(hidden_states[0]) for name in names])
    if module.is_recomputed or not torch.is_grad_enabled():
        mixed_TD = _mixed(layer, packing.chunks, new)
    else:
        # What the chunks need in the backward pass is ten times the size of what they are computed from.
        mixed_TD = checkpoint(_mixed, layer, packing.chunks, new, use_reentrant=False, preserve_rng_state=False)
    projected: Tensor = module.out_proj(mixed_TD)
    return projected.unsqueeze(0)


def delta_parts(model: nn.Module) -> Iterator[Any]:
    """The gated delta modules of a model."""
    for part in model.modules():
        if hasattr(part, DELTA):
            yield getattr(part, DELTA)


def convolution_width(model: nn.Module) -> int | None:
    """Tokens that the convolutions of its gated delta layers see. None: it has no such layers."""
    return next((part.conv1d.kernel_size[0] for part in delta_parts(model)), None)


def use_packed_delta(model: nn.Module) -> None:
    """Compute packed rows in its gated delta modules. Raises `UnsupportedModelError`."""
    for part in delta_parts(model):
        DeltaLayer.of(part)
        part.forward = MethodType(_forward, part)
        part.is_recomputed = False
        """Whether the layer around it is computed again in the backward pass."""


def use_module_delta(model: nn.Module) -> None:
    """Undo `use_packed_delta`."""
    for part in delta_parts(model):
        part.__dict__.pop("forward", None)
