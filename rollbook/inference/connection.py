"""One HTTP call to a policy server, its outcome told as one of the verdicts.

Connection trouble, 5xx, 429 and bodies that break off are transient. A fault of the request itself ends the episode. Nothing is
retried here: whoever has the deadline does that, once.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from rollbook.contracts.errors import EpisodeError, FencedError, RollbookError, RunError, TransientError
from rollbook.inference.wire.completions import GENERATION_FAILED, QUEUE_FULL, STALE_WEIGHTS, ErrorDetail, ErrorReply

T = TypeVar("T")
_JSON = {"Content-Type": "application/json"}


class ReplicaBusyError(TransientError):
    """The replica is well and cannot serve this now: too many requests wait, or its weights are older than asked for."""


class NotThereError(RunError):
    """The server has no such model, adapter or route."""


class PolicyConnection:
    """Pooled connections to one policy server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url.rstrip("/")

    async def post(self, path: str, body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
        try:
            async with self._session.post(self.url + path, data=body) as response:
                return await self._outcome(response, path, decoder)
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(path, error) from error

    async def get(self, path: str, decoder: msgspec.json.Decoder[T]) -> T:
        try:
            async with self._session.get(self.url + path) as response:
                return await self._outcome(response, path, decoder)
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(path, error) from error

    async def post_text(self, path: str, body: bytes) -> str:
        """For verbs that answer in plain words."""
        try:
            async with self._session.post(self.url + path, data=body) as response:
                return (await self._body(response, path)).decode(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(path, error) from error

    async def get_text(self, path: str) -> str:
        try:
            async with self._session.get(self.url + path) as response:
                return (await self._body(response, path)).decode(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(path, error) from error

    async def _outcome(self, response: aiohttp.ClientResponse, path: str, decoder: msgspec.json.Decoder[T]) -> T:
        raw = await self._body(response, path)
        try:
            return decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise TransientError(f"{self.url}{path} answered with a body that cannot be read: {error}") from error

    async def _body(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        raw = await response.read()
        if response.status != 200:
            raise verdict(response.status, raw, response.headers.get("Retry-After"), where=f"{self.url}{path}")
        return raw

    def _unreachable(self, path: str, error: Exception) -> TransientError:
        return TransientError(f"{self.url}{path} could not be reached: {type(error).__name__}: {error}")


@asynccontextmanager
async def open_connection(
    url: str, *, max_connections: int, api_key: str | None = None
) -> AsyncIterator[PolicyConnection]:
    connector = aiohttp.TCPConnector(limit=max_connections, ttl_dns_cache=300)
    # No timer of aiohttp's own: the caller's one deadline bounds everything, and a timer for each call costs.
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


def verdict(status: int, raw: bytes, retry_after: str | None, *, where: str) -> RollbookError:
    """Who must act on an answer that is not 200."""
    detail = _detail(status, raw)
    message = f"{where} answered {status} ({detail.type}): {detail.message}"
    if detail.type == GENERATION_FAILED:
        # The model itself failed on this prompt: asking again would meet the same weights.
        return EpisodeError(message)
    if detail.type in (STALE_WEIGHTS, QUEUE_FULL) or status == 429:
        return ReplicaBusyError(message, retry_after_s=_seconds(retry_after))
    if status >= 500:
        return TransientError(message, retry_after_s=_seconds(retry_after))
    if status == 409:
        return FencedError(message)
    if status in (400, 413):
        return EpisodeError(message)
    return NotThereError(message) if status == 404 else RunError(message)


def _detail(status: int, raw: bytes) -> ErrorDetail:
    try:
        return msgspec.json.decode(raw, type=ErrorReply).error
    except msgspec.MsgspecError:
        return ErrorDetail(message=raw[:200].decode(errors="replace"), type="unknown", code=status)


def _seconds(retry_after: str | None) -> float | None:
    try:
        return float(retry_after) if retry_after is not None else None
    except ValueError:
        return None


def plain_decoder() -> msgspec.json.Decoder[Any]:
    """For answers whose content does not matter."""
    return msgspec.json.Decoder()
