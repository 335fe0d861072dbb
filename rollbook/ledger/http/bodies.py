"""Reading request bodies, encoding responses, and streaming the payloads of a batch and status events.

A body is read within limits of size, time and shared memory, so that no client can hold more than its part. aiohttp decompresses
gzip, deflate and zstd while it reads; the size limit applies to the decompressed bytes.
A streamed response is not held in memory as a whole.
"""

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from rollbook.access.event_stream import KEEP_ALIVE, EventStream, json_event
from rollbook.contracts.admission import LedgerStatus
from rollbook.contracts.decoding import json_decoder, msgpack_decoder
from rollbook.contracts.errors import RollbookError, RunError, TransientError
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http import wire
from rollbook.ledger.http.compression import MIN_COMPRESSED_BYTES, StreamCompressor, compress

M = TypeVar("M", bound=wire.Message)

MEGABYTE = 1_000_000
ENCODINGS = frozenset({"", "identity", "gzip", "deflate", "zstd"})
BUSY_RETRY_S = 1.0
PIECE_BYTES = 262_144
"""A larger write would be copied in one go and block the event loop."""
MIN_EVENT_INTERVAL_S = 0.2
"""People and plots need no more events than this."""


class BodyTooLargeError(RunError):
    """The decompressed body exceeds `max_body_mb`."""


class UnsupportedBodyError(RunError):
    """The content type or encoding is not supported."""


class IncompleteBodyError(RunError):
    """The body is truncated or cannot be decompressed."""


class SlowBodyError(RunError):
    """The body did not arrive in time."""


class BodyReader:
    """Reads the request bodies of one server and counts the bytes in transit."""

    def __init__(self, config: LedgerConfig) -> None:
        self.max_bytes = int(config.max_body_mb * MEGABYTE)
        self._max_receiving_bytes = int(config.max_receiving_mb * MEGABYTE)
        self._body_s = config.body_s
        self.receiving_bytes = 0
        self.received_bytes = 0

    async def read(self, request: web.Request, expected: type[M]) -> M:
        """The message in a request, MessagePack or JSON by its content type."""
        content_type = request.content_type
        if content_type not in (wire.CONTENT_TYPE, wire.JSON_CONTENT_TYPE):
            raise UnsupportedBodyError(
                f"the body is {content_type}; send {wire.CONTENT_TYPE} or {wire.JSON_CONTENT_TYPE}"
            )
        encoding = request.headers.get("Content-Encoding", "").lower()
        if encoding not in ENCODINGS:
            raise UnsupportedBodyError(
                f"the body has the encoding {encoding}; send it uncompressed, or compressed with zstd or gzip"
            )
        body = await self.read_bytes(request, timeout_s=self._body_s)
        if content_type == wire.JSON_CONTENT_TYPE:
            return json_decoder(expected).decode_body(body)
        return msgpack_decoder(expected).decode(body)

    async def read_bytes(self, request: web.Request, *, timeout_s: float) -> bytes:
        """The decompressed body."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._collect(request.content, request.content_length or 0)
        except TimeoutError as error:
            raise SlowBodyError(f"the body did not arrive within {timeout_s:g} s; send it again") from error
        except (aiohttp.ClientPayloadError, web.RequestPayloadError) as error:
            raise IncompleteBodyError(f"the body is incomplete: {error}") from error
        except aiohttp.http_exceptions.HttpProcessingError as error:
            raise IncompleteBodyError(f"the body cannot be decompressed: {error.message}") from error

    async def _collect(self, content: aiohttp.StreamReader, declared_bytes: int) -> bytes:
        """Reserves the declared length at once, and more only if the decompressed body turns out longer."""
        if declared_bytes > self.max_bytes:
            raise self._too_large(declared_bytes)
        reserved, size = 0, 0
        parts: list[bytes] = []
        try:
            self._reserve(declared_bytes)
            reserved = declared_bytes
            while part := await content.readany():
                size += len(part)
                self.received_bytes += len(part)
                if size > self.max_bytes:
                    raise self._too_large(size)
                if size > reserved:
                    self._reserve(size - reserved)
                    reserved = size
                parts.append(part)
        finally:
            self.receiving_bytes -= reserved
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _reserve(self, num_bytes: int) -> None:
        if self.receiving_bytes + num_bytes > self._max_receiving_bytes:
            raise TransientError(
                f"{self.receiving_bytes} bytes of requests are in transit, no more are accepted now; send it again",
                retry_after_s=BUSY_RETRY_S,
            )
        self.receiving_bytes += num_bytes

    def _too_large(self, size: int) -> BodyTooLargeError:
        return BodyTooLargeError(f"the decompressed body has at least {size} bytes; the limit is {self.max_bytes}")


def wants_zstd(request: web.Request) -> bool:
    """Only on request: on one machine uncompressed bytes are cheaper."""
    return "zstd" in request.headers.get("Accept-Encoding", "")


def encode_response(request: web.Request, message: Any, *, is_json_default: bool) -> web.Response:
    """A message as MessagePack or JSON, as the `Accept` header says."""
    accept = request.headers.get("Accept", "")
    is_json = wire.CONTENT_TYPE not in accept and (wire.JSON_CONTENT_TYPE in accept or is_json_default)
    body = msgspec.json.encode(message) if is_json else msgspec.msgpack.encode(message)
    headers = {"Content-Type": wire.JSON_CONTENT_TYPE if is_json else wire.CONTENT_TYPE}
    if len(body) >= MIN_COMPRESSED_BYTES and wants_zstd(request):
        body, headers["Content-Encoding"] = compress(body), "zstd"
    return web.Response(body=body, headers=headers)


async def send_frames(
    request: web.Request, payloads: AsyncIterator[bytes], *, is_compressed: bool
) -> web.StreamResponse:
    """Each payload preceded by its length. A slow client delays only its own stream and holds one payload in memory."""
    compressor = StreamCompressor() if is_compressed else None
    stream = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    if compressor is not None:
        stream.headers["Content-Encoding"] = "zstd"
    await stream.prepare(request)
    try:
        async for payload in payloads:
            frame = struct.pack(">Q", len(payload)) + payload
            if compressor is not None:
                frame = await asyncio.to_thread(compressor.feed, frame)
            for start in range(0, len(frame), PIECE_BYTES):
                await stream.write(frame[start : start + PIECE_BYTES])
        if compressor is not None:
            await stream.write(compressor.end())
        await stream.write_eof()
    except RollbookError as error:
        # The status line is already sent. Closing the connection is the only way to report the error.
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the payload stream was aborted: {error}") from error
    return stream


async def send_statuses(request: web.Request, statuses: AsyncIterator[LedgerStatus | None]) -> web.StreamResponse:
    """Server-sent events until the client disconnects or the service stops. None is sent as a keep-alive comment."""
    stream = EventStream(request)
    try:
        await stream.write()
        async for status in statuses:
            if status is None:
                await stream.write(KEEP_ALIVE)
            else:
                await stream.write(json_event(status, "status"))
                await asyncio.sleep(MIN_EVENT_INTERVAL_S)
        await stream.write(json_event({}, "end"))
        await stream.end()
    except ConnectionResetError:
        pass  # the client disconnected
    return stream.response
