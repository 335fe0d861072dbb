"""The state of each row in the cache classes of transformers, for models whose layers keep more than the keys of all positions.

A layer may keep keys and values of all positions, those of the last window, or a recurrent state. Between steps each row is a cache
of one row, or a row of the merged cache that the last decode step used. Rows of a merged cache end at the same index: shorter ones
are padded on the left and masked, as in `generate`, so windows end at the right place, and recurrent states need no alignment. The
merged cache is built again only if other rows decode.
"""

# N rows of this forward, H heads, T positions, D head size

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

from rollbook.inference.engines.embedded.routes import RouteShape

BY_POSITION = ("keys", "values", "indexer_keys")
"""Tensors (N, …, T, D) that end with the newest position."""
BY_ROW = ("conv_states", "recurrent_states")
"""Dictionaries of tensors (N, …)."""
MERGEABLE = frozenset(
    (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicIndexedLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
)
"""Layers of transformers that hold nothing but these tensors. Rows with other layers are decoded one by one. By name: older
versions do not have all of them."""
NO_ROW = -1


@dataclass(frozen=True, slots=True)
class RowState:
    """The cache of one row after `length` tokens."""

    layers: Sequence[Any]
    length: int


class RouteLayer:
    """The chosen experts of the positions of some rows, in the form of a layer of keys: (N, 1, T, L x K). The model does not see
    it."""

    def __init__(self, shape: RouteShape) -> None:
        self.shape = shape
        self.keys: Tensor | None = None

    def append(self, routes_NCLK: Tensor) -> None:
        new = routes_NCLK.flatten(2).unsqueeze(1)
        self.keys = new if self.keys is None else torch.cat([self.keys, new], dim=-2)

    def crop(self, change: int) -> None:
        """`change`: minus the number of positions that are dropped."""
        assert self.keys is not None
        self.keys = self.keys[..., :change, :] if change else self.keys

    def read(self, length: int) -> NDArray[Any]:
        """The first positions of a single row."""
        assert self.keys is not None
        return self.shape.read(self.keys[0, 0, :length])


def new_layers(config: Any) -> list[Any]:
    """Empty layers, as the model needs them."""
    return list(DynamicCache(config=config).layers)


def cache_of(layers: Sequence[Any]) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [layer for layer in layers if not isinstance(layer, RouteLayer)]
    # Without a class to replicate, transformers adds no layers of its own.
    cache.layer_class_to_replicate = None
    return cache


class RowStates:
    """Has the interface of `SlotCache`; rows have no common length, and memory is allocated when a row is computed."""

    def __init__(self, config: Any, *, is_mergeable: bool = True, routes: RouteShape | None = None) -> None:
        """`routes`: set if the chosen experts are kept, too. They are then the last layer of each row."""
        self._config = config
        self._route_shape = routes
        layers = new_layers(config)
        self.is_mergeable = is_mergeable and all(map(_is_mergeable, layers))
        kinds = {type(layer).__name__ for layer in layers}
        self.is_croppable = kinds <= {DynamicLayer.__name__, "DynamicIndexedLayer"}
        """Whether a prefix of a row can be used without computing it again: not of windows and recurrent states."""
        self.rows = 0
        self.length = 0
        self.generation = 0
        self._alone: dict[int, RowState] = {}
        self._merged: list[Any] = []
        self._merged_rows: list[int] = []
        self._merged_lengths: list[int] = []

    @property
    def scratch_row(self) -> int:
        return self.rows

    def resize(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length

    def fresh(self) -> list[Any]:
        layers = new_layers(self._config)
        return layers if self._route_shape is None else [*layers, RouteLayer(self._route_shape)]

    def put(self, rows: Sequence[int], layers: Sequence[Any], length: int) -> None:
        """Layers of these rows, each of the same length."""
        for index, row in enumerate(rows):
            parts = layers if len(rows) == 1 else [_row(layer, index, length, is_copy=True) for layer in layers]
            self._alone[row] = RowState(parts, length)

    def joined(self, rows: Sequence[int]) -> list[Any]:
        """One cache of rows of equal length, to be continued by `put`."""
        states = [self.take(row) for row in rows]
        if len(states) == 1:
            return list(states[0].layers)
        lengths = [state.length for state in states]
        return [_merge(parts, lengths) for parts in zip(*(state.layers for state in states), strict=True)]

    def take(self, row: int) -> RowState:
        """The state of a row, to be continued: its tensors are not shared with anything that is read later."""
        return self._alone.pop(row) if row in self._alone else self._copy(row)

    def merged(self, rows: Sequence[int]) -> tuple[list[Any], list[int]]:
        """One cache of these rows, and their lengths. Rows that decode no more are forgotten."""
        if self._merged_rows != list(rows) or not self._alone.keys().isdisjoint(rows):
            states = [self._alone[row] if row in self._alone else self._view(row) for row in rows]
            layers = zip(*(state.layers for state in states), strict=True)
            self._merged_lengths = [state.length for state in states]
            # Layer by layer, so that old layers are freed early.
            self._merged = [_merge(parts, self._merged_lengths) for parts in layers]
            self._merged_rows = list(rows)
            for row in rows:
                self._alone.pop(row, None)
        return self._merged, self._merged_lengths

    def advanced(self) -> None:
        """Each row of the merged cache has one more token."""
        self._merged_lengths = [length + 1 for length in self._merged_lengths]

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], *, length: int) -> None:
        """`length` is that of the longest row; each row is copied as long as it is."""
        for source, target in zip(sources, targets, strict=True):
            self._alone[target] = self._copy(source)

    def copy_out(self, row: int, length: int) -> RowState | None:
        """A copy of a row; None if its state is not that after `length` tokens."""
        if not self._is_known(row) or (state := self._copy(row)).length < length:
            return None
        if state.length == length:
            return state
        return _cropped(state, length) if self.is_croppable else None

    def copy_in(self, row: int, copied: RowState, length: int) -> None:
        whole = RowState([_row(layer, 0, copied.length, is_copy=True) for layer in copied.layers], copied.length)
        self._alone[row] = whole if length == copied.length else _cropped(whole, length)

    def read_routes(self, row: int, length: int) -> NDArray[Any] | None:
        if self._route_shape is None or not self._is_known(row):
            return None
        last = self._view(row).layers[-1]
        assert isinstance(last, RouteLayer)
        return last.read(length)

    def release(self, row: int) -> None:
        self._alone.pop(row, None)
        # Its part of the merged cache is freed with the next merge.
        self._merged_rows = [NO_ROW if merged == row else merged for merged in self._merged_rows]

    def zero_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.release(row)

    def before_decode(self, rows: Sequence[int]) -> None:
        """Nothing to do: the step merges its rows."""

    def _copy(self, row: int) -> RowState:
        return self._view(row, is_copy=True)

    def _view(self, row: int, *, is_copy: bool = False) -> RowState:
        layers, index, length = self._joint(row)
        return RowState([_row(layer, index, length, is_copy=is_copy) for layer in layers], length)

    def _is_known(self, row: int) -> bool:
        return row in self._alone or row in self._merged_rows

    def _joint(self, row: int) -> tuple[Sequence[Any], int, int]:
        """The layers that hold a row, its index in them, and its length."""
        if row in self._alone:
            return self._alone[row].layers, 0, self._alone[row].length
        index = self._merged_rows.index(row)
        return self._merged, index, self._merged_lengths[index]


