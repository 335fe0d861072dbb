"""Serves weight files over HTTP in ranges with digests. The trainer serves its publications, and replicas serve their copies."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash
from aiohttp import web

from rollbook.inference.wire.weights import RangeManifest

ROOT = "/published_weights"
MANIFEST_ROUTE = ROOT + "/{publication:[0-9]+}"
DATA_ROUTE = MANIFEST_ROUTE + "/data"
RANGE_BYTES = 4 * 2**20
"""Large enough to fill a network with a few requests, small enough that a lost source costs little."""

Find = Callable[[int], tuple[RangeManifest, Path] | None]
"""The manifest and the file of a publication, or None if this server does not have it."""


def range_digest(data: bytes | memoryview) -> str:
    """A fast hash against damage. It does not protect against forgery: sources are authenticated by the token of the run."""
    return xxhash.xxh3_128(data).hexdigest()


def manifest_of(path: Path, publication: int, digest: str, *, range_bytes: int = RANGE_BYTES) -> RangeManifest:
    """Reads the whole file. `digest`: of the published weights."""
    digests: list[str] = []
    with path.open("rb") as file:
        while data := file.read(range_bytes):
            digests.append(range_digest(data))
        size = file.tell()
    return RangeManifest(publication=publication, digest=digest, size=size, range_bytes=range_bytes, digests=digests)


class RangeRoutes:
    def __init__(self, find: Find) -> None:
        self._find = find

    async def manifest(self, request: web.Request) -> web.Response:
        manifest, _ = self._found(request)
        return web.Response(body=msgspec.json.encode(manifest), content_type="application/json")

    async def data(self, request: web.Request) -> web.StreamResponse:
        """One range: clients send a `Range` header."""
        return web.FileResponse(self._found(request)[1], headers={"Content-Type": "application/octet-stream"})

    def _found(self, request: web.Request) -> tuple[RangeManifest, Path]:
        publication = int(request.match_info["publication"])
        found = self._find(publication)
        if found is None:
            raise web.HTTPNotFound(text=f"this server has no copy of publication {publication}")
        return found
