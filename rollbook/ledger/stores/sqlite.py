"""The embedded store: one SQLite file in the run directory, write-ahead log, one writer.

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
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rollbook.contracts.admission import RunId
from rollbook.ledger.config import Durability
from rollbook.ledger.records import RunRecord
from rollbook.ledger.store import StoreFaultError, Transaction
from rollbook.ledger.stores.committer import Committer, Operation
from rollbook.ledger.stores.migrations import migrate, require_known_schema
from rollbook.ledger.stores.sql_transaction import SqlTransaction
from rollbook.ledger.stores.write_behind import MustRedoError, WriteBehind

T = TypeVar("T")

FILE_NAME = "ledger.sqlite"
BUSY_S = 10.0
"""How long to wait for another process that writes. The run directory is locked, so it can only be a passing one."""
PAGE_BYTES = 16_384
READERS = 2
MOST_REMEMBERED_RUNS = 1_000
CHECKED_ELSEWHERE = frozenset({"payloads", "history"})

ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full: make room and start again, nothing that was answered is lost",
    sqlite3.SQLITE_READONLY: "it cannot be written: check the permissions of the run directory",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: check that the run directory exists and can be written",
    sqlite3.SQLITE_IOERR: "the disk reports an error: check it, then start again",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore it from a copy of the run directory",
    sqlite3.SQLITE_NOTADB: "the file is not a ledger: restore it from a copy of the run directory",
    sqlite3.SQLITE_BUSY: "another process holds it: stop the other one and start again",
}


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what only a person can mend into a fault that says what to do; other errors are ours and pass."""
    try:
        yield
    except sqlite3.Error as error:
        fault = _fault(error, path)
        if fault is None:
            raise
        raise fault from error


def _fault(error: BaseException, path: Path) -> StoreFaultError | None:
    # The low byte is the kind, the rest of the code says where in SQLite it came up.
    advice = ADVICE.get((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF)
    return None if advice is None else StoreFaultError(f"ledger file {path}: {error}; {advice}")


def _connect(path: Path, *, read_only: bool, query: str = "") -> sqlite3.Connection:
    with _explained(path):
        if read_only:
            uri = f"{path.absolute().as_uri()}?mode=ro{query}"
            return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)


