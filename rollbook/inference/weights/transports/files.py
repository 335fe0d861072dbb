"""Weights as safetensors files: on disk (`directory`), or on the memory file system of the host (`shared_memory`).

A file gets its final name only when it is complete. A shared memory file is written once and mapped by every replica; files that
a killed trainer left there are removed by the next trainer of the same run, or after an hour by that of any run.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from rollbook.access.private_files import make_private_directory
from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Publication
from rollbook.contracts.weights import Adapter
from rollbook.inference.weights.lora import CONFIG_FILE, TENSOR_FILE
from rollbook.inference.weights.shared_memory import LOCK_FILE, SHARED, directory_name, is_at, remove_abandoned
from rollbook.inference.weights.transport import TransportOptions, update_message
from rollbook.inference.wire.weights import Backend, UpdateInfo
from rollbook.shared_weights.packing import NAMES

HEADER_ALIGNMENT = 8
"""The data after the header starts at a multiple of this, so that views into a mapped file are aligned."""


def open_transport(name: str, options: TransportOptions) -> "FileTransport":
    disk = Path(options.directory).absolute()
    if name == "directory":
        return FileTransport("directory", disk)
    if not SHARED.is_dir():
        raise RunError(f"transfer = 'shared_memory' needs {SHARED}, which this machine does not have; use 'directory'")
    # The name depends on the run directory, so that the next trainer of the run finds and removes leftover files.
    run = hashlib.blake2b(str(disk).encode(), digest_size=8).hexdigest()
    return FileTransport("shared_memory", SHARED / directory_name(run), is_temporary=True)


class FileTransport:
    """`is_temporary`: the folder holds nothing else and is removed at start and at close, unless it was replaced."""

    takes_gpu_weights = False

    def __init__(self, backend: Backend, directory: Path, *, is_temporary: bool = False) -> None:
        self._backend: Backend = backend
        self._directory = directory
        self._is_temporary = is_temporary
        if is_temporary:
            # Only what this user left there is removed: `rmtree` refuses symbolic links, and make_private_directory then does too.
            shutil.rmtree(directory, ignore_errors=True)
            remove_abandoned(directory.parent)
            make_private_directory(directory)
            self._lock = (directory / LOCK_FILE).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        else:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def put(
        self, publication: Publication, weights: Mapping[str, Tensor], *, adapter: Adapter | None = None
    ) -> str:
        # One folder for each publication, because vLLM reads folders. PEFT and vLLM can also read an adapter's folder.
        folder = self._directory / f"publication-{publication.id:08d}"
        path = folder / ("model.safetensors" if adapter is None else TENSOR_FILE)
        await asyncio.to_thread(self._write, weights, path, publication.digest, adapter)
        return str(path)

    async def keep_only(self, locations: Collection[str]) -> None:
        await asyncio.to_thread(self._remove_except, {Path(location).parent.name for location in locations})

    def update_info(self, publication: Publication, location: str) -> UpdateInfo:
        return update_message(publication, self._backend, path=location)

    async def close(self) -> None:
        if self._is_temporary and not self._lock.closed:
            # A trainer that replaced this one has made the directory again.
            if is_at(self._lock, self._directory / LOCK_FILE):
                await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
            self._lock.close()

    def _write(self, weights: Mapping[str, Tensor], path: Path, digest: str, adapter: Adapter | None) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            self._require_space(tensors, path)
            if adapter is not None:
                settings = json.dumps(dict(adapter.settings), indent=1) + "\n"
                (path.parent / CONFIG_FILE).write_text(settings, encoding="utf-8")
            # Not synced: after a crash these weights are published again, under another id.
            write_safetensors(tensors, unfinished, metadata={"format": "pt", "rollbook_digest": digest})
            unfinished.replace(path)
        except OSError as error:
            raise RunError(f"weights cannot be written to {path}: {error.strerror or error}") from error
        finally:
            unfinished.unlink(missing_ok=True)

    def _require_space(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """A write to a full memory file system kills the process with SIGBUS; raise an error instead."""
        needed = sum(tensor.nbytes for tensor in tensors.values())
        free = shutil.disk_usage(path.parent).free
        if free < needed + 2**20:
            raise RunError(
                f"{path.parent} has {free / 2**20:.0f} MiB free and the weights need {needed / 2**20:.0f} MiB"
                + ("; set inference.transfer = 'directory'" if self._is_temporary else "")
            )

    def _remove_except(self, kept: Collection[str]) -> None:
        for path in self._directory.glob("publication-*"):
            if path.name not in kept and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, *, metadata: Mapping[str, str]) -> None:
    """Write contiguous tensors in main memory directly to the file.

    The safetensors library first collects all bytes in memory, which for a publication in every step costs more than the write.
    """
    # Larger items first, as the library does: every tensor then starts at a multiple of its item size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in ordered:
        end = start + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % HEADER_ALIGNMENT)
    with FileIO(path, "wb") as file:
        _write_all(file, memoryview(len(encoded).to_bytes(8, "little") + encoded))
        for _, tensor in ordered:
            if tensor.numel():
                _write_all(file, tensor.reshape(-1).view(torch.uint8).numpy().data)


def _write_all(file: FileIO, data: memoryview) -> None:
    """One call to `write` may accept only a part."""
    while data:
        data = data[file.write(data) :]
