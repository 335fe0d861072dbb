"""Messages between a parent and its child: length-prefixed byte strings over a socket pair. The rooms choose the encoding.

`Frames` is for event loops, `BlockingFrames` for threads. EOF, even in the middle of a frame, reads as None.
"""

import asyncio
import socket
import threading
from typing import Self

LENGTH_BYTES = 8
MAX_FRAME_BYTES = 1 << 34
"""A training batch may hold gigabytes. A length above this can only be garbage."""
READ_AHEAD_BYTES = 1 << 20


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next payload; None when the peer is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        return await reader.readexactly(length) if length <= MAX_FRAME_BYTES else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class Frames:
    """One end of a connection, in an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> Self:
        return cls(*await asyncio.open_connection(sock=sock, limit=READ_AHEAD_BYTES))

    def send(self, payload: bytes) -> None:
        """Buffer a message. Without effect once the connection is closed."""
        if not self._writer.is_closing():
            self._writer.write(frame(payload))

    async def drain(self) -> None:
        """Wait until the peer has read most of what was sent. Raises `ConnectionError` when it is gone."""
        await self._writer.drain()

    async def receive(self) -> bytes | None:
        """The next message; None when the peer is gone."""
        return await read_frame(self._reader)

    def close(self) -> None:
        self._writer.close()


class BlockingFrames:
    """One end of a connection, for threads. `send` is safe from several threads; `receive` belongs to one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, payload: bytes) -> None:
        """Returns when the kernel has taken the message. Raises `OSError` when the peer is gone."""
        with self._lock:
            self._sock.sendall(frame(payload))

    def receive(self) -> bytes | None:
        """The next message; None when the peer is gone."""
        head = self._read(LENGTH_BYTES)
        length = MAX_FRAME_BYTES + 1 if head is None else int.from_bytes(head, "big")
        return self._read(length) if length <= MAX_FRAME_BYTES else None

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def _read(self, size: int) -> bytes | None:
        buffer = bytearray(size)
        view = memoryview(buffer)
        read = 0
        while read < size:
            try:
                count = self._sock.recv_into(view[read:])
            except ConnectionError:
                return None
            if count == 0:
                return None
            read += count
        return bytes(buffer)
