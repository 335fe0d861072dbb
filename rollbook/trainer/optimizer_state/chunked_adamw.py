"""AdamW whose state is not stored as it is computed with: in main memory, or with 8 bits.

The update reads the state of one chunk of the weights into float32 tensors on their device, updates the chunk as torch's fused
AdamW does, and writes the state back. It is elementwise, so the size of a chunk changes no bits.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from rollbook.contracts.errors import RunError

CHUNK = 1 << 22
"""Weights that are updated together: 16 MiB of each average. Much larger than what a transfer costs besides its bytes."""
ALIGNMENT = 64
"""Alignment of each part of a buffer, in numbers: kernels read several at a time."""
AVERAGES = ("exp_avg", "exp_avg_sq")
LANES = 2
"""Chunks in flight: one is transferred while the other is updated."""


@dataclass(frozen=True, slots=True)
class WeightRange:
    """A range of a flattened parameter."""

    parameter: nn.Parameter
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """This range of a tensor with the shape of the parameter."""
        return tensor.view(-1)[self.start : self.stop]

    @property
    def weights(self) -> Tensor:
        return self.of(self.parameter.data)

    @property
    def gradient(self) -> Tensor:
        assert self.parameter.grad is not None
        return self.parameter.grad.reshape(-1)[self.start : self.stop]


class StateStorage(Protocol):
    """How the averages of a parameter are stored: as one tensor each, under their name, or as several."""

    is_remote: bool
    """Transfers take their own time, next to computation on the device."""

    def new(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter before its first update, without its step."""

    def adopted(self, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A saved state in new memory. Raises `RunError` if it was stored in another form."""

    def read(self, held: Mapping[str, Tensor], name: str, piece: WeightRange, into: Tensor) -> None: ...
    def write(self, held: Mapping[str, Tensor], name: str, piece: WeightRange, values: Tensor) -> None: ...


class HostStorage:
    """In main memory, in float32. With a GPU it is pinned, so that the device copies it without the CPU."""

    is_remote = True

    def new(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {name: _pinned(torch.zeros_like(parameter, device="cpu"), parameter) for name in AVERAGES}

    def adopted(self, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        require_names(saved, AVERAGES)
        # A copy: torch.load may return views into a file.
        return {name: _pinned(saved[name].to("cpu", torch.float32, copy=True), parameter) for name in AVERAGES}

    def read(self, held: Mapping[str, Tensor], name: str, piece: WeightRange, into: Tensor) -> None:
        into.copy_(piece.of(held[name]), non_blocking=True)

    def write(self, held: Mapping[str, Tensor], name: str, piece: WeightRange, values: Tensor) -> None:
        piece.of(held[name]).copy_(values, non_blocking=True)


def _pinned(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The tensor, in memory that the parameter's GPU copies by itself. Torch's own pinned memory has the sizes of powers of two."""
    if parameter.is_cuda and tensor.numel() > 0:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.cuda.check_error(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        # Before the memory is freed: another tensor may get it. At the end of the process, CUDA may have ended already.
        weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr()).atexit = False
    return tensor


def require_names(saved: Mapping[str, Tensor], names: Sequence[str]) -> None:
    if not set(names) <= saved.keys():
        raise RunError(
            f"the optimizer state of a weight has {', '.join(sorted(saved))}, and trainer.optimizer_state needs"
            f" {', '.join(names)}: it was saved with another trainer.optimizer_state. Restore that setting"
        )


class ChunkedAdamW(torch.optim.Optimizer):
    """Its groups are those of AdamW. With float32 in main memory, its state dict is that of AdamW too, and has the same bits."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        storage: StateStorage,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__([dict(group) for group in groups], {"lr": lr, "betas": betas, "eps": eps})
        self._storage = storage
        self._chunk = chunk
        device = next(parameter.device for group in self.param_groups for parameter in group["params"])
        has_streams = storage.is_remote and device.type == "cuda"
        self._lanes = [_Lane(device, chunk, has_streams=has_streams) for _ in range(LANES if has_streams else 1)]

    def allocate(self) -> None:
        """Allocate the state of all weights, as an update would."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state:
                    self.state[parameter] = {"step": torch.tensor(0.0), **self._storage.new(parameter)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # torch would convert the state to the dtype of the weights, on their device.
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, saved in state_dict["state"].items():
            held = self._storage.adopted(parameters[number], saved)
            self.state[parameters[number]] = {"step": saved["step"].to("cpu", torch.float32, copy=True), **held}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the trainer has no closure
        self.allocate()
        for lane in self._lanes:
            lane.begin()
        number = 0
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in updated:
                self.state[parameter]["step"] += 1
            for pieces in chunks_of(updated, self._chunk):
                self._update(group, pieces, self._lanes[number % len(self._lanes)])
                number += 1
        for lane in self._lanes:
            lane.end()

    def _update(self, group: Mapping[str, Any], pieces: Sequence[WeightRange], lane: "_Lane") -> None:
        states = [self.state[piece.parameter] for piece in pieces]
        buffers = {name: lane.buffers(name, pieces) for name in AVERAGES}
        with lane.reading():
            for name in AVERAGES:
                for held, piece, buffer in zip(states, pieces, buffers[name], strict=True):
                    self._storage.read(held, name, piece, buffer)
        beta1, beta2 = group["betas"]
        adamw(
            [piece.weights for piece in pieces],
            [piece.gradient for piece in pieces],
            buffers["exp_avg"],
            buffers["exp_avg_sq"],
            [],
            # The number of earlier updates: the function adds one.
            [torch.full((), float(held["step"]) - 1, device=lane.device) for held in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        with lane.writing():
            for name in AVERAGES:
                for held, piece, buffer in zip(states, pieces, buffers[name], strict=True):
                    self._storage.write(held, name, piece, buffer)


def chunks_of(parameters: Sequence[nn.Parameter], size: int) -> Iterator[list[WeightRange]]:
    """Pieces of at most `size` numbers together. Parameters are cut at multiples of it only, so every piece starts at a block of a
    quantised state and at a cache line."""
    chunk: list[WeightRange] = []
    used = 0
    for parameter in parameters:
        for start, stop in pairwise([*range(0, parameter.numel(), size), parameter.numel()]):
            needed = -(-(stop - start) // ALIGNMENT) * ALIGNMENT
            if chunk and used + needed > size:
                yield chunk
                chunk, used = [], 0
            chunk.append(WeightRange(parameter, start, stop))
            used += needed
    if chunk:
        yield chunk


class _Lane:
    """Buffers for the state of one chunk, and the streams that fill and empty them.

    A chunk is read on one stream, updated on the current one, and written on another. Each waits for the stage before it, and the
    first for the chunk that used the buffers before. Without streams everything runs on the current one.
    """

    def __init__(self, device: torch.device, size: int, *, has_streams: bool) -> None:
        self.device = device
        self._size = -(-size // ALIGNMENT) * ALIGNMENT
        self._memory: dict[str, Tensor] = {}
        self._reader, self._writer = (_stream(device) if has_streams else None for _ in range(2))

    def buffers(self, name: str, pieces: Sequence[WeightRange]) -> list[Tensor]:
        found, start = [], 0
        for piece in pieces:
            length = piece.stop - piece.start
            found.append(self._memory[name][start : start + length])
            start += -(-length // ALIGNMENT) * ALIGNMENT
        return found

    def begin(self) -> None:
        self._memory = {name: torch.empty(self._size, device=self.device) for name in AVERAGES}
        if self._writer is not None:
            # Kernels that still run may use this memory.
            self._writer.wait_stream(torch.cuda.current_stream(self.device))

    @contextmanager
    def reading(self) -> Iterator[None]:
        if self._reader is None:
            yield
            return
        self._reader.wait_stream(self._writer)
        with torch.cuda.stream(self._reader):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self._reader)

    @contextmanager
    def writing(self) -> Iterator[None]:
        if self._writer is None:
            yield
            return
        self._writer.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._writer):
            yield

    def end(self) -> None:
        """When it returns, the CPU may read the state."""
        if self._writer is not None:
            self._writer.synchronize()
        self._memory = {}


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
