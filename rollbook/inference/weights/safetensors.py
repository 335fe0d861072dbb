"""Reads a safetensors file as plain bytes: enough to check its digest, with no tensor library.

The layout: eight bytes little-endian header length, a JSON header of name to dtype, shape and byte range, then the data.
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollbook.contracts.policy import Publication
from rollbook.contracts.weights import weights_digest
from rollbook.inference.engine import WeightsError

MAX_HEADER_BYTES = 100_000_000
"""As in the format's reference reader: a longer header is not a header."""


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
    """Every tensor of the file, by name. The file may be replaced meanwhile: what was opened stays whole."""
    try:
        with path.open("rb") as file:
            # Copy on write: a tensor library wants writable memory, and nobody writes.
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except (OSError, ValueError) as error:
        raise WeightsError(f"weights at {path} cannot be read: {error}") from error
    try:
        length = int.from_bytes(view[:8], "little")
        if len(view) < 8 or length > min(MAX_HEADER_BYTES, len(view) - 8):
            raise ValueError(f"a header of {length} bytes does not fit a file of {len(view)}")
        raw = msgspec.json.decode(view[8 : 8 + length], type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items() if name != "__metadata__"
        }
        body = view[8 + length :]
        return {name: _tensor(name, entry, body) for name, entry in entries.items()}
    except (ValueError, msgspec.MsgspecError) as error:
        raise WeightsError(f"weights at {path} are not a whole safetensors file: {error}") from error


def read_published_weights(path: Path, publication: Publication) -> Mapping[str, FileTensor]:
    """The tensors of a publication, or `WeightsError` when the bytes are not those that were published."""
    tensors = read_weights(path)
    digest = weights_digest(tensors.values())
    if digest != publication.digest:
        raise WeightsError(
            f"weights at {path} have digest {digest}, but publication {publication.id} (step {publication.step}) was "
            f"announced with {publication.digest}; nothing was loaded"
        )
    return tensors


def _tensor(name: str, entry: _Entry, body: memoryview) -> FileTensor:
    start, end = entry.data_offsets
    if not 0 <= start <= end <= len(body):
        raise ValueError(f"tensor {name} claims bytes {start} to {end} of {len(body)}")
    return FileTensor(name=name, dtype=entry.dtype, shape=tuple(entry.shape), data=body[start:end])


def read_weight_directory(directory: Path) -> Mapping[str, FileTensor]:
    """Every tensor of a Hugging Face directory, over all its safetensors files, or of one such file."""
    if directory.is_file():
        return read_weights(directory)
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not files:
        raise WeightsError(f"{directory} holds no safetensors file")
    tensors: dict[str, FileTensor] = {}
    for file in files:
        tensors.update(read_weights(file))
    return tensors
