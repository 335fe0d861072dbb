"""Sending a batch: some groups at a time, read and compressed in the store's reader threads, sent in order.

The event loop only forwards bytes. While one piece is being sent, the next two are prepared: compression is most of the work and
releases the interpreter's lock, so a second core halves the trainer's waiting time. Each piece is compressed separately and ends
on a whole byte; concatenated they are one gzip stream.
"""

import asyncio
import struct
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from isal import isal_zlib

from rollbook.contracts.group import GroupId
from rollbook.ledger.atropos.bodies import accepts_gzip, flushed
from rollbook.ledger.atropos.rules import Handed
from rollbook.ledger.atropos.service import AtroposService

GROUPS_PER_PIECE = 8
PIECES_AHEAD = 2
"""Together they bound the memory that one trainer's request takes."""
OPENING, SEPARATOR, CLOSING = b'{"batch":[', b",", b"]}"
RAW_DEFLATE = -15
"""Window bits that make zlib write neither header nor trailer."""
LEVEL = 3
"""With this library as fast as any level, and the smallest output."""
GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the body, ready to send; if compressed, with its share of the gzip trailer."""

    parts: Sequence[bytes | memoryview]
    crc: int = 0
    size: int = 0
    """Uncompressed bytes."""


Payloads = Sequence[bytes | memoryview]
Encode = Callable[[Payloads], Piece]


async def deliver_batch(request: web.Request, service: AtroposService, handed: Handed) -> web.StreamResponse:
    """Raises if the batch could not be sent completely."""
    ids = [entry.group_id for entry in handed.manifest.entries]
    answer = web.StreamResponse(headers={"Content-Type": "application/json", "Vary": "Accept-Encoding"})
    is_compressed = accepts_gzip(request)
    if is_compressed:
        answer.headers["Content-Encoding"] = "gzip"
    try:
        async with asyncio.timeout(service.config.serve_s):
            await answer.prepare(request)
            async with aclosing(_pieces(service, ids, is_compressed=is_compressed)) as pieces:
                last = await _send(answer, pieces, is_compressed=is_compressed)
            # Without its end the body is not complete: no other front end may have sent the batch meanwhile.
            await service.renew_serving(handed)
            await answer.write(last)
            await answer.write_eof()
            await flushed(request)
    except asyncio.CancelledError:
        raise
    except Exception:
        # A partial body must not look complete.
        if request.transport is not None:
            request.transport.abort()
        raise
    return answer


async def _send(answer: web.StreamResponse, pieces: AsyncIterator[Piece], *, is_compressed: bool) -> bytes:
    """Everything but the last bytes of the body, which are returned."""
    crc, size = 0, 0
    await answer.write(GZIP_HEADER if is_compressed else OPENING)
    async for piece in pieces:
        for part in piece.parts:
            await answer.write(part)
        if is_compressed:
            crc = isal_zlib.crc32_combine(crc, piece.crc, piece.size)
            size += piece.size
    return struct.pack("<II", crc, size & 0xFFFFFFFF) if is_compressed else CLOSING


async def _pieces(
    service: AtroposService, ids: Sequence[GroupId], *, is_compressed: bool
) -> AsyncGenerator[Piece, None]:
    """The pieces of the body, in order."""
    waiting: deque[asyncio.Task[Piece]] = deque()
    try:
        for start in range(0, len(ids), GROUPS_PER_PIECE):
            some = ids[start : start + GROUPS_PER_PIECE]
            is_last = start + GROUPS_PER_PIECE >= len(ids)
            encode = _compressed(is_first=start == 0, is_last=is_last) if is_compressed else _plain(is_first=start == 0)
            waiting.append(asyncio.create_task(service.payloads(some, encode), name="atropos.piece"))
            if len(waiting) == PIECES_AHEAD:
                yield await waiting.popleft()
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _plain(*, is_first: bool) -> Encode:
    def encode(payloads: Payloads) -> Piece:
        parts: list[bytes | memoryview] = []
        for payload in payloads:
            parts += (SEPARATOR, payload)
        return Piece(parts[1:] if is_first else parts)

    return encode


def _compressed(*, is_first: bool, is_last: bool) -> Encode:
    def encode(payloads: Payloads) -> Piece:
        # One call that compresses everything: each return from such a call waits for the interpreter's lock.
        parts: list[bytes | memoryview] = [OPENING if is_first else SEPARATOR]
        for payload in payloads:
            parts += (payload, SEPARATOR)
        parts[-1] = CLOSING if is_last else b""
        whole = b"".join(parts)
        compressor: Any = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, RAW_DEFLATE)
        compressed = compressor.compress(whole)
        ending = compressor.flush(isal_zlib.Z_FINISH if is_last else isal_zlib.Z_SYNC_FLUSH)
        return Piece((compressed, ending), isal_zlib.crc32(whole), len(whole))

    return encode
