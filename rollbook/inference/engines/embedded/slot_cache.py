"""The keys and values of running requests: one slot for each row, all slots equally long, rows at different positions.

The tensors grow and shrink with use, within a memory budget. There is one extra slot as scratch space, into which padding of
bucketed forwards is written. Recurrent layers have states in place of keys, in a line of the same number. `generation` changes
whenever the memory moves, so that captured graphs are captured again.
"""

# L layers, S slots, H key/value heads, T positions, D head size, N rows of this forward

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from rollbook.inference.engines.embedded.routes import RouteShape


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of the keys and values of one position in one layer."""

    heads: int
    key_size: int
    value_size: int

    @property
    def elements(self) -> int:
        return self.heads * (self.key_size + self.value_size)


def host_copy(host: Tensor, device: torch.device) -> Tensor:
    """A copy in host memory that does not change while an asynchronous transfer reads it."""
    return host.pin_memory() if device.type == "cuda" else host.clone()


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Transfers to a GPU are asynchronous: a wait here would stall the rounds that were launched ahead."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host if device.type == "cpu" else host.to(device)


class RowMemory(Protocol):
    """What rows keep between forwards: `SlotCache`, or `RowStates` for models with other layers than full attention."""

    rows: int
    length: int

    @property
    def is_croppable(self) -> bool:
        """Whether the first positions of a copied row can be used without the rest."""

    @property
    def scratch_row(self) -> int: ...

    generation: int
    """Changes when the memory moves; then captured graphs are void."""

    def resize(self, rows: int, length: int) -> None: ...

    def before_decode(self, rows: Sequence[int]) -> None:
        """The next decode step continues these rows."""

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], *, length: int) -> None:
        """Copy the first `length` positions from row to row. No target may be a source."""

    def copy_out(self, row: int, length: int) -> Any | None:
        """A copy of the first `length` positions of a row; None if the row cannot give it."""

    def copy_in(self, row: int, copied: Any, length: int) -> None:
        """Write the first `length` positions of a copy by `copy_out` into a row."""

    def read_routes(self, row: int, length: int) -> NDArray[Any] | None:
        """The experts chosen in the first `length` positions of a row; None if they are not recorded."""

    def release(self, row: int) -> None:
        """The row has no owner any more."""

    def zero_rows(self, rows: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of what a recurrent layer keeps of a row: the inputs of its last tokens, and its memory, in float32."""

    inputs: tuple[int, ...]
    memory: tuple[int, ...]

    def num_bytes(self, dtype: torch.dtype) -> int:
        return math.prod(self.inputs) * dtype.itemsize + math.prod(self.memory) * torch.float32.itemsize


