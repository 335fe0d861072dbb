"""Reading a file of JSON lines while others write it: each poll costs what is new, whatever the size of the file."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read in pieces, so that opening a run with gigabytes of history needs no gigabytes of memory.
CHUNK_BYTES = 1 << 20
# A line longer than this is no record of ours. It is passed over, so that a broken file cannot fill the memory.
MAX_LINE_BYTES = 16 << 20


class JsonTail:
    """Whole lines that were appended since the last poll.

    A line counts once its newline is there: a torn last line is left for the next poll. What is no JSON object (a line torn by a
    kill, with the next record glued to it) is passed over and counted. A file that is not there yet is empty; one that shrank or
    was replaced is read again from its start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed_over = 0
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
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            held = b""
            while chunk := file.read(CHUNK_BYTES):
                *lines, held = (held + chunk).split(b"\n")
                for line in lines:
                    # Moved line by line: whoever stops iterating gets the rest next time.
                    self._offset += len(line) + 1
                    row = self._parsed(line)
                    if row is not None:
                        yield row
                if len(held) > MAX_LINE_BYTES:
                    self.passed_over += 1
                    self._offset += len(held)
                    held = b""

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except ValueError:
            self.passed_over += 1
            return None
        if not isinstance(row, dict):
            self.passed_over += 1
            return None
        return row


class FolderTail:
    """The tails of all `*.jsonl` files of a folder; files that appear later are found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tails: dict[Path, JsonTail] = {}

    def poll(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.folder.glob("*.jsonl")):
            yield from self._tails.setdefault(path, JsonTail(path)).poll()