def _is_mergeable(layer: Any) -> bool:
    if isinstance(layer, RouteLayer):
        return True
    states = [getattr(layer, name, {}) for name in BY_ROW]
    return (
        type(layer).__module__ == cache_utils.__name__
        and type(layer).__name__ in MERGEABLE
        and all(isinstance(state, dict) for state in states)
    )


def _row(layer: Any, index: int, length: int, *, is_copy: bool) -> Any:
    """One row of a layer. A view may be merged only: layers write recurrent states in place."""
    if not _is_mergeable(layer):
        return copy.deepcopy(layer)
    single = copy.copy(layer)
    for name in BY_POSITION:
        tensor: Tensor | None = getattr(layer, name, None)
        if tensor is not None and tensor.numel():
            held = tensor.shape[-2]
            own = tensor[index : index + 1, ..., held - min(length, held) :, :]
            setattr(single, name, own.clone() if is_copy else own)
    for name, values in vars(layer).items():
        if isinstance(values, dict):
            setattr(single, name, dict(values))
    for name in BY_ROW:
        for key, state in getattr(single, name, {}).items():
            if state is not None:
                getattr(single, name)[key] = state[index : index + 1].clone() if is_copy else state[index : index + 1]
    if hasattr(layer, "cumulative_length"):
        single.cumulative_length = length
    return single


def _merge(parts: Sequence[Any], lengths: Sequence[int]) -> Any:
    merged = copy.copy(parts[0])
    for name in BY_POSITION:
        tensors = [tensor for part in parts if (tensor := getattr(part, name, None)) is not None]
        if tensors:
            longest = max(tensor.shape[-2] for tensor in tensors)
            # Zeros: a masked position contributes 0 x value.
            aligned = [pad(tensor, (0, 0, longest - tensor.shape[-2], 0)) for tensor in tensors]
            setattr(merged, name, torch.cat(aligned))
    for name in BY_ROW:
        first = getattr(merged, name, None)
        if first is not None:
            states = {key: [getattr(part, name)[key] for part in parts] for key in first}
            setattr(merged, name, {key: None if of[0] is None else torch.cat(of) for key, of in states.items()})
    if hasattr(merged, "cumulative_length"):
        merged.cumulative_length = max(lengths)
    return merged


def _cropped(state: RowState, length: int) -> RowState:
    """The first `length` positions of a copy whose layers keep all of them."""
    for layer in state.layers:
        layer.crop(length - state.length)
    return RowState(state.layers, length)


def bytes_of_layers(layers: Sequence[Any], *, max_length: int) -> tuple[int, int]:
    """Memory of one row: bytes for each position, and bytes that do not depend on its length. The layers hold one token."""
    per_token = fixed = 0
    for layer in layers:
        by_position = sum(_num_bytes(getattr(layer, name, None)) for name in BY_POSITION)
        window = getattr(layer, "sliding_window", None)
        if window is not None and window < max_length:
            fixed += by_position * window
        else:
            per_token += by_position
        states = [
            state for name in BY_ROW if isinstance(held := getattr(layer, name, {}), dict) for state in held.values()
        ]
        fixed += sum(map(_num_bytes, states))
        if not _is_mergeable(layer):
            # Its other tensors are not known: as much again.
            per_token += by_position
    return per_token, fixed


def _num_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
