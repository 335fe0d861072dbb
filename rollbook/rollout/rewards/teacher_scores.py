"""`ScoreStore`: the newest answers of teachers in a SQLite file, so that no teacher is asked twice for the same content.

What was trained is in the ledger with its scores. The file is for sequences that are not there yet: of a group whose worker was
killed after the teacher had answered. Several workers share it.
"""

import sqlite3
from pathlib import Path
from time import monotonic, sleep

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.decoding import msgpack_decoder
from rollbook.contracts.trajectory import COLUMNS

KEPT = 16_384
"""More sequences than are played at once."""
PRUNE_EVERY = 256
BUSY_S = 30.0
DAMAGED = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})


class SequenceScores(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a teacher says about the tokens of one sequence. The first token has no score: NaN."""

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32] | None = None
    """One row for each token, likeliest first; -1 where there are fewer."""
    top_logprobs: NDArray[np.float16] | None = None
    version: int | None = None
    """The publication that scored, if the server reports it."""

    def without(self, start: int, end: int) -> "SequenceScores":
        """The scores without those of the tokens `start` to `end` (exclusive)."""

        def rest(array: NDArray[np.generic]) -> NDArray[np.generic]:
            return np.delete(array, slice(start, end), axis=0)

        tops = [None if array is None else rest(array) for array in (self.top_ids, self.top_logprobs)]
        return SequenceScores(
            logprobs=rest(self.logprobs),  # type: ignore[arg-type]
            top_ids=tops[0],  # type: ignore[arg-type]
            top_logprobs=tops[1],  # type: ignore[arg-type]
            version=self.version,
        )


class _Stored(msgspec.Struct, array_like=True):
    logprobs: bytes
    top_ids: bytes | None = None
    top_logprobs: bytes | None = None


_IDS, _LOGPROBS = COLUMNS["teacher_top_ids"], COLUMNS["teacher_top_logprobs"]
_DECODER = msgpack_decoder(_Stored)


class ScoreStore:
    """Blocks for a read or write of one row."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None to keep the answers in memory."""
        self._path = path
        self._db = _connected(path)
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            self._replace(error)
        self._added = 0

    def _replace(self, error: sqlite3.DatabaseError) -> None:
        """A cache: a damaged one is replaced. Other errors, such as a full disk, say nothing about the file, which others use."""
        if self._path is None or _kind_of(error) not in DAMAGED:
            raise error
        self._db.close()  # before: the last connection removes the log by its name
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self._db = _connected(self._path)
        self._prepare()

    def _prepare(self) -> None:
        _use_wal(self._db)
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("CREATE TABLE IF NOT EXISTS scores (number INTEGER PRIMARY KEY, key TEXT UNIQUE, answer BLOB)")

    def find(self, key: str) -> SequenceScores | None:
        try:
            row = self._db.execute("SELECT answer FROM scores WHERE key = ?", (key,)).fetchone()
        except sqlite3.DatabaseError as error:
            self._replace(error)
            return None
        if row is None:
            return None
        stored = _DECODER.decode(row[0])
        logprobs = np.frombuffer(stored.logprobs, "<f4").astype(np.float32)
        if stored.top_ids is None or stored.top_logprobs is None:
            return SequenceScores(logprobs=logprobs)
        return SequenceScores(
            logprobs=logprobs,
            top_ids=_IDS.decode(stored.top_ids, num_tokens=len(logprobs)),
            top_logprobs=_LOGPROBS.decode(stored.top_logprobs, num_tokens=len(logprobs)),
        )

    def add(self, key: str, scores: SequenceScores) -> None:
        stored = _Stored(
            logprobs=scores.logprobs.astype("<f4").tobytes(),
            top_ids=None if scores.top_ids is None else _IDS.encode(scores.top_ids),
            top_logprobs=None if scores.top_logprobs is None else _LOGPROBS.encode(scores.top_logprobs),
        )
        self._added += 1
        try:
            self._db.execute(
                "INSERT OR IGNORE INTO scores (key, answer) VALUES (?, ?)", (key, msgspec.msgpack.encode(stored))
            )
            if self._added % PRUNE_EVERY == 0:
                self._db.execute("DELETE FROM scores WHERE number <= (SELECT max(number) FROM scores) - ?", (KEPT,))
        except sqlite3.DatabaseError as error:
            self._replace(error)

    def close(self) -> None:
        self._db.close()


def _connected(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    place = ":memory:" if path is None else path
    return sqlite3.connect(place, timeout=BUSY_S, isolation_level=None, check_same_thread=False)


def _use_wal(db: sqlite3.Connection) -> None:
    """If workers start together, one of them changes the mode, and SQLite gives the others an error instead of waiting."""
    give_up_at = monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if _kind_of(error) != sqlite3.SQLITE_BUSY or monotonic() >= give_up_at:
                raise
            sleep(0.01)
        else:
            return


def _kind_of(error: sqlite3.Error) -> int:
    """The primary result code of SQLite. Its higher bits say more."""
    return error.sqlite_errorcode & 0xFF
