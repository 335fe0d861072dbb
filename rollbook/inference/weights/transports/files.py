"""Weights as safetensors files: on disk (`directory`), or in memory that the processes of a host share (`shared_memory`).

A file appears under its name only when it is whole. Shared memory is a file on the memory file system: written once, mapped by
every replica, and gone with the machine. What a trainer that was killed left there is swept by the next one of the same run.
"""

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from rollbook.contracts.adapter import Adapter
from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Publication
from rollbook.inference.weights.lora import CONFIG_FILE, TENSOR_FILE
from rollbook.inference.weights.transport import WayPlace, message
from rollbook.inference.weights.transports.safetensors_file import write_file
from rollbook.inference.wire.weights import Backend, InitInfo, UpdateInfo

SHARED = Path("/dev/shm")


def open_way(name: str, place: WayPlace) -> "FileWay":
    disk = Path(place.directory).absolute()
    if name == "directory":
        return FileWay("directory", disk)
    if not SHARED.is_dir():
        raise RunError(f"transfer = 'shared_memory' needs {SHARED}, which this machine has not; use 'directory'")
    # Named after the run's own folder, so that the next trainer of the run finds and sweeps what this one left.
    own = hashlib.blake2b(str(disk).encode(), digest_size=8).hexdigest()
    return FileWay("shared_memory", SHARED / f"rollbook-{os.getuid()}-{own}", is_ours=True)


class FileWay:
    """`is_ours`: the folder holds nothing else and goes with us."""

    def __init__(self, backend: Backend, directory: Path, *, is_ours: bool = False) -> None:
        self._backend: Backend = backend
        self._directory = directory
        self._is_ours = is_ours
        if is_ours:
            shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def backend(self) -> Backend:
        return self._backend

    async def put(
        self, publication: Publication, weights: Mapping[str, Tensor], *, adapter: Adapter | None = None
    ) -> str:
        # Alone in a folder of its own: vLLM reads folders. An adapter's is one that PEFT and vLLM read as well.
        folder = self._directory / f"publication-{publication.id:08d}"
        if adapter is not None:
            await asyncio.to_thread(_write_settings, folder / CONFIG_FILE, adapter)
        path = folder / ("model.safetensors" if adapter is None else TENSOR_FILE)
        await asyncio.to_thread(self._write, weights, path, publication.digest)
        return str(path)

    async def keep_only(self, locations: Collection[str]) -> None:
        await asyncio.to_thread(self._sweep, {Path(location).parent.name for location in locations})

    @property
    def is_group(self) -> bool:
        return False

    def invitations(self, world_sizes: Sequence[int]) -> Sequence[InitInfo]:
        return ()

    async def assemble(self, world_size: int) -> None:
        return None

    def update_info(self, publication: Publication, location: str) -> UpdateInfo:
        return message(publication, self._backend, path=location)

    async def send(self, location: str) -> None:
        return None

    async def close(self) -> None:
        if self._is_ours:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _write(self, weights: Mapping[str, Tensor], path: Path, digest: str) -> None:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        path.parent.mkdir(exist_ok=True)
        self._require_room(plain, path)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            # Not synced: after a crash these weights are published anew, under another id.
            write_file(plain, unfinished, metadata={"format": "pt", "rollbook_digest": digest})
            unfinished.replace(path)
        except OSError as error:
            raise RunError(f"weights cannot be written to {path}: {error.strerror or error}") from error
        finally:
            unfinished.unlink(missing_ok=True)

    def _require_room(self, plain: Mapping[str, Tensor], path: Path) -> None:
        """Memory that is promised and not there kills the writer with SIGBUS; better to say it."""
        needed = sum(tensor.nbytes for tensor in plain.values())
        free = shutil.disk_usage(path.parent).free
        if free < needed + 2**20:
            raise RunError(
                f"{path.parent} has {free / 2**20:.0f} MiB free and the weights need {needed / 2**20:.0f} MiB"
                + ("; set inference.transfer = 'directory'" if self._is_ours else "")
            )

    def _sweep(self, kept: Collection[str]) -> None:
        for path in self._directory.glob("publication-*"):
            if path.name not in kept and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)


def _write_settings(path: Path, adapter: Adapter) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(dict(adapter.settings), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"an adapter cannot be written to {path}: {error.strerror or error}") from error
