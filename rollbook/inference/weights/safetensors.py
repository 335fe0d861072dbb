"""Reads safetensors files as plain bytes and checks digests, without a tensor library.

The layout: eight bytes little-endian header length, a JSON header of name to dtype, shape and byte range, then the data.
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import msgspec

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.policy import Publication
from rollbook.contracts.weights import RawTensor, TensorSource, WeightsError, weights_digest

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's reference reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """One tensor of a file. `data` is a view into the mapped file and keeps it open."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_weights(path: Path) -> Mapping[str, FileTensor]:
    """Every tensor of the file, by name. They stay valid if the file is replaced."""
    try:
        with path.open("rb") as file:
            # Copy on write, because tensor libraries want writable memory.
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except (OSError, ValueError) as error:
        raise WeightsError(f"weights at {path} cannot be read: {error}") from error
    try:
        length = int.from_bytes(view[:8], "little")
        if len(view) < 8 or length > min(MAX_HEADER_BYTES, len(view) - 8):
            raise ValueError(f"a header of {length} bytes does not fit a file of {len(view)}")
        raw = json_decoder(dict[str, msgspec.Raw]).decode(view[8 : 8 + length])
        entries = {name: json_decoder(_Entry).decode(entry) for name, entry in raw.items() if name != "__metadata__"}
        body = view[8 + length :]
        return {name: _tensor(name, entry, body) for name, entry in entries.items()}
    except (ValueError, msgspec.MsgspecError) as error:
        raise WeightsError(f"weights at {path} are not a whole safetensors file: {error}") from error


def _tensor(name: str, entry: _Entry, body: memoryview) -> FileTensor:
    start, end = entry.data_offsets
    if not 0 <= start <= end <= len(body):
        raise ValueError(f"tensor {name} claims bytes {start} to {end} of {len(body)}")
    return FileTensor(name=name, dtype=entry.dtype, shape=tuple(entry.shape), data=body[start:end])


def read_weight_directory(directory: Path) -> Mapping[str, FileTensor]:
    """Every tensor of a Hugging Face directory, from all its safetensors files, or of a single file."""
    try:
        if directory.is_file():
            return read_weights(directory)
        files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    except OSError as error:
        raise WeightsError(f"weights at {directory} cannot be read: {error.strerror or error}") from error
    if not files:
        raise WeightsError(f"{directory} holds no safetensors file")
    tensors: dict[str, FileTensor] = {}
    for file in files:
        tensors.update(read_weights(file))
    return tensors


def read_published_weights(path: Path, publication: Publication) -> Mapping[str, FileTensor]:
    """The tensors of a publication. Raises `WeightsError` if the bytes are not the published ones."""
    tensors = read_weights(path)
    _require_digest(f"the weights at {path}", tensors, publication)
    return tensors


def is_raw(tensor: TensorSource) -> TypeGuard[RawTensor]:
    """Whether it is plain bytes in host memory, with name, dtype and shape."""
    return not hasattr(tensor, "data_ptr")


def require_published(publication: Publication, tensors: Mapping[str, TensorSource]) -> None:
    """Raises `WeightsError` unless the bytes are the published ones. Tensors on a device are not checked."""
    raw = {name: tensor for name, tensor in tensors.items() if is_raw(tensor)}
    if len(raw) < len(tensors):
        return
    misnamed = [name for name, tensor in raw.items() if tensor.name != name]
    if misnamed:
        raise WeightsError(f"the tensor at key {misnamed[0]} has another name; nothing was loaded")
    _require_digest("the tensors", raw, publication)


def _require_digest(source: str, tensors: Mapping[str, RawTensor], publication: Publication) -> None:
    digest = weights_digest(tensors.values())
    if digest != publication.digest:
        raise WeightsError(
            f"{source} have digest {digest}, but publication {publication.id} (step {publication.step}) was announced with "
            f"{publication.digest}; nothing was loaded"
        )
