"""Weights over HTTP: the trainer serves a publication in ranges, and replicas fetch it. No group is formed, so members come and go.

Each machine fetches a publication once. Machines that have it serve others, so a joining replica costs the trainer little.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web
from torch import Tensor

from rollbook.access.server import serve_app
from rollbook.access.tokens import Secret, bearer_token
from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Publication
from rollbook.contracts.weights import Adapter
from rollbook.inference.weights.ranges import DATA_ROUTE, MANIFEST_ROUTE, RangeRoutes, manifest_of
from rollbook.inference.weights.shared_memory import has_shared_memory
from rollbook.inference.weights.transport import TransportOptions, update_message
from rollbook.inference.weights.transports import files
from rollbook.inference.wire.weights import RangeManifest, UpdateInfo


def open_transport(_name: str, options: TransportOptions) -> "PullTransport":
    if options.token is None:
        raise RunError(
            "transfer = 'pull' needs an access token: replicas send it when they fetch weights from the trainer"
        )
    storage = files.open_transport("shared_memory" if has_shared_memory() else "directory", options)
    return PullTransport(storage, host=options.host, token=options.token)


class PullTransport:
    """Satisfies `SharingTransport`. The server starts with the first publication."""

    takes_gpu_weights = False

    def __init__(self, storage: files.FileTransport, *, host: str, token: str) -> None:
        self._storage = storage
        self._host = host
        self._secret = Secret(token)
        self._published: dict[str, RangeManifest] = {}
        self._stack = AsyncExitStack()
        self._url: str | None = None

    async def put(
        self, publication: Publication, weights: Mapping[str, Tensor], *, adapter: Adapter | None = None
    ) -> str:
        location = await self._storage.put(publication, weights, adapter=adapter)
        manifest = await asyncio.to_thread(manifest_of, Path(location), publication.id, publication.digest)
        self._published[location] = manifest
        if self._url is None:
            self._url = await self._serve()
        return location

    async def keep_only(self, locations: Collection[str]) -> None:
        self._published = {location: found for location, found in self._published.items() if location in locations}
        await self._storage.keep_only(locations)

    def update_info(self, publication: Publication, location: str) -> UpdateInfo:
        assert self._url is not None
        return update_message(publication, "pull", sources=[self._url, *self._published[location].copies])

    def add_copy(self, location: str, url: str) -> None:
        manifest = self._published.get(location)
        if manifest is not None and url not in manifest.copies:
            manifest.copies.append(url)

    async def close(self) -> None:
        await self._stack.aclose()
        await self._storage.close()

    async def _serve(self) -> str:
        try:
            sock = listening_socket(self._host, 0)
        except OSError as error:
            raise RunError(
                f"the trainer cannot serve weights on inference.transfer_host = {self._host!r}: {error.strerror or error}"
            ) from error
        return await self._stack.enter_async_context(serve_app(self.app(), sock))

    def app(self) -> web.Application:
        routes = RangeRoutes(self._find)
        app = web.Application(middlewares=[self._require_token])
        app.add_routes([web.get(MANIFEST_ROUTE, routes.manifest), web.get(DATA_ROUTE, routes.data)])
        return app

    def _find(self, publication: int) -> tuple[RangeManifest, Path] | None:
        for location, manifest in self._published.items():
            if manifest.publication == publication:
                return manifest, Path(location)
        return None

    @web.middleware
    async def _require_token(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._secret.matches(bearer_token(request.headers.get("Authorization"))):
            return await handler(request)
        raise web.HTTPUnauthorized(text="the access token of the run is required: send 'Authorization: Bearer …'")
