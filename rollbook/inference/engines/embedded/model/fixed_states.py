"""Row states at fixed addresses, so that a decode step can be captured (decision 0054).

Row r is line r of buffers that move only when they grow. Keys of all positions are at the index of their position, as in slots.
Keys of a window end at the last index of their buffer, and move by one in each step. Recurrent states are updated in place. So what
a module computes on the host from the lengths of its cache is the same in each step; what differs by row is in the positions and in
the mask. The mask has a column for each position, and then a column for each index of the widest window.
"""

# S lines, N lines of this step, T positions, D head size

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from rollbook.inference.engines.embedded.model.row_states import BY_POSITION, BY_ROW, RouteLayer, RowState, RowStates
from rollbook.inference.engines.embedded.routes import RouteShape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """What the layers of a step share."""

    positions_N: Tensor
    length: int
    """Positions that attention reads in layers without a window."""
    widest: int
    """Columns of the mask for windows; 0 without windows."""


class FixedStates(RowStates):
    """A row is alone after its prefill, as in `RowStates`. `before_decode` writes it to its line."""

    def __init__(self, config: Any, *, template: Sequence[Any], routes: RouteShape | None = None) -> None:
        """`template`: the layers of a row of one token."""
        super().__init__(config, routes=routes)
        self._template = template
        self._buffers: list[dict[Any, Tensor]] = []
        """Of each layer, by the name of a tensor, or by the name and key of a state."""
        self._lengths: dict[int, int] = {}
        """Tokens of each row that is in its line."""
        self._windows = [_window(layer) for layer in template]

    def resize(self, rows: int, length: int) -> None:
        if self._buffers and (rows, length) == (self.rows, self.length):
            return
        # If an allocation fails, the layers differ in size: the next call must allocate all of them again.
        self.rows = self.length = 0
        for index, layer in enumerate(self._template):
            old = self._buffers[index] if index < len(self._buffers) else {}
            self._buffers[index : index + 1] = [self._allocated(layer, self._windows[index], rows, length, old)]
            del old
        self.rows, self.length = rows, length
        self.generation += 1

    def before_decode(self, rows: Sequence[int]) -> None:
        for row in rows:
            if row in self._alone:
                state = self._alone.pop(row)
                self._lengths[row] = state.length
                self._write(row, state)
            self._lengths[row] += 1

    def layers(self, positions_N: Tensor, length: int) -> list[Any]:
        """The cache of one token in each of the first N rows. `length`: more than each position."""
        span = _Span(positions_N=positions_N, length=length, widest=self._widest(length))
        count = len(positions_N)
        return [
            _fixed(layer, {name: tensor[:count] for name, tensor in held.items()}, window, span)
            for layer, held, window in zip(self._template, self._buffers, self._windows, strict=True)
        ]

    def mask(self, positions_N: Tensor, length: int) -> Tensor | None:
        """None if no layer has keys."""
        if not any(name in held for held in self._buffers for name in BY_POSITION):
            return None
        at_N1, device = positions_N[:, None], positions_N.device
        mask_NT = torch.arange(length, device=device) <= at_N1
        if widest := self._widest(length):
            in_window_NT = torch.arange(widest, device=device) >= widest - 1 - at_N1
            mask_NT = torch.cat([mask_NT, in_window_NT], dim=1)
        return mask_NT.long()

    def release(self, row: int) -> None:
        super().release(row)
        self._lengths.pop(row, None)

    def zero_rows(self, rows: Sequence[int]) -> None:
        super().zero_rows(rows)
        for tensor in (tensor for held in self._buffers for tensor in held.values()):
            for row in rows:
                tensor[row] = 0

    def _is_known(self, row: int) -> bool:
        return row in self._alone or row in self._lengths

    def _joint(self, row: int) -> tuple[Sequence[Any], int, int]:
        if row in self._alone:
            return super()._joint(row)
        length = self._lengths[row]
        return [self._in_line(index, row, length) for index in range(len(self._template))], 0, length

    def _widest(self, length: int) -> int:
        return max((min(window, length) for window in self._windows if window), default=0)

    def _allocated(self, layer: Any, window: int, rows: int, length: int, old: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Zeros, because a masked position contributes 0 x value, with what the present lines hold."""
        held: dict[Any, Tensor] = {}
        for name in BY_POSITION:
            like = getattr(layer, name, None)
            if like is not None and like.numel():
                width = min(window, length) if window else length
                held[name] = new = like.new_zeros((rows, *like.shape[1:-2], width, like.shape[-1]))
                if name in old:
                    kept_rows, kept = min(rows, len(old[name])), min(width, old[name].shape[-2])
                    part = slice(-kept, None) if window else slice(0, kept)
                    new[:kept_rows, ..., part, :] = old[name][:kept_rows, ..., part, :]
        for name in BY_ROW:
            for key, like in getattr(layer, name, {}).items():
                if like is not None:
                    held[name, key] = new = like.new_zeros((rows, *like.shape[1:]))
                    if (name, key) in old:
                        kept_rows = min(rows, len(old[name, key]))
                        new[:kept_rows] = old[name, key][:kept_rows]
        return held

    def _write(self, row: int, state: RowState) -> None:
        for layer, held, window in zip(state.layers, self._buffers, self._windows, strict=True):
            for name, buffer in held.items():
                if not isinstance(name, str):
                    buffer[row] = getattr(layer, name[0])[name[1]][0]
                    continue
                tensor = getattr(layer, name)[0]
                count = min(tensor.shape[-2], buffer.shape[-2])
                part = slice(buffer.shape[-2] - count, None) if window else slice(0, count)
                buffer[row, ..., part, :] = tensor[..., tensor.shape[-2] - count :, :]

    def _in_line(self, index: int, row: int, length: int) -> Any:
        """A layer of one row, as transformers would have it; its tensors are views."""
        layer, window = copy.copy(self._template[index]), self._windows[index]
        for name in BY_ROW:
            if isinstance(getattr(layer, name, None), dict):
                setattr(layer, name, dict(getattr(layer, name)))
        for name, buffer in self._buffers[index].items():
            line = buffer[row : row + 1]
            if not isinstance(name, str):
                getattr(layer, name[0])[name[1]] = line
            elif window:
                # A window of W tokens keeps W - 1 between steps.
                kept = min(length, window - 1)
                setattr(layer, name, line[..., line.shape[-2] - kept :, :])
            else:
                setattr(layer, name, line[..., :length, :])
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
        return layer


def why_not_fixed(layers: Sequence[Any]) -> str | None:
    """Of the layers of a row of one token."""
    narrow = [window for layer in layers if (window := _window(layer)) == 1]
    return "its windows have one token" if narrow else None


def _window(layer: Any) -> int:
    """0: none."""
    return int(getattr(layer, "sliding_window", None) or 0)


def _fixed(layer: Any, held: dict[Any, Tensor], window: int, span: _Span) -> Any:
    if isinstance(layer, RouteLayer):
        return _FixedRoutes(layer, held, span)
    states = {name: dict(getattr(layer, name)) for name in BY_ROW if hasattr(layer, name)}
    for name, tensor in held.items():
        if not isinstance(name, str):
            states[name[0]][name[1]] = tensor
    has_keys, has_states = isinstance(layer, CacheLayerMixin), isinstance(layer, LinearAttentionLayer)
    if not has_states:
        return _FixedLayer(layer, held, window, span)
    fixed = _FixedHybridLayer(layer, held, window, span) if has_keys else copy.copy(layer)
    fixed.__dict__.update(states)
    return fixed


class _FixedLayer(CacheLayerMixin):
    is_compileable = True
    """Whether transformers makes its masks without reading numbers of the device."""

    def __init__(self, layer: Any, held: dict[Any, Tensor], window: int, span: _Span) -> None:
        super().__init__()
        self.is_sliding = layer.is_sliding
        self.is_initialized = True
        self._held, self._span = held, span
        self._width = min(window, span.length) if window else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("the buffers are allocated before the step")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.keys = _written(self._held["keys"], key_states, self._width, self._span)
        self.values = _written(self._held["values"], value_states, self._width, self._span)
        return self.keys, self.values

    def update_indexer(self, keys_NCD: Tensor) -> Tensor:
        return _written(self._held["indexer_keys"], keys_NCD, self._width, self._span)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if not self._width:
            return self._span.length, 0
        return self._width, self._span.length + self._span.widest - self._width

    def get_seq_length(self) -> int:
        """Tokens before this one, by the columns of the mask."""
        return self._span.length + (self._span.widest if self._width else 0) - 1

    def get_max_length(self) -> int:
        return -1


class _FixedHybridLayer(_FixedLayer, LinearAttentionLayer):
    """A recurrent state, and keys."""

    is_compileable = True

    def __init__(self, layer: Any, held: dict[Any, Tensor], window: int, span: _Span) -> None:
        super().__init__(layer, held, window, span)
        self.__dict__.update({name: value for name, value in vars(layer).items() if name not in vars(self)})


class _FixedRoutes(RouteLayer):
    """The chosen experts of this step, written to their position."""

    def __init__(self, layer: RouteLayer, held: dict[Any, Tensor], span: _Span) -> None:
        super().__init__(layer.shape)
        self._held, self._span = held, span

    def append(self, routes_NCLK: Tensor) -> None:
        _written(self._held["keys"], routes_NCLK.flatten(2).unsqueeze(1), 0, self._span)


def _written(buffer: Tensor, new: Tensor, width: int, span: _Span) -> Tensor:
    """What attention reads, (N, …, T, D), with one more token in each line. `width`: of a window."""
    if width:
        held = buffer[..., buffer.shape[-2] - width :, :]
        moved = torch.cat([held[..., 1:, :], new], dim=-2)
        held.copy_(moved)
        return moved
    lines_N = torch.arange(len(buffer), device=buffer.device)
    buffer.movedim(-2, 1)[lines_N, span.positions_N] = new.squeeze(-2)
    return buffer[..., : span.length, :]
