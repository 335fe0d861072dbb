"""Sending a batch: some groups at a time, read and packed in the threads of the store's readers, written in order.

The event loop only passes bytes on. While one piece is on its way to the client the next ones are being made, two at a time:
packing is most of the work and needs no lock, so that a second core halves how long a trainer waits. Each piece is packed by itself
and ends on a whole byte; put together they are one gzip stream.
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
from rollbook.ledger.atropos.service import AtroposDesk

GROUPS_IN_ONE_READ = 8
MADE_AHEAD = 2
"""Together they bound what one trainer keeps in the service's memory."""
OPENING, SEPARATOR, CLOSING = b'{"batch":[', b",", b"]}"
RAW_DEFLATE = -15
"""Window bits that make zlib write neither header nor trailer."""
LEVEL = 3
"""With this library as cheap as any, and it gives the least to send."""
GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the body, ready to be sent; packed, also what the gzip trailer wants to know of it."""

    parts: Sequence[bytes | memoryview]
    crc: int = 0
    size: int = 0
    """Bytes, unpacked."""


Payloads = Sequence[bytes | memoryview]
Make = Callable[[Payloads], Piece]


async def deliver_batch(request: web.Request, desk: AtroposDesk, ids: Sequence[GroupId]) -> web.StreamResponse:
    """Raises when the batch could not be written to its end."""
    answer = web.StreamResponse(headers={"Content-Type": "application/json", "Vary": "Accept-Encoding"})
    is_packed = accepts_gzip(request)
    if is_packed:
        answer.headers["Content-Encoding"] = "gzip"
    try:
        async with asyncio.timeout(desk.config.serve_s):
            await answer.prepare(request)
            async with aclosing(_pieces(desk, ids, is_packed=is_packed)) as pieces:
                await _send(answer, request, pieces, is_packed=is_packed)
            await answer.write_eof()
            await flushed(request)
    except asyncio.CancelledError:
        raise
    except Exception:
        # Half a body must not look like a whole one.
        if request.transport is not None:
            request.transport.abort()
        raise
    return answer


async def _send(
    answer: web.StreamResponse, request: web.Request, pieces: AsyncIterator[Piece], *, is_packed: bool
) -> None:
    crc, size = 0, 0
    await answer.write(GZIP_HEADER if is_packed else OPENING)
    async for piece in pieces:
        for part in piece.parts:
            await _write(answer, request, part)
        if is_packed:
            crc = isal_zlib.crc32_combine(crc, piece.crc, piece.size)
            size += piece.size
    await answer.write(struct.pack("<II", crc, size & 0xFFFFFFFF) if is_packed else CLOSING)


async def _write(answer: web.StreamResponse, request: web.Request, part: bytes | memoryview) -> None:
    """As aiohttp would, without its copy of the part, and with its patience for a client that reads slowly."""
    transport = request.transport
    if not answer.chunked or transport is None or transport.is_closing():
        await answer.write(part)
        return
    transport.write(b"%x\r\n" % len(part))
    transport.write(part)
    transport.write(b"\r\n")
    await request.protocol._drain_helper()


async def _pieces(desk: AtroposDesk, ids: Sequence[GroupId], *, is_packed: bool) -> AsyncGenerator[Piece, None]:
    """In order. Takes: groups of the store. Ends: with the last of them, or when nobody wants more."""
    waiting: deque[asyncio.Task[Piece]] = deque()
    try:
        for start in range(0, len(ids), GROUPS_IN_ONE_READ):
            some = ids[start : start + GROUPS_IN_ONE_READ]
            is_last = start + GROUPS_IN_ONE_READ >= len(ids)
            make = _packed(is_first=start == 0, is_last=is_last) if is_packed else _plain(is_first=start == 0)
            waiting.append(asyncio.create_task(desk.payloads(some, make), name="atropos.piece"))
            if len(waiting) == MADE_AHEAD:
                yield await waiting.popleft()
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _plain(*, is_first: bool) -> Make:
    def make(payloads: Payloads) -> Piece:
        parts: list[bytes | memoryview] = []
        for payload in payloads:
            parts += (SEPARATOR, payload)
        return Piece(parts[1:] if is_first else parts)

    return make


def _packed(*, is_first: bool, is_last: bool) -> Make:
    def make(payloads: Payloads) -> Piece:
        # One call that packs all of it: each return from such a call waits for the interpreter's lock.
        parts: list[bytes | memoryview] = [OPENING if is_first else SEPARATOR]
        for payload in payloads:
            parts += (payload, SEPARATOR)
        parts[-1] = CLOSING if is_last else b""
        whole = b"".join(parts)
        packer: Any = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, RAW_DEFLATE)
        packed = packer.compress(whole)
        ending = packer.flush(isal_zlib.Z_FINISH if is_last else isal_zlib.Z_SYNC_FLUSH)
        return Piece((packed, ending), isal_zlib.crc32(whole), len(whole))

    return make
