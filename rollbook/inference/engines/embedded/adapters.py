"""Low-rank adapters that are computed next to the base, never merged into it: W x + s B (A x).

Merging would round the adapter away: after a few steps with a small learning rate, its changes are smaller than the spacing of
bfloat16 numbers. All loaded adapters are in fixed buffers, side by side, so a batch may mix them and captured graphs see an update.
The factors have the model's dtype, as in the passes of the trainer. The scale is part of B.
"""

# N rows, M tokens, L slots, P projections that share an input, R rank, K = L x P x R, E in, O out

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rollbook.contracts.weights import Adapter
from rollbook.inference.weights.lora import LowRankPair
from rollbook.numerics.operations import product

POLICY, BASE = 0, -1
"""The slot of the published adapter, and the number of a row that uses none. Named adapters have the other slots."""
Kind = Literal["policy", "mixed"] | None
"""What a forward computes: the published adapter for all rows, a mix, or the base alone."""
RANK_STEP = 16
"""Ranks are padded to a multiple of it, which a matrix instruction adds at once. So the ranks of a projection are grouped as in a
product of its own, which the trainer computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    adapter: Adapter
    pairs: Sequence[LowRankPair]
    factors: Mapping[str, Tensor]
    """The published tensors on the device, by name."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapter of each row of a forward: one slot for all of them, or a mask."""

    slot: int | None
    mask_NL: Tensor | None = None

    def of_tokens(self, tokens: Tensor) -> "AdapterRows":
        """For some of the tokens of a packed forward."""
        return self if self.mask_NL is None else AdapterRows(None, self.mask_NL[tokens])


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one projection, or of several that are computed as one. B is zero between different projections."""

    a_LPRE: Tensor
    b_LPRO: Tensor

    def product(
        self, x_ME: Tensor, rows: AdapterRows, *, multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    ) -> tuple[Tensor, Tensor]:
        """The factors whose product is the change of the output: A x (M, K), and B (K, O)."""
        if rows.slot is not None:
            return multiply(x_ME, self.a_LPRE[rows.slot].flatten(0, 1).t()), self.b_LPRO[rows.slot].flatten(0, 1)
        assert rows.mask_NL is not None, "rows have a slot or a mask"
        count, slots = rows.mask_NL.shape
        low_MK = multiply(x_ME, self.a_LPRE.flatten(0, 2).t())
        # Each row keeps the part of its own adapter; zeros make the others add nothing.
        low_MK.view(count, -1, slots, low_MK.shape[-1] // slots).mul_(rows.mask_NL[:, None, :, None])
        return low_MK, self.b_LPRO.flatten(0, 2)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the factors of a matrix are."""

    group: str
    part: int
    columns: slice


