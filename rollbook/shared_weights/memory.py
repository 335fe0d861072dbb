"""A block of memory that its owner fills once, and that other processes of this machine read: on a GPU, or in main memory.

A block in main memory is a file without a name that the kernel seals: after `finish` no process can write to it, nor to its maps.
It is freed when its owner and all its readers have ended, however they end. CUDA has no such protection; there readers may only
read, and `checksum` shows whether they did.
"""

import fcntl
import hashlib
import mmap
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rollbook.contracts.weights import WeightsError
from rollbook.shared_weights import gpu_handles

HAS_SEALS = sys.platform == "linux" and hasattr(os, "memfd_create")
CHECKED_WORDS = 1 << 22
"""Summed at once: a temporary copy of 32 MiB."""
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so a product with it is 0 for 0 only."""


class Block(Protocol):
    """The owner's end. Readers can open the handle while the owner lives and keeps the block."""

    def write(self, start: int, values: Tensor) -> None:
        """Copy the bytes of a tensor."""

    def finish(self) -> tuple[Tensor, dict[str, Any]]:
        """The bytes, and their handle as JSON. Nothing may be written afterwards."""


def new_block(device: str, num_bytes: int) -> Block:
    """`num_bytes`: a multiple of 8. Raises `WeightsError` if this system cannot share the memory of the device."""
    if device != "cpu":
        return _GpuBlock(device, num_bytes)
    if not HAS_SEALS:
        raise WeightsError("main memory is shared on Linux only")
    return _HostBlock(num_bytes)


def open_block(handle: Mapping[str, Any]) -> Tensor:
    """The bytes of a block of another process. Raises `OSError` if its owner has ended."""
    if "gpu" in handle:
        return gpu_handles.opened(handle)
    descriptor = os.open(f"/proc/{handle['pid']}/fd/{handle['descriptor']}", os.O_RDONLY | os.O_NONBLOCK)
    try:
        if os.fstat(descriptor).st_ino != handle["inode"]:
            raise FileNotFoundError(f"process {handle['pid']} is no longer the owner of the block")
        return _mapped(descriptor)
    finally:
        os.close(descriptor)


def checksum(block: Tensor) -> str:
    """Changes if any bytes of the block change. Computed on its device, without a copy of the block."""
    words = block.view(torch.int64)
    factors = torch.arange(1, 2 * min(CHECKED_WORDS, len(words)), 2, device=block.device) * MULTIPLIER
    sums = [(part * factors[: len(part)]).sum() for part in torch.split(words, CHECKED_WORDS)]
    return hashlib.blake2b(repr(torch.stack(sums).tolist()).encode(), digest_size=16).hexdigest()


class _GpuBlock:
    def __init__(self, device: str, num_bytes: int) -> None:
        # In an allocation of its own, because a handle opens all of it.
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def write(self, start: int, values: Tensor) -> None:
        data = _bytes_of(values)
        self._bytes[start : start + len(data)].copy_(data)

    def finish(self) -> tuple[Tensor, dict[str, Any]]:
        # Readers do not wait for the stream that wrote.
        torch.cuda.synchronize(self._bytes.device)
        return self._bytes, gpu_handles.share(self._bytes)


class _HostBlock:
    def __init__(self, num_bytes: int) -> None:
        self._descriptor = os.memfd_create("rollbook-base", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, num_bytes)

    def write(self, start: int, values: Tensor) -> None:
        data = _bytes_of(values.cpu()).numpy().data
        while data:
            written = os.pwrite(self._descriptor, data, start)
            start, data = start + written, data[written:]

    def finish(self) -> tuple[Tensor, dict[str, Any]]:
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
        inode = os.fstat(self._descriptor).st_ino
        return _mapped(self._descriptor), {"pid": os.getpid(), "descriptor": self._descriptor, "inode": inode}


def _bytes_of(values: Tensor) -> Tensor:
    return values.detach().contiguous().reshape(-1).view(torch.uint8)


def _mapped(descriptor: int) -> Tensor:
    mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        # A write to the tensor ends the process with SIGSEGV, of which torch warns.
        warnings.simplefilter("ignore")
        return torch.frombuffer(mapped, dtype=torch.uint8)
