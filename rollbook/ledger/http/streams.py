"""Streamed responses: the payloads of a batch, and status events. Neither is held in memory as a whole."""

import asyncio
import struct
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from rollbook.contracts.admission import LedgerStatus
from rollbook.contracts.errors import RollbookError
from rollbook.ledger.http.compression import StreamCompressor

PIECE_BYTES = 262_144
"""A larger write would be copied in one go and block the event loop."""
MIN_EVENT_INTERVAL_S = 0.2
"""People and plots need no more events than this."""


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
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await stream.prepare(request)
    try:
        async for status in statuses:
            if status is None:
                await stream.write(b": keep-alive\n\n")
            else:
                await stream.write(b"event: status\ndata: " + msgspec.json.encode(status) + b"\n\n")
                await asyncio.sleep(MIN_EVENT_INTERVAL_S)
        await stream.write(b"event: end\ndata: {}\n\n")
        await stream.write_eof()
    except ConnectionResetError:
        pass  # the client disconnected
    return stream
