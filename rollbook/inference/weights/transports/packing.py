"""Many tensors as one run of bytes, and back. Both ends know names, dtypes and shapes, so only bytes travel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rollbook.inference.engine import WeightsError
from rollbook.inference.weights.safetensors import FileTensor

ALIGNMENT = 64
"""Of every tensor in the run: views of any dtype are then aligned, and copies use the fast paths."""

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}

Head = tuple[str, str, tuple[int, ...]]
"""Name, dtype as safetensors spells it, shape."""


@dataclass(frozen=True, slots=True)
class Place:
    head: Head
    start: int
    end: int


def layout(heads: Sequence[Head]) -> tuple[list[Place], int]:
    """Where each tensor lies, and the length of the whole. Raises `WeightsError` for a dtype nobody knows."""
    places: list[Place] = []
    at = 0
    for name, dtype, shape in heads:
        if dtype not in DTYPES:
            raise WeightsError(f"tensor {name} has dtype {dtype}; known are {', '.join(DTYPES)}")
        size = prod(shape) * DTYPES[dtype].itemsize
        places.append(Place((name, dtype, shape), at, at + size))
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return places, at


def heads_of(weights: Mapping[str, Tensor]) -> list[Head]:
    return [(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in weights.items()]


def pack(weights: Mapping[str, Tensor], *, device: str = "cpu") -> Tensor:
    """One uint8 tensor that holds them all."""
    places, size = layout(heads_of(weights))
    packed = torch.zeros(size, dtype=torch.uint8, device=device)
    for place, tensor in zip(places, weights.values(), strict=True):
        packed[place.start : place.end].copy_(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8), non_blocking=packed.is_cuda
        )
    return packed


def unpack_views(packed: Tensor, heads: Sequence[Head]) -> dict[str, Tensor]:
    """Tensors that share the memory of the run."""
    places, size = layout(heads)
    if packed.numel() != size:
        raise WeightsError(f"{packed.numel()} bytes arrived for tensors of {size}")
    return {
        place.head[0]: packed[place.start : place.end].view(DTYPES[place.head[1]]).view(place.head[2])
        for place in places
    }


def unpack_bytes(packed: Tensor, heads: Sequence[Head]) -> dict[str, FileTensor]:
    """The same as plain bytes, which an engine can check against a digest."""
    places, size = layout(heads)
    if packed.numel() != size:
        raise WeightsError(f"{packed.numel()} bytes arrived for tensors of {size}")
    view = packed.numpy().data.cast("B")
    return {
        place.head[0]: FileTensor(
            name=place.head[0], dtype=place.head[1], shape=place.head[2], data=view[place.start : place.end]
        )
        for place in places
    }
