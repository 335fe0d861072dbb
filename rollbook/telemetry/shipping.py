"""Telemetry files of another machine: sent in bounded batches, and appended to the run directory by the ledger's service.

A process on another machine writes its events, spans, metrics and output to a directory of that machine. `Shipper` sends what was
added to these files; `ReceivedFiles` appends it to files of the same names. A batch carries its place in the stream, so one that
arrives twice is appended once. Files on the machine are bounded by their own rotation; what is not sent in time is shed and
counted.
"""

import asyncio
import json
import os
import re
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollbook.telemetry.events import MAX_FILE_BYTES

SHIP_EVERY_S = 2.0
BATCH_BYTES = 256 << 10
MAX_BACKLOG_BYTES = 4 << 20
"""Bytes of one file: about an hour of a busy process. A ledger that was away for longer gets the newest part."""
KEPT_BYTES = 1 << 20
STATE_FILE = "shipped.json"
PATTERNS = ("logs/*.jsonl", "logs/*.stderr", "spans/*.jsonl", "metrics-*.jsonl")
NAME = re.compile(r"(?:logs/[\w-][\w.-]*\.(?:jsonl|stderr)|spans/[\w-][\w.-]*\.jsonl|metrics-[\w.-]+\.jsonl)", re.ASCII)


class Send(Protocol):
    def __call__(self, file: str, data: bytes, *, stream: str, start: int) -> Awaitable[None]: ...


@dataclass(slots=True)
class _Position:
    inode: int
    offset: int
    """The next byte of the file."""
    num_sent: int = 0
    """Bytes that were sent, over all files of this name."""


class Shipper:
    """Sends the files of one directory. Its position is kept there, so that a restarted process continues where it was."""

    def __init__(self, directory: Path, send: Send, *, on_shed: Callable[[str, int], None]) -> None:
        """`on_shed` is called with a file and the number of bytes that are not sent."""
        self._directory = directory
        self._send = send
        self._on_shed = on_shed
        state = self._read_state()
        self._stream = str(state.get("stream") or uuid.uuid4().hex)
        self._positions = {name: _Position(*values) for name, values in state.get("positions", {}).items()}
        self._write_state()

    async def run(self, retried: type[Exception]) -> None:
        """Send until cancelled. Batches that failed with `retried` are sent again."""
        while True:
            await asyncio.sleep(SHIP_EVERY_S)
            try:
                await self.ship()
            except retried:
                continue

    async def ship(self) -> None:
        """Send everything that was added. Raises the errors of `send`; the rest is sent next time."""
        for name in sorted(
            str(path.relative_to(self._directory)) for p in PATTERNS for path in self._directory.glob(p)
        ):
            while batch := await asyncio.to_thread(self._next_batch, name):
                position = self._positions[name]
                await self._send(name, batch, stream=self._stream, start=position.num_sent)
                position.offset += len(batch)
                position.num_sent += len(batch)
                await asyncio.to_thread(self._write_state)

    def _next_batch(self, name: str) -> bytes:
        """Empty: nothing was added."""
        path = self._directory / name
        position = self._positions.setdefault(name, _Position(_inode(path), 0))
        if position.inode != _inode(path):
            # The file was renamed because it was full. Its rest goes first.
            full = path.with_name(f"{path.name}.1")
            if _inode(full) == position.inode and (rest := self._read(name, full, position)):
                return rest
            position.inode, position.offset = _inode(path), 0
        return self._read(name, path, position)

    def _read(self, name: str, path: Path, position: _Position) -> bytes:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < position.offset:
                    position.offset = 0  # it was cut
                if size - position.offset > MAX_BACKLOG_BYTES:
                    file.seek(size - KEPT_BYTES)
                    file.readline()
                    self._on_shed(name, file.tell() - position.offset)
                    position.offset = file.tell()
                file.seek(position.offset)
                return file.read(BATCH_BYTES)
        except OSError:
            return b""

    def _read_state(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self._directory / STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found

    def _write_state(self) -> None:
        positions = {name: [p.inode, p.offset, p.num_sent] for name, p in self._positions.items()}
        draft = self._directory / f".{STATE_FILE}"
        try:
            draft.write_text(json.dumps({"stream": self._stream, "positions": positions}), encoding="utf-8")
            draft.replace(self._directory / STATE_FILE)
        except OSError:
            return  # a full disk: after a restart, some batches are sent again


class ReceivedFiles:
    """Files of other machines in a run directory. Each file has one sender at a time."""

    def __init__(self, directory: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._next: dict[str, tuple[str, int]] = {}
        """For each file: the stream of its last batch, and the place after it."""

    def append(self, file: str, data: bytes, *, stream: str, start: int) -> int:
        """Returns the number of bytes before this batch that were sent and never arrived.

        Raises `ValueError` for a name that is not that of a telemetry file.
        """
        check_file_name(file)
        path = self._directory / file
        end = start + len(data)
        known_stream, known_end = self._next.get(file, ("", 0))
        num_lost = max(0, start - known_end) if known_stream == stream else 0
        if known_stream == stream:
            data = data[max(0, known_end - start) :]  # the response to an earlier batch was lost
        elif not known_stream:
            data = data[_num_stored(path, data) :]  # the same, and this service was restarted
        if data:
            # Before the write, so that the last batch is always in the current file.
            if path.exists() and path.stat().st_size > self._max_bytes:
                path.replace(path.with_name(f"{path.name}.1"))
            with path.open("ab", buffering=0) as target:
                target.write(data)
        self._next[file] = (stream, max(end, known_end if known_stream == stream else 0))
        return num_lost


def check_file_name(file: str) -> None:
    """Raises `ValueError` unless it is the name of a telemetry file of a process on another machine."""
    if not NAME.fullmatch(file):
        raise ValueError(f"{file!r} is not the name of a telemetry file, such as logs/policy-a.jsonl")


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _num_stored(path: Path, data: bytes) -> int:
    """How many bytes of the data the file ends with: all of them, or complete lines."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - len(data)))
            tail = file.read()
    except OSError:
        return 0
    ends = [len(data), *(found.end() for found in re.finditer(b"\n", data))]
    return max((end for end in ends if tail.endswith(data[:end])), default=0)
