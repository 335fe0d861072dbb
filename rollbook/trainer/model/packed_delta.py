"""Gated delta layers over sequences concatenated in one row. A token that several sequences share is computed once.

What does not depend on states is computed for all chunks of a pass at once (`data/delta_chunks`). Then a loop computes the states,
for all chunks of one level at a time. The layout is made from numbers that the host has; the loop does not wait for the device.
"""

# T computed tokens, L chunks of B places, K tokens of the convolution, C its channels, H heads, D key size, V value size

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rollbook.numerics.delta import CHUNK, ChunkTerms, DeltaInputs, DeltaLayer
from rollbook.numerics.module_parts import DELTA_PARTS, GROUPED_DELTA_PARTS
from rollbook.numerics.recipe import DELTA
from rollbook.trainer.data.delta_chunks import (
    NOTHING,
    WORKSPACE_BYTES,
    levels_of,
    runs_of,
    tokens_before,
    workspace_bytes_per_token,
)
from rollbook.trainer.data.prefixes import PackedSequences
from rollbook.trainer.model.gather import Gather, on_device


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
    num_places: int

    @classmethod
    def of(cls, sequences: PackedSequences, width: int, device: str | torch.device) -> "Chunks":
        """`width`: K."""
        before_T = tokens_before(sequences)
        starts_L, counts_L = runs_of(before_T, CHUNK)
        levels = levels_of(before_T, starts_L)
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
        is_empty_LI = inputs_LI == NOTHING
        # The gradient of a token is the sum over its copies, one after the other. As copies of one token, empty places would make
        # that sum the longest by far.
        inputs_LI[is_empty_LI] = np.arange(is_empty_LI.sum()) % len(before_T)
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
            inputs=Gather.of(inputs_LI.ravel(), len(before_T), device),
            is_empty_LI1=on_device(is_empty_LI[..., None], device),
            places_T=on_device(places_T, device),
            num_places=tokens_LB.size,
        )

    def inputs_of(self, tokens_TC: Tensor) -> Tensor:
        """In chunks (L, K - 1 + B, C), 0 where there is no token."""
        inputs_LIC: Tensor = self.inputs(tokens_TC).view(*self.is_empty_LI1.shape[:2], -1)
        return inputs_LIC.masked_fill(self.is_empty_LI1, 0.0)


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


def _parts(
    layer: DeltaLayer, new: DeltaInputs, key_heads: int
) -> Iterator[tuple[DeltaLayer, list[Tensor], DeltaInputs]]:
    """The layer in parts of so many key heads: each with its queries, keys and values, and its other inputs."""
    counts = [min(key_heads, layer.key_heads - start) for start in range(0, layer.key_heads, key_heads)]
    of_head = layer.value_heads // layer.key_heads
    keys, values = (
        [count * layer.key_size for count in counts],
        [count * of_head * layer.value_size for count in counts],
    )
    heads = [count * of_head for count in counts]
    # Split, not sliced: the gradient of each slice would be as wide as the whole.
    channels = torch.split(new.mixed, [*keys, *keys, *values], dim=-1)
    kernels = torch.split(layer.kernel_C1K, [*keys, *keys, *values])
    split = [torch.split(x, heads, dim=-1) for x in (new.rates, new.times, layer.log_rates_H, layer.time_biases_H)]
    gates = torch.split(new.gates, heads, dim=-2)
    for part, count in enumerate(counts):
        own = slice(part, None, len(counts))
        rates, times, log_rates_H, time_biases_H = (x[part] for x in split)
        part_layer = replace(
            layer,
            key_heads=count,
            value_heads=heads[part],
            kernel_C1K=torch.cat(kernels[own]),
            log_rates_H=log_rates_H,
            time_biases_H=time_biases_H,
        )
        yield part_layer, [*channels[own]], replace(new, gates=gates[part], rates=rates, times=times)


def _mixed(layer: DeltaLayer, chunks: Chunks, mixed: Sequence[Tensor], new: DeltaInputs) -> Tensor:
    """The results (T, H x V) of the layer before its last projection. `mixed`: queries, keys and values of its heads."""
    channels, _, width = layer.kernel_C1K.shape
    inputs_LIC = chunks.inputs_of(torch.cat((*mixed, new.rates, new.times), dim=-1))
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
    return layer.gated(results_THV.to(new.gates.dtype), new.gates)


def _forward(module: Any, hidden_states: Tensor, *inputs: Any, packing: Any = None, **others: Any) -> Tensor:
    """In place of the forward of a gated delta module, which computes rows that are not packed."""
    if packing is None:
        unpacked: Tensor = type(module).forward(module, hidden_states, *inputs, **others)
        return unpacked
    layer, chunks = DeltaLayer.of(module), packing.chunks
    names = GROUPED_DELTA_PARTS if layer.is_grouped else DELTA_PARTS
    new = layer.inputs_of([getattr(module, name)(hidden_states[0]) for name in names])
    of_key_head = workspace_bytes_per_token(layer.value_heads // layer.key_heads, layer.key_size, layer.value_size)
    at_once = max(1, WORKSPACE_BYTES // (chunks.num_places * of_key_head))
    # The backward pass needs of the chunks fifteen times the size of what they are computed from. A layer that is computed again as
    # a whole would compute them a third time, but it keeps all parts of its heads at once.
    is_kept = not torch.is_grad_enabled() or (module.is_recomputed and at_once >= layer.key_heads)
    compute = _mixed if is_kept else partial(checkpoint, _mixed, use_reentrant=False, preserve_rng_state=False)
    results = [compute(part, chunks, mixed, own) for part, mixed, own in _parts(layer, new, at_once)]
    projected: Tensor = module.out_proj(torch.cat(results, dim=-1) if len(results) > 1 else results[0])
    return projected.unsqueeze(0)


def delta_parts(model: nn.Module) -> Iterator[Any]:
    """The gated delta modules of a model, possibly with parts that are not known here."""
    for part in model.modules():
        if hasattr(getattr(part, DELTA, None), "conv1d"):
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
