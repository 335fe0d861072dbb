"""Published weights: their digest, used by publisher and receiver, and low-rank adapters.

Of an adapter only its matrices are published; the base model does not change.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import xxhash

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import PublicationId

PREFIX = "policy-v"
PIECE_BYTES = 4 << 20
"""Hashed at once. Part of what the digest is: another size gives other digests."""
SHARE_BYTES = 32 << 20
"""Hashed by one thread before it takes the next share. Less than that is hashed without threads."""
MAX_HASH_THREADS = 8
BATCH_BYTES = MAX_HASH_THREADS * SHARE_BYTES
DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The name of a dtype in safetensors, by its name in torch."""


class WeightsError(RunError):
    """The weights cannot be loaded: unreadable, damaged, or of another model. Nothing was changed."""


class RawTensor(Protocol):
    """A named tensor as plain bytes in row-major order."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> bytes | memoryview: ...


class DeviceTensor(Protocol):
    """A tensor of the engine's library (a torch tensor), on any device."""

    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...


TensorSource = RawTensor | DeviceTensor
"""One tensor of an update: bytes in host memory with their dtype and shape, or a tensor that the engine can copy."""


def weights_digest(tensors: Iterable[RawTensor]) -> str:
    """Covers names, dtypes (safetensors names such as `F32`, `BF16`), shapes and bytes, independent of the order.

    A fast hash, because every step is digested; it does not protect against forgery. It is the hash of the hashes of pieces, which
    several threads compute while the next tensors are read: new weights are published only after they are digested. The data of a
    tensor is read once, in this thread, and then freed, so it may be a copy that is made when it is read.
    """
    digest = xxhash.xxh3_128()
    before: Callable[[], None] | None = None
    with ThreadPoolExecutor(min(MAX_HASH_THREADS, _num_threads()), thread_name_prefix="digest") as pool:
        for batch in _batches(sorted(tensors, key=lambda t: t.name)):
            hashes = _hashes([piece for _, pieces in batch for piece in pieces], pool)
            if before is not None:
                before()
            before = partial(_add, digest, batch, hashes)
        assert before is not None
        before()
    return digest.hexdigest()


Batch = list[tuple[RawTensor, list[memoryview]]]


def _add(digest: xxhash.xxh3_128, batch: Batch, hashes_of_shares: Iterable[bytes]) -> None:
    hashes = memoryview(b"".join(hashes_of_shares))
    for tensor, pieces in batch:
        digest.update(f"{tensor.name}|{tensor.dtype}|{','.join(map(str, tensor.shape))}|".encode())
        digest.update(hashes[: digest.digest_size * len(pieces)])
        hashes = hashes[digest.digest_size * len(pieces) :]


def _batches(ordered: Iterable[RawTensor]) -> Iterator[Batch]:
    """Tensors with the pieces of their data, as many as are hashed at a time."""
    batch: Batch = []
    num_bytes = 0
    for tensor in ordered:
        pieces = _pieces(tensor.data)
        batch.append((tensor, pieces))
        num_bytes += sum(map(len, pieces))
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    yield batch


def _pieces(data: bytes | memoryview) -> list[memoryview]:
    view = memoryview(data).cast("B")
    return [view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]


def _hashes(pieces: Sequence[memoryview], pool: ThreadPoolExecutor) -> Iterable[bytes]:
    """The hashes of all pieces in order, in parts that threads begin to compute."""
    shares: list[list[memoryview]] = [[]]
    size = 0
    for piece in pieces:
        shares[-1].append(piece)
        size += len(piece)
        if size >= SHARE_BYTES:
            shares.append([])
            size = 0
    return [_hashes_in_turn(pieces)] if len(shares) == 1 else pool.map(_hashes_in_turn, shares)


def _num_threads() -> int:
    """Half of the cores that this process may use: an engine that decodes meanwhile needs one without waiting."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // 2)


def _hashes_in_turn(pieces: Sequence[memoryview]) -> bytes:
    return b"".join(map(xxhash.xxh3_128_digest, pieces))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Metadata of an adapter. Its tensors are transferred like weights, under PEFT's names."""

    name: str
    """Contains the publication id, so no cache can confuse two adapters."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The content of PEFT's `adapter_config.json`."""
    base_digest: str | None = None
    """Digest of the base weights it was trained with; None if unknown."""
    base_dtype: str | None = "F32"
    """Of all those weights; None if they differ. Only digests of equal dtypes can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterKind:
    """The part that all adapters of one trainer share."""

    settings: Mapping[str, Any]
    base_digest: str
    base_dtype: str | None = "F32"

    def published(self, publication: PublicationId) -> Adapter:
        name = adapter_name(publication)
        return Adapter(name=name, settings=self.settings, base_digest=self.base_digest, base_dtype=self.base_dtype)


def adapter_name(publication: PublicationId) -> str:
    """The name of a published adapter. Unique, because publication ids are never reused."""
    return f"{PREFIX}{publication}"


def named_publication(name: str) -> int | None:
    """The publication id in an adapter's name; None if it is not such a name."""
    number = name.removeprefix(PREFIX)
    return int(number) if number != name and number.isascii() and number.isdigit() else None
