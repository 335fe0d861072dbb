"""Answers that take their time: payloads of a batch, and the status as it changes. Neither is ever whole in memory."""

import asyncio
import struct
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from rollbook.contracts.admission import LedgerStatus
from rollbook.contracts.errors import RollbookError
from rollbook.ledger.http.bodies import wants_zstd
from rollbook.ledger.http.compression import StreamCompressor

PIECE_BYTES = 262_144
"""A larger write would be copied in one go, and everybody else would wait for it."""
QUIET_S = 15.0
"""A watcher hears at least this often, so that proxies and clients know the connection lives."""
PACE_S = 0.2
"""A watcher is told at most this often: people and plots need no more."""


async def send_frames(request: web.Request, payloads: AsyncIterator[bytes]) -> web.StreamResponse:
    """Each payload behind its length. A slow reader holds up its own stream, and one payload of it in memory."""
    packer = StreamCompressor() if wants_zstd(request) else None
    stream = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    if packer is not None:
        stream.headers["Content-Encoding"] = "zstd"
    await stream.prepare(request)
    try:
        async for payload in payloads:
            frame = struct.pack(">Q", len(payload)) + payload
            if packer is not None:
                frame = await asyncio.to_thread(packer.feed, frame)
            await _send(stream, frame)
        if packer is not None:
            await stream.write(packer.end())
        await stream.write_eof()
    except RollbookError as error:
        # The status went out long ago. Only a connection that breaks off tells the client that this is not the end.
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the payloads broke off: {error}") from error
    return stream


async def _send(stream: web.StreamResponse, frame: bytes) -> None:
    if len(frame) <= PIECE_BYTES:
        await stream.write(frame)
        return
    whole = memoryview(frame)
    for start in range(0, len(whole), PIECE_BYTES):
        await stream.write(bytes(whole[start : start + PIECE_BYTES]))


async def send_statuses(request: web.Request, statuses: AsyncIterator[LedgerStatus | None]) -> web.StreamResponse:
    """Server-sent events, until the client goes or the service closes."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await stream.prepare(request)
    try:
        async for status in statuses:
            if status is None:
                await stream.write(b": quiet\n\n")
            else:
                await stream.write(b"event: status\ndata: " + msgspec.json.encode(status) + b"\n\n")
                await asyncio.sleep(PACE_S)
        await stream.write(b"event: end\ndata: {}\n\n")
        await stream.write_eof()
    except ConnectionResetError:
        pass  # the watcher left
    return stream
