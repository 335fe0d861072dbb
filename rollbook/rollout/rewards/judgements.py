"""`Judgements`: every answer of a judge as one line of a file, so that no judge is asked again for what it has answered.

The file is the cache and the bill: it also has the answers that could not be used, with their cost. Several workers append to it; a
line is written at once, so lines never mix. If two of them ask for the same content at the same time, both use the first answer. A
line that a killed process left unfinished is skipped.
"""

import os
from pathlib import Path

import msgspec

from rollbook.contracts.decoding import json_decoder


class Judgement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer of a judge."""

    key: str
    """Digest of everything that the judge was sent, of the range of its scores, and of its number among equal judges."""
    function: str
    model: str
    score: float | None = None
    verdicts: tuple[tuple[float, str], ...] = ()
    """Scores and reasons of several episodes of a group, in the order of the prompt."""
    text: str = ""
    """The reason that the judge gave, or its whole answer if that could not be used."""
    cause: str | None = None
    """Why the answer could not be used."""
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    at: float = 0.0
    """Unix time."""


CHUNK, LONGEST_LINE = 1 << 20, 1 << 26
_DECODER = json_decoder(Judgement)
_encode = msgspec.json.Encoder().encode


class Judgements:
    """Blocks for the read of a line; the index of the file is in memory."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None to keep the answers in memory."""
        self._path = path
        self._places: dict[str, tuple[int, int]] = {}
        """Key to offset and length of the line with its usable answer."""
        self._held: dict[str, Judgement] = {}
        self._read_to = 0
        self._file: int | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._read_new()

    def find(self, key: str) -> Judgement | None:
        """The usable answer to this content, even if another process stored it."""
        if self._file is None:
            return self._held.get(key)
        if key not in self._places:
            self._read_new()
        place = self._places.get(key)
        return None if place is None else _DECODER.decode(os.pread(self._file, place[1], place[0]))

    def add(self, judgement: Judgement) -> Judgement:
        """Store an answer. Returns the first usable one to its content, which all workers use."""
        if self._file is None:
            return judgement if judgement.cause is not None else self._held.setdefault(judgement.key, judgement)
        size = os.fstat(self._file).st_size
        is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        os.write(self._file, (b"\n" if is_torn else b"") + _encode(judgement) + b"\n")
        return judgement if judgement.cause is not None else self.find(judgement.key) or judgement

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read_new(self) -> None:
        """Index the complete lines that were added since the last call."""
        assert self._file is not None
        while chunk := os.pread(self._file, CHUNK, self._read_to):
            end = chunk.rfind(b"\n") + 1
            if end == 0:
                longer = os.pread(self._file, LONGEST_LINE, self._read_to)
                end = longer.rfind(b"\n") + 1
                if end == 0:
                    return
                chunk = longer
            start = 0
            for line in chunk[:end].splitlines(keepends=True):
                self._index(line, self._read_to + start)
                start += len(line)
            self._read_to += end

    def _index(self, line: bytes, offset: int) -> None:
        try:
            found = _DECODER.decode(line)
        except msgspec.MsgspecError:
            return  # left unfinished by a killed process
        if found.cause is None:
            self._places.setdefault(found.key, (offset, len(line)))
