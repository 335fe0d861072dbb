"""Packs many tensors into one byte buffer and unpacks them. Both ends know names, dtypes and shapes, so only bytes are sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from rollbook.contracts.weights import DTYPE_NAMES, WeightsError, weights_digest

ALIGNMENT = 64
"""Alignment of every tensor in the buffer: views of any dtype are then aligned, and copies use the fast paths."""

NAMES: dict[torch.dtype, str] = {getattr(torch, name): spelled for name, spelled in DTYPE_NAMES.items()}
DTYPES = {name: dtype for dtype, name in NAMES.items()}

TensorHeader = tuple[str, str, tuple[int, ...]]
"""Name, dtype as safetensors spells it, shape."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """The byte range of one tensor in the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def layout(headers: Sequence[TensorHeader], *, alignment: int = ALIGNMENT) -> tuple[list[PackedTensor], int]:
    """The byte range of each tensor, and the total size. Raises `WeightsError` for an unknown dtype."""
    ranges: list[PackedTensor] = []
    start = 0
    for name, dtype, shape in headers:
        if dtype not in DTYPES:
            raise WeightsError(f"tensor {name} has dtype {dtype}; supported are {', '.join(DTYPES)}")
        size = prod(shape) * DTYPES[dtype].itemsize
        ranges.append(PackedTensor(name, dtype, shape, start, start + size))
        start += -(-size // alignment) * alignment
    return ranges, start


def headers_of(weights: Mapping[str, Tensor]) -> list[TensorHeader]:
    return [(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in weights.items()]


@dataclass(frozen=True, slots=True)
class _CopiedWhenRead:
    """A tensor on any device as plain bytes in main memory, for a digest; satisfies `RawTensor`.

    Each reading of `data` is a copy, so that a digest never has all tensors of a GPU in main memory. Copies of a GPU are in pinned
    memory, which is several times faster; torch keeps it for the next copy of that size.
    """

    name: str
    tensor: Tensor

    @property
    def dtype(self) -> str:
        return NAMES[self.tensor.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def data(self) -> memoryview:
        tensor = self.tensor.detach()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        host.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        data: memoryview = host.reshape(-1).view(torch.uint8).numpy().data
        return data


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """The digest of tensors on any device, read on the current stream. Few of them are in main memory at a time."""
    return weights_digest(_CopiedWhenRead(name, tensor) for name, tensor in tensors.items())


def header_fields(headers: Sequence[TensorHeader]) -> dict[str, Any]:
    """The headers as fields of an `UpdateInfo`."""
    return {
        "names": [name for name, _, _ in headers],
        "dtype_names": [dtype for _, dtype, _ in headers],
        "shapes": [list(shape) for _, _, shape in headers],
    }


def pack(weights: Mapping[str, Tensor], *, device: str = "cpu") -> Tensor:
    """One uint8 tensor with the bytes of all."""
    ranges, size = layout(headers_of(weights))
    packed = torch.zeros(size, dtype=torch.uint8, device=device)
    for part, tensor in zip(ranges, weights.values(), strict=True):
        packed[part.start : part.end].copy_(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8), non_blocking=packed.is_cuda
        )
    return packed


class PackedWeights(dict[str, Tensor]):
    """Copies of weights as views into one block. Nothing changes them, so other processes may map the block."""

    def __init__(self, weights: Mapping[str, Tensor], *, device: str) -> None:
        self.block = pack(weights, device=device)
        super().__init__(unpack_views(self.block, headers_of(weights)))


def unpack_views(packed: Tensor, headers: Sequence[TensorHeader], *, alignment: int = ALIGNMENT) -> dict[str, Tensor]:
    """Tensors that share the memory of the buffer."""
    ranges, size = layout(headers, alignment=alignment)
    if packed.numel() != size:
        raise WeightsError(f"received {packed.numel()} bytes for tensors of {size} bytes")
    return {part.name: packed[part.start : part.end].view(DTYPES[part.dtype]).view(part.shape) for part in ranges}
