"""Fetches a weight file in ranges from the trainer and from replicas that already have it."""

import asyncio
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import aiohttp
import msgspec

from rollbook.concurrency.tasks import first_error
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import TransientError
from rollbook.contracts.weights import WeightsError
from rollbook.inference.weights.ranges import ROOT, range_digest
from rollbook.inference.wire.weights import RangeManifest

CONCURRENT_RANGES = 4
RANGE_S = 60.0
"""Time limit for one range from one source."""
ROUNDS = 2
"""How often all sources are tried for a range: a damaged range may be intact the second time."""
REFRESH_S = 1.0
"""Interval at which the list of sources is read again during a fetch."""

Reusable = Mapping[str, tuple[Path, int]]
"""Ranges that this machine already has: file and offset by digest."""


class _RefusedError(TransientError):
    """A source did not deliver a range. `is_damaged`: it sent bytes with another digest."""

    def __init__(self, message: str, *, is_damaged: bool = False) -> None:
        super().__init__(message)
        self.is_damaged = is_damaged


class RangeClient:
    """Open with `async with`. `sources`: the trainer first, then replicas."""

    def __init__(self, publication: int, sources: Sequence[str], *, token: str) -> None:
        self._publication = publication
        self._trainer = sources[0]
        self._sources = list(sources)
        self._failed: set[str] = set()
        """Sources that did not deliver a range. They are used last: each attempt may take `RANGE_S`."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=RANGE_S),
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._refreshed_at = 0.0
        self.fetched_bytes = 0

    async def __aenter__(self) -> "RangeClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def manifest(self) -> RangeManifest:
        """Fetch from the first source that responds. Raises `TransientError` if none does."""
        causes = []
        for source in self._sources:
            try:
                manifest = await self._manifest_at(source)
            except TransientError as error:
                causes.append(str(error))
                continue
            self._learn(manifest)
            return manifest
        raise TransientError(f"no source has publication {self._publication}: {'; '.join(causes)}")

    async def fetch(self, manifest: RangeManifest, target: Path, *, reusable: Reusable) -> None:
        """Write the file. Ranges in `reusable` are copied from this machine's disk."""
        with target.open("wb") as file:
            file.truncate(manifest.size)
            indices = iter(range(len(manifest.digests)))
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(CONCURRENT_RANGES):
                        group.create_task(
                            self._fetch_all(indices, manifest, file.fileno(), reusable), name="weights.fetch"
                        )
            except* Exception as errors:
                raise first_error(errors) from errors

    async def _fetch_all(
        self, indices: Iterator[int], manifest: RangeManifest, descriptor: int, reusable: Reusable
    ) -> None:
        for index in indices:
            start = index * manifest.range_bytes
            length = min(manifest.range_bytes, manifest.size - start)
            digest = manifest.digests[index]
            data = await asyncio.to_thread(_read_own, reusable, digest, length)
            if data is None:
                data = await self._fetch_range(start, length, digest)
                self.fetched_bytes += length
            writing = asyncio.ensure_future(asyncio.to_thread(_write_at, descriptor, data, start))
            try:
                await asyncio.shield(writing)
            finally:
                # A thread cannot be cancelled. After the file is closed, its descriptor may belong to another file.
                await asyncio.wait([writing])

    async def _fetch_range(self, start: int, length: int, digest: str) -> bytes:
        await self._refresh_sources()
        refusals: list[_RefusedError] = []
        is_damaged_at_trainer = False
        for _ in range(ROUNDS):
            for source in sorted(random.sample(self._sources, len(self._sources)), key=self._failed.__contains__):
                try:
                    return await self._range_at(source, start, length, digest)
                except _RefusedError as error:
                    refusals.append(error)
                    self._failed.add(source)
                    is_damaged_at_trainer |= error.is_damaged and source == self._trainer
        message = f"bytes {start} to {start + length} of publication {self._publication}: {refusals[-1]}"
        raise WeightsError(message) if is_damaged_at_trainer else TransientError(message)

    async def _range_at(self, source: str, start: int, length: int, digest: str) -> bytes:
        url = f"{source}{ROOT}/{self._publication}/data"
        try:
            async with self._session.get(url, headers={"Range": f"bytes={start}-{start + length - 1}"}) as response:
                data = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _RefusedError(f"{source} is unreachable: {type(error).__name__}: {error}") from error
        if response.status != 206 or len(data) != length:
            raise _RefusedError(f"{source} returned {response.status} with {len(data)} bytes instead of {length}")
        found = await asyncio.to_thread(range_digest, data)
        if found != digest:
            raise _RefusedError(f"{source} sent digest {found}, announced with {digest}", is_damaged=True)
        return data

    async def _refresh_sources(self) -> None:
        """Replicas that got the publication during this fetch take load from the trainer."""
        if time.monotonic() - self._refreshed_at < REFRESH_S:
            return
        self._refreshed_at = time.monotonic()
        try:
            self._learn(await self._manifest_at(self._trainer))
        except TransientError:
            return  # the known sources are used

    async def _manifest_at(self, source: str) -> RangeManifest:
        url = f"{source}{ROOT}/{self._publication}"
        try:
            async with self._session.get(url) as response:
                raw = await response.read()
            if response.status != 200:
                raise TransientError(f"{url} returned {response.status}: {raw[:200].decode(errors='replace')}")
            return json_decoder(RangeManifest).decode(raw)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
            raise TransientError(f"{url}: {type(error).__name__}: {error}") from error

    def _learn(self, manifest: RangeManifest) -> None:
        self._sources += [source for source in manifest.copies if source not in self._sources]


def _read_own(reusable: Reusable, digest: str, length: int) -> bytes | None:
    if digest not in reusable:
        return None
    path, offset = reusable[digest]
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
    except OSError:
        return None  # another replica has removed it
    return data if len(data) == length and range_digest(data) == digest else None


def _write_at(descriptor: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written
