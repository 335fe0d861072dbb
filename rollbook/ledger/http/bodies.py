"""Bodies in and out: which forms are read, how large they may be, how long they may take. Nothing here knows a verb.

A body is read within a size, a time and a share of memory, so that no client, slow or hostile, holds more than its part. aiohttp
unpacks gzip, deflate and zstd while it reads, a piece at a time; the limit is on what comes out.
"""

import asyncio
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from rollbook.contracts.errors import RunError, TransientError
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http import wire
from rollbook.ledger.http.compression import compress

M = TypeVar("M", bound=wire.Message)

MEGABYTE = 1_000_000
ENCODINGS = frozenset({"", "identity", "gzip", "deflate", "zstd"})
COMPRESSED_FROM_BYTES = 4_096
"""Smaller answers are not worth the work."""
BUSY_RETRY_S = 1.0


class BodyTooLargeError(RunError):
    """More than the ledger takes."""


class UnreadableBodyError(RunError):
    """A content type or encoding that the ledger does not read."""


class TornBodyError(RunError):
    """The body broke off, or could not be unpacked."""


class SlowBodyError(RunError):
    """The body did not arrive in time."""


class BodyReader:
    """Reads the requests of one server and remembers how many bytes are arriving."""

    def __init__(self, config: LedgerConfig) -> None:
        self.most_bytes = int(config.max_body_mb * MEGABYTE)
        self._most_together = int(config.max_receiving_mb * MEGABYTE)
        self.body_s = config.body_s
        self.receiving_bytes = 0
        self.received_bytes = 0
        self._decoders: dict[tuple[type[wire.Message], bool], Any] = {}

    async def read(self, request: web.Request, expected: type[M]) -> M:
        """The message in a request. Its form is what the content type says."""
        # The plain header first: taking it apart costs more than all else here.
        is_plain = request.headers.get("Content-Type") == wire.CONTENT_TYPE
        is_json = not is_plain and request.content_type == wire.JSON_CONTENT_TYPE
        if not is_plain and not is_json and request.content_type != wire.CONTENT_TYPE:
            raise UnreadableBodyError(
                f"the body is {request.content_type}; send {wire.CONTENT_TYPE}, or {wire.JSON_CONTENT_TYPE}"
            )
        decoder = self._decoders.get((expected, is_json))
        if decoder is None:
            kind: Any = msgspec.json.Decoder if is_json else msgspec.msgpack.Decoder
            decoder = self._decoders[expected, is_json] = kind(expected)
        message: M = decoder.decode(await self._bytes(request))
        return message

    async def _bytes(self, request: web.Request) -> bytes:
        encoding = request.headers.get("Content-Encoding", "").lower()
        if encoding not in ENCODINGS:
            raise UnreadableBodyError(f"the body is packed with {encoding}; send it plain, or packed with zstd or gzip")
        declared = request.content_length or 0
        if declared > self.most_bytes:
            raise self._too_large(declared)
        content = request.content
        try:
            if content.is_eof() and content.exception() is None:
                # All of it came with the headers: nothing to wait for, and nothing to count.
                whole = content.read_nowait()
                self.received_bytes += len(whole)
                if len(whole) > self.most_bytes:
                    raise self._too_large(len(whole))
                return whole
            async with asyncio.timeout(self.body_s):
                return await self.collect(content, declared)
        except TimeoutError as error:
            raise SlowBodyError(f"the body did not arrive within {self.body_s:g} s; send it again") from error
        except (aiohttp.ClientPayloadError, web.RequestPayloadError) as error:
            raise TornBodyError(f"the body cannot be read to its end: {error}") from error
        except aiohttp.http_exceptions.HttpProcessingError as error:
            raise TornBodyError(f"the body cannot be unpacked: {error.message}") from error

    async def collect(self, content: aiohttp.StreamReader, declared: int) -> bytes:
        """Read to the end. What was declared counts at once; unpacked, it may be more, and then what is in hand counts."""
        self.reserve(declared)
        counted, size = declared, 0
        parts: list[bytes] = []
        try:
            while part := await content.readany():
                size += len(part)
                self.received_bytes += len(part)
                if size > self.most_bytes:
                    raise self._too_large(size)
                if size > counted:
                    self.reserve(size - counted)
                    counted = size
                parts.append(part)
        finally:
            self.release(counted)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _too_large(self, size: int) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body has {size} bytes or more, unpacked; at most {self.most_bytes} are taken")

    def reserve(self, more: int) -> None:
        """Count bytes that are on their way in; raises `TransientError` when there are too many already."""
        if self.receiving_bytes + more > self._most_together:
            raise TransientError(
                f"{self.receiving_bytes} bytes of requests are arriving, no more are taken now; send it again",
                retry_after_s=BUSY_RETRY_S,
            )
        self.receiving_bytes += more

    def release(self, fewer: int) -> None:
        """They have arrived, or never will."""
        self.receiving_bytes -= fewer


def wants_json(request: web.Request, *, otherwise: bool) -> bool:
    """Whether the answer goes out as JSON: as `Accept` says, and else as usual for the route."""
    accept = request.headers.get("Accept", "")
    if wire.CONTENT_TYPE in accept:
        return False
    return wire.JSON_CONTENT_TYPE in accept or otherwise


def wants_zstd(request: web.Request) -> bool:
    """Whether the client asked for it. It has to: on one machine unpacked bytes are cheaper."""
    return "zstd" in request.headers.get("Accept-Encoding", "")


_ENCODER = msgspec.msgpack.Encoder()


def reply(request: web.Request, answer: Any, *, json_by_default: bool = False) -> web.Response:
    """A message, in the form that was asked for."""
    if wants_json(request, otherwise=json_by_default):
        body, content_type = msgspec.json.encode(answer), wire.JSON_CONTENT_TYPE
    else:
        body, content_type = _ENCODER.encode(answer), wire.CONTENT_TYPE
    headers = {"Content-Type": content_type}
    if len(body) >= COMPRESSED_FROM_BYTES and wants_zstd(request):
        body, headers["Content-Encoding"] = compress(body), "zstd"
    return web.Response(body=body, headers=headers)
