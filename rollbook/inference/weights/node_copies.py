"""Copies of publications on this machine. The first replica of the machine fetches a publication; the others use its file.

Replicas of one run share a directory, found by the token of the run. A file lock makes them fetch one at a time. The lock ends with
its process, so a killed replica blocks no other. The last replica that closes removes the directory.
"""

import asyncio
import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import msgspec

from rollbook.access.private_files import make_private_directory
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Publication
from rollbook.inference.weights.range_client import RangeClient, Reusable
from rollbook.inference.weights.ranges import manifest_of
from rollbook.inference.weights.shared_memory import (
    LOCK_FILE,
    SHARED,
    directory_name,
    has_locked,
    has_shared_memory,
    is_at,
    remove_abandoned,
)
from rollbook.inference.wire.weights import RangeManifest

LOCK_POLL_S = 0.02
NUM_KEPT = 2
"""The newest publication, and the one before it, which another replica may still load."""
FILE, MANIFEST = "model.safetensors", "manifest.json"


class NodeCopies:
    def __init__(self, token: str, *, parent: Path | None = None) -> None:
        """`parent`: the folder of the directory, by default in shared memory if that is large enough."""
        key = hashlib.blake2b(token.encode(), digest_size=8).hexdigest()
        parent = parent or (SHARED if has_shared_memory() else Path(tempfile.gettempdir()))
        self._token = token
        self._directory = parent / directory_name(f"copies-{key}")
        remove_abandoned(parent)
        self._users = self._locked_directory()
        self.fetched_bytes = 0
        """Received over the network by this replica."""

    def _locked_directory(self) -> IO[str]:
        """Create the directory and lock it. Another replica that closes may remove it before it is locked; then repeat."""
        path = self._directory / LOCK_FILE
        while True:
            try:
                make_private_directory(self._directory)
                users = path.open("w")
            except FileNotFoundError:
                continue
            if has_locked(users, fcntl.LOCK_EX):
                # No other replica uses the directory: killed ones left these.
                for folder in self._directory.glob("publication-*"):
                    shutil.rmtree(folder, ignore_errors=True)
            fcntl.flock(users, fcntl.LOCK_SH)
            if is_at(users, path):
                return users
            users.close()

    def close(self) -> None:
        """Idempotent."""
        if self._users.closed:
            return
        if has_locked(self._users, fcntl.LOCK_EX):
            shutil.rmtree(self._directory, ignore_errors=True)
        self._users.close()

    def find(self, publication: int) -> tuple[RangeManifest, Path] | None:
        folder = self._folder(publication)
        try:
            manifest = json_decoder(RangeManifest).decode((folder / MANIFEST).read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None
        return manifest, folder / FILE

    def remove_if_damaged(self, publication: int) -> bool:
        """Whether this machine has no intact copy of a publication now. Reads the whole file."""
        if (found := self.find(publication)) is None:
            return True
        manifest, path = found
        try:
            read = manifest_of(path, publication, manifest.digest, range_bytes=manifest.range_bytes)
        except OSError:
            return True  # another replica removes it
        if read.digests == manifest.digests:
            return False
        shutil.rmtree(path.parent, ignore_errors=True)
        return True

    async def fetch(self, publication: Publication, sources: Sequence[str]) -> Path:
        """The file of a publication, from this machine or from one of the sources.

        Raises `TransientError` if no source has it, and `WeightsError` if the trainer sent damaged bytes.
        """
        async with self._turn():
            found = self.find(publication.id)
            if found is None or found[0].digest != publication.digest:
                await self._download(publication, sources)
                self._remove_except_newest()
        return self._folder(publication.id) / FILE

    async def _download(self, publication: Publication, sources: Sequence[str]) -> None:
        folder = self._folder(publication.id)
        unfinished = self._directory / "unfinished"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            async with RangeClient(publication.id, sources, token=self._token) as client:
                manifest = await client.manifest()
                if manifest.digest != publication.digest:
                    raise TransientError(f"the trainer has other weights with the number {publication.id} now")
                self._require_space(manifest.size)
                await client.fetch(manifest, unfinished / FILE, reusable=self._reusable())
                self.fetched_bytes += client.fetched_bytes
            manifest.copies = []
            (unfinished / MANIFEST).write_bytes(msgspec.json.encode(manifest))
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        except OSError as error:
            raise TransientError(
                f"publication {publication.id} cannot be stored in {self._directory}: {error}"
            ) from error

    def _reusable(self) -> Reusable:
        """Ranges that did not change since the newest copy are not fetched again."""
        folders = self._folders()
        found = self.find(_number(folders[-1])) if folders else None
        if found is None:
            return {}
        manifest, path = found
        return {digest: (path, index * manifest.range_bytes) for index, digest in enumerate(manifest.digests)}

    def _require_space(self, size: int) -> None:
        free = shutil.disk_usage(self._directory).free
        if free < size + 2**20:
            raise TransientError(f"{self._directory} has {free >> 20} MiB free and the weights need {size >> 20} MiB")

    def _remove_except_newest(self) -> None:
        for folder in self._folders()[:-NUM_KEPT]:
            shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return sorted(self._directory.glob("publication-*"), key=_number)

    def _folder(self, publication: int) -> Path:
        return self._directory / f"publication-{publication:08d}"

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        with (self._directory / "fetch.lock").open("w") as file:
            while not has_locked(file, fcntl.LOCK_EX):  # noqa: ASYNC110  # another process holds it
                await asyncio.sleep(LOCK_POLL_S)
            yield


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("publication-"))