def _check_integrity(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a damaged file before anything is answered from it.

    All that the rules decide on is checked. Payloads are compared with their digests whenever they are read and the history by
    the audit: going through them here would make every start as long as the run.
    """
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    for table in tables:
        if table in CHECKED_ELSEWHERE:
            continue
        found = [row[0] for row in db.execute(f"PRAGMA quick_check('{table}')")]
        if found != ["ok"]:
            raise StoreFaultError(
                f"ledger file {path}: table {table} is damaged ({found[0]}); {ADVICE[sqlite3.SQLITE_CORRUPT]}"
            )


class _Writer:
    """The writing connection; only the committer's thread works on it."""

    def __init__(self, path: Path, durability: Durability) -> None:
        self._path = path
        self._syncs_itself = durability is Durability.POWER_LOSS
        self._runs: dict[RunId, RunRecord] = {}
        self._seen = -1
        self._db = _connect(path, read_only=False)
        try:
            with _explained(path):
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if self._syncs_itself else 'NORMAL'}")
        _check_integrity(self._db, self._path)
        migrate(self._db, self._path)

    def close(self) -> None:
        self._db.close()

    def commit(self, operations: list[Operation]) -> None:
        try:
            with _explained(self._path):
                self._commit_together(operations)
            return
        except MustRedoError:
            self._roll_back()
        except Exception as error:
            self._roll_back()
            if len(operations) == 1 or isinstance(error, StoreFaultError):
                self._fail(operations, error)
                return
        except BaseException as error:  # whatever it is, the callers must hear it and the thread must live
            self._roll_back()
            self._fail(operations, error)
            return
        # One of them spoiled it for all: each by itself, so that only that one fails.
        for operation in operations:
            operation.forget()
            self._commit_alone(operation)

    def _commit_together(self, operations: list[Operation]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._forget_what_others_changed()
        tx = WriteBehind(self._db, self._runs)
        must_sync = False
        for operation in operations:
            tx.begin()
            try:
                operation.result = operation.work(tx)
            except Exception as error:
                operation.error = _fault(error, self._path) or error
                # After a full disk or an I/O error SQLite may have ended the whole transaction: then nobody's work is there.
                if not self._db.in_transaction:
                    raise
                tx.fail()
                continue
            tx.end()
            operation.announced = tx.announced
            must_sync |= tx.must_sync
        tx.finish()
        self._db.execute("COMMIT")
        self._runs.update(tx.runs_written)
        if must_sync and not self._syncs_itself:
            self._sync_log()

    def _commit_alone(self, operation: Operation) -> None:
        try:
            with _explained(self._path):
                self._commit_together([operation])
        except MustRedoError:
            self._roll_back()  # it failed by itself, and its error is set
        except BaseException as error:
            self._roll_back()
            self._fail([operation], error)

    def _fail(self, operations: list[Operation], error: BaseException) -> None:
        for operation in operations:
            operation.error = operation.error or error

    def _forget_what_others_changed(self) -> None:
        """The records of runs are remembered from commit to commit, unless another connection wrote to the file since."""
        seen = self._db.execute("PRAGMA data_version").fetchone()[0]
        if seen != self._seen or len(self._runs) > MOST_REMEMBERED_RUNS:
            self._seen = seen
            self._runs.clear()

    def _roll_back(self) -> None:
        self._runs.clear()
        # Should even this fail: nothing was committed, which is all that is asked for.
        with suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _sync_log(self) -> None:
        """Bring the write-ahead log to the disk, and with it every commit so far."""
        try:
            with Path(f"{self._path}-wal").open("rb+") as log:
                os.fsync(log.fileno())
        except OSError as error:
            raise StoreFaultError(f"ledger file {self._path}: {error}; {ADVICE[sqlite3.SQLITE_IOERR]}") from error


class SqliteStore:
    """Satisfies `store.Store`. Made by `open_sqlite_store`."""

    def __init__(self, path: Path, durability: Durability, loop: asyncio.AbstractEventLoop) -> None:
        self.path = path
        self._loop = loop
        self._writer = _Writer(path, durability)
        self._committer = Committer(self._writer.commit, loop)
        self._readers = _Readers(path)

    async def write(self, work: Callable[[Transaction], T]) -> T:
        return await self._committer.write(work)

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
        with _explained(self._path):
            db: sqlite3.Connection | None = getattr(self._local, "db", None)
            if db is None:
                db = self._local.db = _connect(self._path, read_only=True)
                self._open.append(db)
            return _read(db, work)

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for db in self._open:
            db.close()


def _read(db: sqlite3.Connection, work: Callable[[Transaction], T]) -> T:
    db.execute("BEGIN")
    try:
        return work(SqlTransaction(db))
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
        with _explained(self.path):
            return _read(self._db, work)


@contextmanager
def open_readonly(directory: Path) -> Iterator[LedgerFile]:
    """Open the ledger of a run to look at it: nothing is locked, changed or moved on."""
    path = directory / FILE_NAME
    if not path.is_file():
        raise StoreFaultError(f"{directory} has no {FILE_NAME}: it is not the ledger directory of a run")
    # Without a log beside it the file is whole in itself, and can be read even where nothing may be written.
    query = "" if path.with_name(f"{FILE_NAME}-wal").exists() else "&immutable=1"
    db = _connect(path, read_only=True, query=query)
    try:
        with _explained(path):
            require_known_schema(db, path)
        yield LedgerFile(path, db)
    finally:
        db.close()


def reclaim(directory: Path) -> tuple[int, int]:
    """Write the file anew without its holes. Needs it alone, and room for a second one. Returns the bytes before and after."""
    path = directory / FILE_NAME
    db = _connect(path, read_only=False)
    try:
        with _explained(path):
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            before = path.stat().st_size
            db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        db.close()
    return before, path.stat().st_size
