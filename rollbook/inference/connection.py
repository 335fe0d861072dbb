"""One HTTP call to a policy server, with its failure as one of Rollbook's errors.

Lost connections, incomplete bodies, 5xx and 429 are transient. An invalid request ends the episode. Nothing is retried here: the
owner of the deadline retries.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import aiohttp
import msgspec

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import (
    EpisodeError,
    FencedError,
    NotFoundError,
    RollbookError,
    RunError,
    TransientError,
    WeightsAwaitedError,
)
from rollbook.inference.wire.completions import GENERATION_FAILED, QUEUE_FULL, STALE_WEIGHTS, ErrorDetail, OpenAiError

T = TypeVar("T", covariant=True)
HEARTBEAT_S = 30.0
"""A WebSocket is closed when the server does not respond for half of this time."""
_JSON = {"Content-Type": "application/json"}


class Decoder(Protocol[T]):
    """A decoder of msgspec."""

    def decode(self, raw: bytes, /) -> T: ...


class ReplicaBusyError(TransientError):
    """The replica works but cannot serve this request now: its queue is full, or its weights are too old."""


class ServerFailedError(TransientError):
    """The server received the request and failed. Unlike a server that restarts, it may fail every time."""


class NoServerError(TransientError):
    """Nothing listens at the address, or its host is unknown."""


class StaleReplicaError(ReplicaBusyError, WeightsAwaitedError):
    """The weights of the replica are too old."""


class PolicyConnection:
    """Pooled connections to one policy server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url.rstrip("/")

    async def post(self, path: str, body: bytes, decoder: Decoder[T], *, accept: str | None = None) -> T:
        return self._decoded(path, await self._call("POST", path, body, accept), decoder)

    async def get(self, path: str, decoder: Decoder[T]) -> T:
        return self._decoded(path, await self._call("GET", path), decoder)

    async def post_text(self, path: str, body: bytes) -> str:
        """Used for routes that respond with plain text, or whose response is not needed."""
        return (await self._call("POST", path, body)).decode(errors="replace")

    async def get_text(self, path: str) -> str:
        return (await self._call("GET", path)).decode(errors="replace")

    async def open_websocket(self, path: str) -> aiohttp.ClientWebSocketResponse:
        try:
            return await self._session.ws_connect(self.url + path, max_msg_size=0, heartbeat=HEARTBEAT_S)
        except aiohttp.WSServerHandshakeError as error:
            raise error_of(error.status, error.message.encode(), None, where=self.url + path) from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(f"{self.url}{path} is unreachable: {type(error).__name__}: {error}") from error

    def _decoded(self, path: str, raw: bytes, decoder: Decoder[T]) -> T:
        try:
            return decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise TransientError(f"{self.url}{path} sent an invalid body: {error}") from error

    async def _call(self, method: str, path: str, body: bytes | None = None, accept: str | None = None) -> bytes:
        headers = None if accept is None else {"Accept": accept}
        try:
            async with self._session.request(method, self.url + path, data=body, headers=headers) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            is_absent = isinstance(error, aiohttp.ClientConnectorDNSError | ConnectionRefusedError) or isinstance(
                getattr(error, "os_error", None), ConnectionRefusedError
            )
            kind = NoServerError if is_absent else TransientError
            raise kind(f"{self.url}{path} is unreachable: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise error_of(response.status, raw, response.headers.get("Retry-After"), where=f"{self.url}{path}")
        return raw


@asynccontextmanager
async def open_connection(
    url: str, *, max_connections: int, api_key: str | None = None
) -> AsyncIterator[PolicyConnection]:
    connector = aiohttp.TCPConnector(limit=max_connections, ttl_dns_cache=300)
    # No timeouts of aiohttp: the caller's deadline bounds each call, and a timer per call is expensive.
    timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)
    headers = _JSON if api_key is None else {**_JSON, "Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:
        yield PolicyConnection(session, url)


def error_of(status: int, raw: bytes, retry_after: str | None, *, where: str) -> RollbookError:
    """The error for a response that is not 200. Its class says who must act."""
    try:
        detail = json_decoder(OpenAiError).decode(raw).error
    except msgspec.MsgspecError:
        detail = ErrorDetail(message=raw[:200].decode(errors="replace"), type="unknown", code=status)
    message = f"{where} returned {status} ({detail.type}): {detail.message}"
    if detail.type == GENERATION_FAILED:
        # The model failed on this prompt. A retry would use the same weights and fail again.
        return EpisodeError(message)
    if detail.type == STALE_WEIGHTS:
        return StaleReplicaError(message, retry_after_s=_seconds(retry_after))
    if detail.type == QUEUE_FULL or status == 429:
        return ReplicaBusyError(message, retry_after_s=_seconds(retry_after))
    if status >= 500:
        return (ServerFailedError if status == 500 else TransientError)(message, retry_after_s=_seconds(retry_after))
    if status == 409:
        return FencedError(message)
    if status in (400, 413):
        return EpisodeError(message)
    return NotFoundError(message) if status == 404 else RunError(message)


def _seconds(retry_after: str | None) -> float | None:
    try:
        return float(retry_after) if retry_after is not None else None
    except ValueError:
        return None
