"""The embedded store: one SQLite file in the run directory with a write-ahead log, and payloads in segment files next to it.

A file that turns out to be damaged is refused from then on: the growing tables are checked while the store already serves.

One thread owns the writing connection. It runs all waiting operations in one transaction (`committer`), writes their rows together
(`write_buffer`) and commits once. Readers have their own connections and never wait for the writer.

The same store exists in memory, for tests and tutorials: one connection, which also serves the reads.
"""

import asyncio
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.config import Durability
from rollbook.ledger.journal import Journal, rewrite_journal
from rollbook.ledger.store import StoreFaultError, StoreInUseError, Transaction
from rollbook.ledger.stores.sql.committer import Committer
from rollbook.ledger.stores.sql.transaction import SqlTransaction
from rollbook.ledger.stores.sql.write_buffer import SqlSession
from rollbook.ledger.stores.sqlite.file import (
    FILE_NAME,
    MEMORY,
    check_integrity,
    connect,
    explained,
    find_damage,
    require_tables,
)
from rollbook.ledger.stores.sqlite.segment_payloads import SegmentPayloads
from rollbook.ledger.stores.sqlite.segment_upkeep import close_holes, remove_unused, segment_bytes
from rollbook.ledger.stores.sqlite.segments import sync_directory
from rollbook.ledger.stores.sqlite.writer import SqliteWriter

T = TypeVar("T")

LOCK_FILE = "service.lock"
LOCK_POLL_S = 0.05
READERS = 3
"""Two may be encoding a batch; a third serves status requests meanwhile."""


class SqliteStore:
    """Satisfies `store.Store`. Opened by `open_sqlite_store` and `open_memory_store`."""

    is_shared = False

    def __init__(self, path: Path, durability: Durability, loop: asyncio.AbstractEventLoop) -> None:
        self.path = path
        self._loop = loop
        self._writer = SqliteWriter(path, durability)
        self._committer = Committer(self._writer.commit, loop)
        self._readers = None if path == MEMORY else _Readers(path)
        self._check = None if path == MEMORY else _BackgroundCheck(path)
        self._journal = None if path == MEMORY else Journal(path.parent)

    async def write(
        self,
        work: Callable[[Transaction], T],
        *,
        run_id: RunId | None = None,
        before: Callable[[], None] | None = None,
    ) -> T:
        self._refuse_if_damaged()
        return await self._committer.write(work, run_id=run_id, before=before)

    async def read(self, work: Callable[[Transaction], T]) -> T:
        self._refuse_if_damaged()
        if self._readers is None:
            return await self._committer.write(work)
        return await self._loop.run_in_executor(self._readers.pool, self._readers.read, work)

    async def journal(self, run_id: RunId, *, checkpoint: bool = False) -> None:
        if self._readers is None or self._journal is None:
            return
        append = partial(
            self._journal.append,
            run_id,
            self._readers.read,
            places=_places,
            sync_store=self._writer.sync_log,
            is_synced=checkpoint,
        )
        await self._loop.run_in_executor(self._readers.pool, append)
        if checkpoint:
            self._writer.is_checkpoint_due = True
            await self._committer.write(lambda _: None)

    def listen(self, on_change: Callable[[RunId], None]) -> None:
        self._committer.listen(on_change)

    def close(self) -> None:
        if self._check is not None:
            self._check.close()
        self._committer.close()
        if self._readers is not None:
            self._readers.close()
        # Last: only a writing connection without readers can move all commits from the log to the database.
        self._writer.close()

    def _refuse_if_damaged(self) -> None:
        if self._check is not None and self._check.fault is not None:
            raise StoreFaultError(str(self._check.fault)) from self._check.fault


