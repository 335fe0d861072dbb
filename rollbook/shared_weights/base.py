"""The frozen base of adapters, once in memory for trainer and policy servers.

A separate process owns it (`BaseOwner`) and describes it in a file; the others map it (`map_base`). No process writes to it: the
owner and every process that maps it compare its checksum. When the owner ends, all processes that map the base must end too.
"""

import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.weights import WeightsError
from rollbook.shared_weights.memory import checksum, new_block, open_block
from rollbook.shared_weights.packing import DTYPES, TensorHeader, layout, unpack_views

ALIGNMENT = 256
"""Alignment of each weight, as in memory that torch allocates: kernels choose their order of sums by the alignment."""
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Projections of the same input, in the order in which the engine computes them as one. They are next to each other."""


class NotSharedError(WeightsError):
    """A model whose weights cannot be shared, with the reason."""


class _BaseFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    handle: dict[str, Any] = {}
    headers: list[tuple[str, str, tuple[int, ...]]] = []
    checksum: str = ""
    digest: str = ""
    not_shared_because: str | None = None
    """Set if each process must load the base itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBase:
    """The base in memory of another process."""

    block: Tensor
    tensors: Mapping[str, Tensor]
    """By the names of the module, tied ones once. Read-only."""
    digest: str
    """Digest of the weights under the names of the model's files."""

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.block.untyped_storage().data_ptr()


class BaseOwner:
    """Holds the base. The processes that map it need this one to live."""

    def __init__(self, headers: Sequence[TensorHeader], read: Callable[[str], Tensor], *, device: str) -> None:
        """`read` returns the values of a weight, in any dtype and on any device. It is called once for each, in order."""
        self._headers = in_order(headers)
        ranges, num_bytes = layout(self._headers, alignment=ALIGNMENT)
        self._block = new_block(device, num_bytes)
        for part in ranges:
            self._block.write(part.start, read(part.name).to(DTYPES[part.dtype]))
        self._bytes, self._handle = self._block.finish()
        self._checksum = checksum(self._bytes)
        self.tensors: Mapping[str, Tensor] = unpack_views(self._bytes, self._headers, alignment=ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        return self._bytes.numel()

    def offer(self, path: Path, *, digest: str) -> None:
        """Write the file with which other processes map the base. `digest`: of the weights under the names of the model's files."""
        found = _BaseFile(handle=self._handle, headers=self._headers, checksum=self._checksum, digest=digest)
        _write(path, found)
        self._offered = os.open(path, os.O_RDONLY)

    def is_mapped(self) -> bool:
        """Whether a process lives that has mapped the base."""
        try:
            fcntl.flock(self._offered, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._offered, fcntl.LOCK_UN)
        return False

    def check(self) -> None:
        """Raises `WeightsError` if the base has changed since it was loaded."""
        if checksum(self._bytes) != self._checksum:
            raise WeightsError(
                "the shared base was changed while the run used it: samples and steps since then may be wrong. Set "
                "resources.shared_base = false, and report what wrote to it"
            )


def refuse_base(path: Path, cause: str) -> None:
    """Write a file that tells the other processes to load the base themselves."""
    _write(path, _BaseFile(not_shared_because=cause))


def map_base(path: Path, *, device: str) -> SharedBase | None:
    """The base that the file describes; None if it is not shared.

    Raises `OSError` if its owner has ended, and `WeightsError` if it is on another device or has other bytes than were loaded.
    """
    # Never closed: the lock ends with this process.
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    found: _BaseFile = json_decoder(_BaseFile).decode(path.read_bytes())
    if found.not_shared_because is not None:
        return None
    block = open_block(found.handle)
    if block.device != (own := torch.empty(0, device=device).device):
        raise WeightsError(f"the shared base is on {block.device}, and this process computes on {own}")
    if checksum(block) != found.checksum:
        raise WeightsError(
            f"the shared base of {path} does not have the bytes that were loaded; set resources.shared_base = false"
        )
    return SharedBase(block=block, tensors=unpack_views(block, found.headers, alignment=ALIGNMENT), digest=found.digest)


def in_order(headers: Sequence[TensorHeader]) -> list[TensorHeader]:
    """Their order in memory: that of the model, with fused projections next to each other."""
    place = {name: number for number, (name, _, _) in enumerate(headers)}

    def key(header: TensorHeader) -> tuple[int, int]:
        layer, _, kind = header[0].rpartition(".")
        parent, _, projection = layer.rpartition(".")
        for group in FUSED:
            if projection in group:
                first = f"{parent}.{group[0]}.{kind}"
                return place.get(first, place[header[0]]), group.index(projection)
        return place[header[0]], 0

    return sorted(headers, key=key)


def _write(path: Path, found: _BaseFile) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_bytes(msgspec.json.encode(found))
    draft.replace(path)