class AdapterBank:
    """The adapters of one model. `changes`, `grown` and what reads may be called from any thread while nothing replaces them."""

    def __init__(self, model: nn.Module, *, fused: Mapping[str, Sequence[str]] | None = None) -> None:
        """`fused`: names for projections that the forward computes as one, and their layers in order."""
        self.is_exact = False
        """Whether the parts of adapters have the bits of the trainer."""
        self.generation = 0
        """Changes when the buffers move; then captured graphs are void."""
        self._layers: dict[str, Any] = {
            name: part for name, part in model.named_modules() if isinstance(part, (nn.Linear, Conv1D))
        }
        self._groups: dict[str, Sequence[str]] = dict(fused or {})
        in_groups = {layer for layers in self._groups.values() for layer in layers}
        self._groups |= {name: (name,) for name in self._layers if name not in in_groups}
        self._places = {layer: place for group in self._groups for layer, place in self._placed(group)}
        self._factors: dict[str, Factors] = {}
        self._loaded: dict[int, LoadedAdapter] = {}
        self._hooked: set[str] = set()
        self._rows: AdapterRows | None = None

    # --- for the forward ---

    def has(self, group: str, rows: AdapterRows | None) -> bool:
        return rows is not None and group in self._factors

    def add(self, group: str, output_MO: Tensor, x_ME: Tensor, rows: AdapterRows | None) -> None:
        """Add the adapters' part to the output of a projection, in place."""
        if rows is None or (factors := self._factors.get(group)) is None:
            return
        low_MK, b_KO = factors.product(x_ME, rows, multiply=product if self.is_exact else torch.matmul)
        if output_MO.dtype == low_MK.dtype and not self.is_exact:
            output_MO.addmm_(low_MK, b_KO)
        else:
            output_MO.add_(low_MK @ b_KO)

    def rows(self, slots_N: NDArray[np.int32]) -> AdapterRows | None:
        """The adapters of these rows; None if they use none."""
        if self.kind(slots_N) is None:
            return None
        if (slots_N == slots_N[0]).all():
            return AdapterRows(int(slots_N[0]))
        device = next(iter(self._factors.values())).a_LPRE.device
        return self._mixed(torch.from_numpy(slots_N.astype(np.int64)).to(device))

    def kind(self, slots_N: NDArray[np.int32]) -> Kind:
        """Each kind of step is captured separately, so the number of graphs does not depend on that of adapters."""
        if not self._loaded or (slots_N == BASE).all():
            return None
        if (slots_N == POLICY).all():
            return "policy" if POLICY in self._loaded else None
        return "mixed"

    def rows_of_kind(self, kind: Kind, slots_N: Tensor) -> AdapterRows | None:
        """The same for slots on the device, whose kind is known."""
        if kind is None:
            return None
        return AdapterRows(POLICY) if kind == "policy" else self._mixed(slots_N)

    def _mixed(self, slots_N: Tensor) -> AdapterRows:
        factors = next(iter(self._factors.values()))
        slots_L = torch.arange(len(factors.a_LPRE), device=slots_N.device)
        return AdapterRows(None, (slots_N[:, None] == slots_L).to(factors.a_LPRE.dtype))

    @contextmanager
    def in_module(self, rows: AdapterRows | None) -> Iterator[None]:
        """Within the context, the layers of the Hugging Face module add the adapters' part themselves."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _add_in_layer(self, layer: str, _module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        place, rows = self._places[layer], self._rows
        factors = self._factors.get(place.group)
        if rows is None or factors is None:
            return output
        if rows.mask_NL is not None and args[0].shape[0] != len(rows.mask_NL):
            raise ValueError(
                f"{layer} computes {args[0].shape[0]} rows of a batch of {len(rows.mask_NL)}, so its requests cannot use different "
                "adapters; send requests for one adapter at a time"
            )
        part = slice(place.part, place.part + 1)
        own = Factors(factors.a_LPRE[:, part], factors.b_LPRO[:, part, :, place.columns])
        low_K, b_KO = own.product(args[0], rows)
        return output + low_K @ b_KO

    # --- for updates ---

    def adapter(self, slot: int) -> LoadedAdapter | None:
        return self._loaded.get(slot)

    def is_layer(self, matrix: str) -> bool:
        return matrix.endswith(".weight") and matrix.removesuffix(".weight") in self._places

    def sizes(self, matrix: str) -> tuple[int, int]:
        """Numbers of inputs and outputs."""
        return _sizes(self._layers[matrix.removesuffix(".weight")])

    def grown(self, slot: int, loaded: LoadedAdapter) -> "dict[str, Factors] | None":
        """New buffers, if the adapter does not fit into the present ones: another layer, a larger rank, or a new slot."""
        groups = {self._places[_layer(pair)].group for pair in loaded.pairs} | self._factors.keys()
        rank = -(-max(pair.rank for pair in loaded.pairs) // RANK_STEP) * RANK_STEP
        slots = slot + 1
        if self._factors:
            present = next(iter(self._factors.values())).a_LPRE
            slots, rank = max(slots, present.shape[0]), max(rank, present.shape[2])
            if groups == self._factors.keys() and (slots, rank) == (present.shape[0], present.shape[2]):
                return None
        return {group: self._empty(group, slots, rank) for group in sorted(groups)}

    def changes(
        self, slot: int, loaded: LoadedAdapter | None, grown: Mapping[str, Factors] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The new content of a slot, and the buffers it belongs into. Groups that the adapter does not change become zero."""
        groups = self._factors if grown is None else grown
        targets = [part for factors in groups.values() for part in (factors.a_LPRE[slot], factors.b_LPRO[slot])]
        if not targets:
            return [], []
        # One block of memory for all of them: allocations would delay the steps that run meanwhile.
        block = torch.zeros(sum(t.numel() for t in targets), dtype=targets[0].dtype, device=targets[0].device)
        sources = [
            part.view(t.shape)
            for part, t in zip(block.split_with_sizes([t.numel() for t in targets]), targets, strict=True)
        ]
        if loaded is not None:
            parts = dict(zip(groups, zip(sources[::2], sources[1::2], strict=True), strict=True))
            _fill(parts, [(self._places[_layer(pair)], pair) for pair in loaded.pairs], loaded.factors)
        return sources, targets

    def replaced(self, slot: int, loaded: LoadedAdapter | None, grown: Mapping[str, Factors] | None) -> None:
        """The slot has new content. With `grown`, the other slots move to these buffers."""
        if grown is not None:
            for group, old in self._factors.items():
                slots, rank = old.a_LPRE.shape[0], old.a_LPRE.shape[2]
                for other in range(slots):
                    if other != slot:
                        grown[group].a_LPRE[other, :, :rank].copy_(old.a_LPRE[other])
                        grown[group].b_LPRO[other, :, :rank].copy_(old.b_LPRO[other])
            self._factors = dict(grown)
            self.generation += 1
        if loaded is None:
            self._loaded.pop(slot, None)
            return
        self._loaded[slot] = loaded
        for pair in loaded.pairs:
            if (layer := _layer(pair)) not in self._hooked:
                self._hooked.add(layer)
                self._layers[layer].register_forward_hook(partial(self._add_in_layer, layer))

    def forget(self) -> None:
        """Remove all adapters: they were trained on another base."""
        self._loaded.clear()
        if self._factors:
            self._factors = {}
            self.generation += 1

    def is_in_use(self, slot: int) -> bool:
        """Whether the buffers hold exactly the loaded adapter. Synchronises with the device once."""
        sources, targets = self.changes(slot, self._loaded[slot])
        # As integers: NaN differs from itself, and zeros of either sign are equal.
        same = [torch.eq(s.view(torch.uint8), t.view(torch.uint8)).all() for s, t in zip(sources, targets, strict=True)]
        return bool(torch.stack(same).all())

    def in_use(self, slot: int) -> Iterable[tuple[str, Tensor]]:
        """The buffers of a slot, by name."""
        for group, factors in self._factors.items():
            yield f"{group}.a", factors.a_LPRE[slot]
            yield f"{group}.b", factors.b_LPRO[slot]

    def _placed(self, group: str) -> Iterator[tuple[str, _Place]]:
        start = 0
        for part, layer in enumerate(self._groups[group]):
            end = start + _sizes(self._layers[layer])[1]
            yield layer, _Place(group, part, slice(start, end))
            start = end

    def _empty(self, group: str, slots: int, rank: int) -> Factors:
        layers = [self._layers[layer] for layer in self._groups[group]]
        weight, inputs = layers[0].weight, _sizes(layers[0])[0]
        outputs = sum(_sizes(layer)[1] for layer in layers)
        shape = {"dtype": weight.dtype, "device": weight.device}
        return Factors(
            torch.zeros(slots, len(layers), rank, inputs, **shape),
            torch.zeros(slots, len(layers), rank, outputs, **shape),
        )


def _fill(
    groups: Mapping[str, tuple[Tensor, Tensor]],
    placed: Sequence[tuple[_Place, LowRankPair]],
    factors: Mapping[str, Tensor],
) -> None:
    """Rounded once, after scaling. Few calls for all matrices, because the thread that launches steps waits for the interpreter."""
    scaled = torch._foreach_mul([factors[pair.b].float() for _, pair in placed], [pair.scale for _, pair in placed])
    targets: list[Tensor] = []
    for place, pair in placed:
        a_PRE, b_PRO = groups[place.group]
        targets += [a_PRE[place.part, : pair.rank], b_PRO[place.part, : pair.rank, place.columns]]
    sources = [part for (_, pair), b_OR in zip(placed, scaled, strict=True) for part in (factors[pair.a], b_OR.t())]
    torch._foreach_copy_(targets, sources)


def _layer(pair: LowRankPair) -> str:
    return pair.target.removesuffix(".weight")


def _sizes(layer: Any) -> tuple[int, int]:
    """In and out. A `Conv1D` stores its matrix as (in, out)."""
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)
