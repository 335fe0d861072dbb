"""Writes tensors of main memory as a safetensors file, each straight from where it lies.

The library gathers all bytes in memory first: for weights that are published every step, that and the copies cost more than the
write itself.
"""

import json
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from rollbook.inference.weights.transports.packing import NAMES

HEADER_ALIGNMENT = 8
"""The data behind the header begins at a multiple of this, so that views into a mapped file are aligned."""


def write_file(tensors: Mapping[str, Tensor], path: Path, *, metadata: Mapping[str, str]) -> None:
    """`tensors` are contiguous and in main memory."""
    # Larger items first, as the library does: then every tensor lies at a multiple of its own item size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % HEADER_ALIGNMENT)
    with FileIO(path, "wb") as file:
        _write_all(file, memoryview(len(encoded).to_bytes(8, "little") + encoded))
        for _, tensor in ordered:
            if tensor.numel():
                _write_all(file, tensor.reshape(-1).view(torch.uint8).numpy().data)


def _write_all(file: FileIO, data: memoryview) -> None:
    """One call may take less than all of it."""
    while data:
        data = data[file.write(data) :]