class SlotStates:
    """The states of the recurrent layers, a line for each slot. A decode step computes the first lines, and changes only those of
    rows that decode: other rows may be in prefill."""

    def __init__(self, shapes: Sequence[StateShape], *, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = list(shapes)
        self._dtype, self._device = dtype, device
        self.layers: list[tuple[Tensor, Tensor]] = []
        """Inputs (S + 1, ...) and memory (S + 1, ...) of each layer."""
        self.is_decoding_S = torch.zeros(0, dtype=torch.bool, device=device)

    @property
    def lines(self) -> list[Tensor]:
        return [tensor for pair in self.layers for tensor in pair]

    def resize(self, rows: int, *, keep_rows: int) -> None:
        self.is_decoding_S = torch.zeros(rows + 1, dtype=torch.bool, device=self._device)
        for index, shape in enumerate(self._shapes):
            old = self.layers[index] if index < len(self.layers) else None
            pair = (
                torch.zeros((rows + 1, *shape.inputs), dtype=self._dtype, device=self._device),
                torch.zeros((rows + 1, *shape.memory), dtype=torch.float32, device=self._device),
            )
            if old is not None:
                for new, previous in zip(pair, old, strict=True):
                    new[:keep_rows] = previous[:keep_rows]
            self.layers[index : index + 1] = [pair]
            del old

    def before_decode(self, rows: Sequence[int]) -> None:
        is_decoding_S = torch.zeros(len(self.is_decoding_S), dtype=torch.bool)
        is_decoding_S[list(rows)] = True
        self.is_decoding_S.copy_(host_copy(is_decoding_S, self._device), non_blocking=True)


class SlotCache:
    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        routes: RouteShape | None = None,
        states: Sequence[StateShape] = (),
    ) -> None:
        """`shapes`: of layers with keys. `states`: of recurrent layers. `routes`: set if the chosen experts are kept, too."""
        self._shapes = list(shapes)
        self.states = SlotStates(states, dtype=dtype, device=device)
        self.is_croppable = not states
        self._route_shape = routes
        self.routes: Tensor | None = None
        """Chosen experts, (S + 1, T, L, K)."""
        self._dtype, self._device = dtype, device
        self.rows = 0
        self.length = 0
        self.generation = 0
        self.pairs: list[tuple[Tensor, Tensor]] = []
        """Keys and values of each layer, (S + 1, H, T, D) each."""
        self.joint: list[Tensor] = []
        """The same memory as one tensor (2, S + 1, H, T, D) for each layer; empty if keys and values differ in size."""
        self.resize(0, 0)

    @property
    def scratch_row(self) -> int:
        return self.rows

    @staticmethod
    def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
        return sum(shape.elements for shape in shapes) * dtype.itemsize

    def resize(self, rows: int, length: int) -> None:
        """Change to `rows` slots of `length` positions and keep what fits. Layer by layer, to limit the extra memory."""
        if self.generation and (rows, length) == (self.rows, self.length):
            return
        keep_rows, keep_length = min(rows, self.rows), min(length, self.length)
        # If an allocation fails, the layers differ in size: the next call must allocate all of them again.
        self.rows = self.length = 0
        is_joint = all(shape.key_size == shape.value_size for shape in self._shapes)
        for index, shape in enumerate(self._shapes):
            old = self.pairs[index] if index < len(self.pairs) else None
            # Zeros, not uninitialised memory: a masked position contributes 0 x value, and 0 x NaN is NaN.
            if is_joint:
                joint = self._zeros(2, rows + 1, shape.heads, length, shape.key_size)
                pair = (joint[0], joint[1])
                self.joint[index : index + 1] = [joint]
            else:
                pair = (
                    self._zeros(rows + 1, shape.heads, length, shape.key_size),
                    self._zeros(rows + 1, shape.heads, length, shape.value_size),
                )
            if old is not None:
                for new_SHTD, old_SHTD in zip(pair, old, strict=True):
                    new_SHTD[:keep_rows, :, :keep_length] = old_SHTD[:keep_rows, :, :keep_length]
            self.pairs[index : index + 1] = [pair]
            del old
        if (kept := self._route_shape) is not None:
            routes = torch.zeros((rows + 1, length, kept.layers, kept.choices), dtype=kept.dtype, device=self._device)
            if self.routes is not None:
                routes[:keep_rows, :keep_length] = self.routes[:keep_rows, :keep_length]
            self.routes = routes
        self.states.resize(rows, keep_rows=keep_rows)
        self.rows, self.length = rows, length
        self.generation += 1
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], *, length: int) -> None:
        """Copy the first `length` positions from row to row. No target may be a source."""
        sources_N = to_device(torch.tensor(sources), self._device)
        targets_N = to_device(torch.tensor(targets), self._device)
        for pair in self.pairs:
            for slots_SHTD in pair:
                slots_SHTD[targets_N, :, :length] = slots_SHTD[sources_N, :, :length]
        if self.routes is not None:
            self.routes[targets_N, :length] = self.routes[sources_N, :length]
        for states in self.states.lines:
            states[targets_N] = states[sources_N]

    def copy_out(self, row: int, length: int) -> list[Tensor]:
        """A copy of the first `length` positions of a row: with states, of all of them."""
        others = [states[row].clone() for states in self.states.lines]
        if self.routes is not None:
            others.append(self.routes[row, :length].clone())
        if self.joint:
            return [*(joint[:, row, :, :length].clone() for joint in self.joint), *others]
        return [*(slots_SHTD[row, :, :length].clone() for pair in self.pairs for slots_SHTD in pair), *others]

    def read_routes(self, row: int, length: int) -> NDArray[Any] | None:
        if self.routes is None or self._route_shape is None:
            return None
        return self._route_shape.read(self.routes[row, :length])

    def copy_in(self, row: int, copied: Sequence[Tensor], length: int) -> None:
        """Write the first `length` positions of a copy by `copy_out` into a row."""
        if self.routes is not None:
            *copied, routes = copied
            self.routes[row, :length] = routes[:length]
        if lines := self.states.lines:
            for states, own in zip(lines, copied[-len(lines) :], strict=True):
                states[row] = own
            copied = copied[: -len(lines)]
        if self.joint:
            for joint, layer in zip(self.joint, copied, strict=True):
                joint[:, row, :, :length] = layer[:, :, :length]
            return
        slots = (slots_SHTD for pair in self.pairs for slots_SHTD in pair)
        for slots_SHTD, layer in zip(slots, copied, strict=True):
            slots_SHTD[row, :, :length] = layer[:, :length]

    def before_decode(self, rows: Sequence[int]) -> None:
        if self.states.layers:
            self.states.before_decode(rows)

    def release(self, row: int) -> None:
        """Nothing to do: the next owner overwrites what it reads."""

    def zero_rows(self, rows: Sequence[int]) -> None:
        rows_N = to_device(torch.tensor(rows), self._device)
        for pair in self.pairs:
            for slots_SHTD in pair:
                slots_SHTD[rows_N] = 0
        for states in self.states.lines:
            states[rows_N] = 0

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)