class _BackgroundCheck:
    """Checks the growing tables once, in its own thread. `fault` is set if one is damaged."""

    def __init__(self, path: Path) -> None:
        self.fault: StoreFaultError | None = None
        self._path = path
        self._db = connect(path, read_only=True)
        self._thread = threading.Thread(target=self._run, name="ledger-check", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with explained(self._path):
                check_integrity(self._db, self._path, growing=True)
        except StoreFaultError as error:
            self.fault = error
        except sqlite3.OperationalError:
            pass  # interrupted by `close`

    def close(self) -> None:
        self._db.interrupt()
        self._thread.join()
        self._db.close()


class _Readers:
    """A few threads, each with its own read-only connection."""

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
            return _read(db, work, self._path)

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for db in self._open:
            db.close()


def _read(db: sqlite3.Connection, work: Callable[[Transaction], T], path: Path, *, is_alone: bool = False) -> T:
    """`is_alone`: the caller holds the lock of the service, and no other process writes."""
    db.execute("BEGIN")
    try:
        session = SqlSession(db)
        payloads = SegmentPayloads(session, path.parent)

        def check_file(is_complete: bool) -> Iterator[str]:
            return find_damage(
                db, path, is_complete=is_complete, is_in_service=not is_alone and is_in_service(path.parent)
            )

        return work(SqlTransaction(session, f"ledger file {path}", payloads=payloads, check_file=check_file))
    finally:
        db.execute("ROLLBACK")


def _places(tx: Transaction) -> Callable[[RunId, Sequence[GroupId]], dict[GroupId, tuple[int, int]]]:
    assert isinstance(tx.payloads, SegmentPayloads)
    return tx.payloads.places


def _make_directory(directory: Path) -> None:
    """Make the directory and its parents durably: SQLite syncs only the directory of the file itself."""
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir(exist_ok=True, mode=0o700)
        sync_directory(directory.parent)


def _require_directory(directory: Path) -> None:
    try:
        _make_directory(directory)
    except OSError as error:
        raise StoreFaultError(f"ledger directory {directory} cannot be made: {error.strerror}") from error


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_in_service(directory: Path) -> bool:
    """Whether a process, this one or another, serves the ledger in this directory."""
    try:
        with (directory / LOCK_FILE).open("r", encoding="ascii") as lock:
            return not _try_lock(lock)
    except OSError:
        return False


@contextmanager
def only_service(directory: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Lock the directory against a second service, which would not be notified of the changes of the first.

    The kernel releases the lock when this process ends. If another process has the lock for longer than `wait_s`, this one is
    refused.
    """
    _require_directory(directory)
    try:
        lock = (directory / LOCK_FILE).open("a+", encoding="ascii")
    except OSError as error:
        raise StoreFaultError(f"ledger directory {directory} cannot be written: {error.strerror}") from error
    until = time.monotonic() + wait_s
    with lock:
        while not _try_lock(lock):
            if time.monotonic() > until:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                raise StoreInUseError(
                    f"the ledger in {directory} is in use by another service (pid {holder}). Stop that one, or use a "
                    "PostgreSQL store, which several services can share"
                )
            time.sleep(LOCK_POLL_S)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@asynccontextmanager
async def open_sqlite_store(
    directory: Path, *, durability: Durability = Durability.POWER_LOSS
) -> AsyncIterator[SqliteStore]:
    _require_directory(directory)
    async with _opened(directory / FILE_NAME, durability) as store:
        yield store


@asynccontextmanager
async def open_memory_store() -> AsyncIterator[SqliteStore]:
    async with _opened(MEMORY, Durability.PROCESS_CRASH) as store:
        yield store


@asynccontextmanager
async def _opened(path: Path, durability: Durability) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, durability, asyncio.get_running_loop())
    try:
        yield store
    finally:
        await asyncio.to_thread(store.close)


class LedgerFile:
    """Read-only access to the file of a run that may be live. Satisfies `store.Reader`."""

    def __init__(self, path: Path, db: sqlite3.Connection, *, is_alone: bool) -> None:
        self.path = path
        self._db = db
        self._is_alone = is_alone

    def read_now(self, work: Callable[[Transaction], T]) -> T:
        with explained(self.path):
            return _read(self._db, work, self.path, is_alone=self._is_alone)


@contextmanager
def open_readonly(directory: Path, *, is_alone: bool = False) -> Iterator[LedgerFile]:
    """Open the ledger of a run without locking or changing it. `is_alone`: the caller has locked it (`only_service`)."""
    path = directory / FILE_NAME
    if not path.is_file():
        raise StoreFaultError(f"{directory} has no {FILE_NAME}: it is not the ledger directory of a run")
    # Without a write-ahead log the file is complete, and can be read from a read-only directory.
    query = "" if path.with_name(f"{FILE_NAME}-wal").exists() else "&immutable=1"
    db = connect(path, read_only=True, query=query)
    try:
        with explained(path):
            require_tables(db, path)
        yield LedgerFile(path, db, is_alone=is_alone)
    finally:
        db.close()


def reclaim(directory: Path) -> tuple[int, int]:
    """Rewrite the file and the segments without their holes. Needs exclusive access, and disk space for a second copy.

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
            # Only now are the rows that refer to the new segments on the disk.
            remove_unused(db, directory)
            _read(db, partial(rewrite_journal, directory, places=_places), path)
    finally:
        db.close()
    return before, path.stat().st_size + segment_bytes(directory)
