"""The embedded store: one SQLite file in the run directory, payloads in segments beside it, write-ahead log, one writer.

One thread owns the writing connection. It takes every operation that waits (`committer`), runs all in one transaction, writes their
rows together (`write_behind`) and commits once. An operation that fails takes back its own effects only. Readers have connections
of their own and never wait for the writer.
"""

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from rollbook.contracts.admission import RunId
from rollbook.ledger.config import Durability
from rollbook.ledger.store import StoreFaultError, Transaction
from rollbook.ledger.stores.sql.committer import Committer
from rollbook.ledger.stores.sqlite.file import FILE_NAME, connect, explained
from rollbook.ledger.stores.sqlite.migrations import require_known_schema
from rollbook.ledger.stores.sqlite.segment_compaction import close_holes, segment_bytes
from rollbook.ledger.stores.sqlite.segment_recovery import remove_unused
from rollbook.ledger.stores.sqlite.segment_transaction import SegmentedTransaction
from rollbook.ledger.stores.sqlite.writer import SqliteWriter

T = TypeVar("T")

READERS = 3
"""Two may be packing a batch; whoever looks meanwhile does not wait for them."""


class SqliteStore:
    """Satisfies `store.Store`. Made by `open_sqlite_store`."""

    def __init__(self, path: Path, durability: Durability, loop: asyncio.AbstractEventLoop) -> None:
        self.path = path
        self._loop = loop
        self._writer = SqliteWriter(path, durability)
        self._committer = Committer(self._writer.commit, loop)
        self._readers = _Readers(path)

    async def write(self, work: Callable[[Transaction], T], *, before: Callable[[], None] | None = None) -> T:
        return await self._committer.write(work, before=before)

    async def read(self, work: Callable[[Transaction], T]) -> T:
        return await self._loop.run_in_executor(self._readers.pool, self._readers.read, work)

    def listen(self, heard: Callable[[RunId], None]) -> None:
        self._committer.listen(heard)

    def close(self) -> None:
        self._committer.close()
        self._writer.close()
        self._readers.close()


class _Readers:
    """A few threads, each with a connection of its own that can only read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._open: list[sqlite3.Connection] = []
        self.pool = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="ledger-reader")

    def read(self, work: Callable[[Transaction], T]) -> T:
        with explained(self._path):
            db: sqlite3.Connection | None = getattr(self._local, "db", None)
            if db is None:
                db = self._local.db = connect(self._path, read_only=True)
                self._open.append(db)
            return _read(db, work, self._path.parent)

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for db in self._open:
            db.close()


def _read(db: sqlite3.Connection, work: Callable[[Transaction], T], directory: Path) -> T:
    db.execute("BEGIN")
    try:
        return work(SegmentedTransaction(db, directory))
    finally:
        db.execute("ROLLBACK")


def _make_directory(directory: Path) -> None:
    """With its parents, and known to the disk: SQLite syncs what lies in the directory, not the way there."""
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        handle = os.open(directory.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@asynccontextmanager
async def open_sqlite_store(
    directory: Path, *, durability: Durability = Durability.POWER_LOSS
) -> AsyncIterator[SqliteStore]:
    path = directory / FILE_NAME
    try:
        _make_directory(directory)
    except OSError as error:
        raise StoreFaultError(f"ledger directory {directory} cannot be made: {error.strerror}") from error
    store = SqliteStore(path, durability, asyncio.get_running_loop())
    try:
        yield store
    finally:
        await asyncio.to_thread(store.close)


class LedgerFile:
    """The file of a run, live or dead, read by somebody who is not its ledger. Satisfies `store.Reader`."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self.path = path
        self._db = db

    def read_now(self, work: Callable[[Transaction], T]) -> T:
        with explained(self.path):
            return _read(self._db, work, self.path.parent)


@contextmanager
def open_readonly(directory: Path) -> Iterator[LedgerFile]:
    """Open the ledger of a run to look at it: nothing is locked, changed or moved on."""
    path = directory / FILE_NAME
    if not path.is_file():
        raise StoreFaultError(f"{directory} has no {FILE_NAME}: it is not the ledger directory of a run")
    # Without a log beside it the file is whole in itself, and can be read even where nothing may be written.
    query = "" if path.with_name(f"{FILE_NAME}-wal").exists() else "&immutable=1"
    db = connect(path, read_only=True, query=query)
    try:
        with explained(path):
            require_known_schema(db, path)
        yield LedgerFile(path, db)
    finally:
        db.close()


def reclaim(directory: Path) -> tuple[int, int]:
    """Write file and segments anew without their holes. Needs them alone, and room for a second copy of what is written anew.

    Returns the bytes before and after.
    """
    path = directory / FILE_NAME
    db = connect(path, read_only=False)
    try:
        with explained(path):
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            before = path.stat().st_size + segment_bytes(directory)
            close_holes(db, directory)
            db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            # Only now: the rows that point elsewhere are on the disk.
            remove_unused(db, directory)
    finally:
        db.close()
    return before, path.stat().st_size + segment_bytes(directory)
