"""Reads JSON lines files while other processes append to them. Each poll reads only new bytes."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from rollbook.contracts.decoding import is_too_deep, json_decoder

CHUNK_BYTES = 1 << 20
"""Files are read in chunks, so that gigabytes of history need little memory."""
MAX_LINE_BYTES = 16 << 20
"""A longer line is skipped, so that a broken file cannot fill the memory."""
LARGEST_FLOAT = sys.float_info.max


class JsonTail:
    """Returns the complete lines that were appended since the last poll.

    An incomplete last line is left for the next poll. A line that is not a JSON object (torn by a kill and merged with the next
    record) is skipped and counted. A missing file is empty. A file that shrank or was replaced is read again from the start.
    """

    def __init__(self, path: Path, *, last_bytes: int | None = None) -> None:
        """`last_bytes`: the first poll begins this much before the end of the file."""
        self.path = path
        self._last_bytes = last_bytes
        self.skipped = 0
        self._offset = 0
        self._inode: int | None = None

    def poll(self) -> Iterator[dict[str, Any]]:
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                first = 0 if self._last_bytes is None else max(0, status.st_size - self._last_bytes)
                self._inode, self._offset = status.st_ino, first
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    # Advance line by line: a caller that stops iterating receives the remaining lines at the next poll.
                    self._offset += len(line) + 1
                    row = self._parse(line)
                    if row is not None:
                        yield row
                if len(rest) > MAX_LINE_BYTES:
                    self.skipped += 1
                    self._offset += len(rest)
                    rest = b""

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        if not line.strip():
            return None
        try:
            row = json_decoder(Any).decode(line)
        except msgspec.DecodeError:
            row = _slowly(line)
        if isinstance(row, dict):
            return row
        self.skipped += 1
        return None


def _slowly(line: bytes) -> Any:
    """NaN and infinity are no JSON, but Python writes and reads them."""
    try:
        return None if is_too_deep(line) else json.loads(line)
    except ValueError:
        return None


class FolderTail:
    """Tails all files of a folder whose names match a pattern, including files created later."""

    def __init__(self, folder: Path, pattern: str = "*.jsonl") -> None:
        self.folder = folder
        self._pattern = pattern
        self._tails: dict[Path, JsonTail] = {}

    def poll(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.folder.glob(self._pattern)):
            yield from self._tails.setdefault(path, JsonTail(path)).poll()


def is_number(value: Any) -> TypeGuard[int | float]:
    """Finite, and no bool. Long runs have millions of values, so this calls nothing."""
    return (type(value) is float or type(value) is int) and -LARGEST_FLOAT <= value <= LARGEST_FLOAT
