"""Moves bytes between a sandbox and the host: input and output of commands, contents of files, and connections of `forward`."""

import asyncio
import errno
import fcntl
import os
import resource
import socket
import stat
from collections.abc import Callable
from contextlib import suppress

from rollbook.sandbox.sandbox import ExecResult, OnOutput, SandboxError

READ_BYTES = 1 << 16
DISCARD_INTERVAL_S = 0.01
"""Between reads of output that is discarded: at most 6 MB/s, so that endless output does not occupy the event loop."""
MAX_CONNECTIONS = 64
"""Connections of one sandbox at the same time. Further ones wait. Each takes two file descriptors of this process."""
SHARE_OF_FILES = 8
"""Connections of all sandboxes take at most one file descriptor of so many that this process may have."""
MIN_CONNECTIONS = 4
_forwards: set[object] = set()
"""The open ones of this process, which share its file descriptors."""
SEALS = (
    fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    if hasattr(fcntl, "F_SEAL_SEAL")
    else 0
)


class Output:
    """Reads both output streams of a command. Keeps the first `most_bytes` and discards the rest, slowly."""

    def __init__(self, most_bytes: int, on_output: OnOutput | None, *, is_kept: bool = True) -> None:
        self._left = most_bytes
        self._on_output = on_output
        self._is_kept = is_kept
        self._dropped = 0
        self._streams: dict[int, str] = {}
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def open(self, loop: asyncio.AbstractEventLoop) -> list[int]:
        """The ends of the pipes for the command."""
        self._loop = loop
        ends = []
        for name in self._kept:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self._streams[reader] = name
            loop.add_reader(reader, self._on_readable, reader)
            ends.append(writer)
        return ends

    def close(self) -> None:
        """Take what the command wrote before it ended. Processes in the background may hold the pipes open: do not wait."""
        for fd in list(self._streams):
            while fd in self._streams and self._read(fd):
                if self._left <= 0 and self._is_kept:
                    break
            self._close(fd)

    def result(self, exit_code: int, *, is_timed_out: bool) -> ExecResult:
        return ExecResult(
            exit_code=exit_code,
            stdout=bytes(self._kept["stdout"]),
            stderr=bytes(self._kept["stderr"]),
            dropped_bytes=self._dropped,
            is_timed_out=is_timed_out,
        )

    def _on_readable(self, fd: int) -> None:
        self._read(fd)
        if self._left <= 0 and self._is_kept and fd in self._streams:
            self._loop.remove_reader(fd)
            self._timers[fd] = self._loop.call_later(
                DISCARD_INTERVAL_S, self._loop.add_reader, fd, self._on_readable, fd
            )

    def _read(self, fd: int) -> bool:
        """Whether there may be more."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close(fd)
            return False
        name = self._streams[fd]
        if self._is_kept or name == "stderr":
            self._dropped += max(0, len(data) - self._left)
            data = data[: self._left]
            self._left -= len(data)
            self._kept[name] += data
        if data and self._on_output is not None:
            self._on_output(name, data)
        return True

    def _close(self, fd: int) -> None:
        if self._streams.pop(fd, None) is None:
            return
        timer = self._timers.pop(fd, None)
        if timer is not None:
            timer.cancel()
        self._loop.remove_reader(fd)
        os.close(fd)


async def until_event(add: Callable[..., object], remove: Callable[[int], object], fd: int) -> None:
    """Wait until a file descriptor can be read, or written. `add`, `remove`: the loop's methods for readers, or for writers."""
    happened = asyncio.Event()
    add(fd, happened.set)
    try:
        await happened.wait()
    finally:
        remove(fd)


async def accept_connections(listener: socket.socket, address: tuple[str, int]) -> None:
    """Takes: connections of the sandbox. Gives: their bytes to `address`, and its bytes back. Ends: when cancelled."""
    loop = asyncio.get_running_loop()
    open_ones: set[asyncio.Task[None]] = set()
    _forwards.add(listener)
    try:
        async with asyncio.TaskGroup() as connections:
            while True:
                while len(open_ones) >= _most_connections():
                    await asyncio.wait(open_ones, return_when=asyncio.FIRST_COMPLETED)
                inner, _ = await loop.sock_accept(listener)
                task = connections.create_task(_relay(inner, address), name="sandbox.connection")
                open_ones.add(task)
                task.add_done_callback(open_ones.discard)
    finally:
        _forwards.remove(listener)


def _most_connections() -> int:
    """So that no sandbox can take the connections of the others."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = files // (2 * SHARE_OF_FILES * len(_forwards))
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, share))


async def _relay(inner: socket.socket, address: tuple[str, int]) -> None:
    loop = asyncio.get_running_loop()
    with inner, socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as outer:
        inner.setblocking(False)
        outer.setblocking(False)
        with suppress(OSError):  # one side is gone: so is the connection
            await loop.sock_connect(outer, address)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(_copy(inner, outer), name="sandbox.relay_out")
                directions.create_task(_copy(outer, inner), name="sandbox.relay_in")


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(source, READ_BYTES):
            await loop.sock_sendall(target, data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def input_fd(data: bytes) -> int:
    """Standard input of a command: a file in memory that the command cannot change or enlarge."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY)
    if not SEALS:
        raise SandboxError("standard input needs Linux")
    fd = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    write_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_all(fd: int, max_bytes: int) -> bytes:
    """At most one byte more than `max_bytes`."""
    with os.fdopen(os.dup(fd), "rb") as file:
        return file.read(max_bytes + 1)


def require_regular(fd: int, path: str) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", path)
