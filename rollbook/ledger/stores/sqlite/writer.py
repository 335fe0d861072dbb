"""The writing connection of the SQLite store and its payload segments. Only the committer's thread uses them."""

import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.config import Durability
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.stores.sql.committer import Operation
from rollbook.ledger.stores.sql.transaction import SqlTransaction
from rollbook.ledger.stores.sql.write_buffer import KnownRows, MustRedoError, SqlSession
from rollbook.ledger.stores.sqlite.file import (
    ADVICE,
    BUSY_S,
    MEMORY,
    check_integrity,
    connect,
    create_tables,
    explained,
    fault_of,
    refuse_lost_commits,
)
from rollbook.ledger.stores.sqlite.segment_payloads import SegmentPayloads
from rollbook.ledger.stores.sqlite.segment_upkeep import SET_MARK, find_lost, first_free, remove_unused
from rollbook.ledger.stores.sqlite.segments import SegmentWriter, remove_segment

PAGE_BYTES = 4_096
GRACE_S = 60.0
"""An empty segment is deleted this much later: a reader that started before may still need it."""
CHECKPOINT_WAIT_MS = 500
"""How long a checkpoint of the log waits for readers. A read takes milliseconds; only an audit of a long run takes longer."""


class SqliteWriter:
    """Commits operations: rows and payloads, atomically. In memory, payloads are rows as well."""

    def __init__(self, path: Path, durability: Durability) -> None:
        self._path = path
        self._syncs_every_commit = durability is Durability.POWER_LOSS and path != MEMORY
        self._known = KnownRows()
        self._data_version = -1
        self._shrunk: set[int] = set()
        """Segments from which a payload was deleted while they were written or synced."""
        self._emptied: dict[int, float] = {}
        """Segments without a payload, and the time since when."""
        self._lost: dict[RunId, list[GroupId]] = {}
        self._segments: SegmentWriter | None = None
        self.is_checkpoint_due = False
        """Move all commits from the log to the database after the next commit."""
        if path != MEMORY:
            with explained(path):
                refuse_lost_commits(path)
        self._db = connect(path, read_only=False)
        try:
            with explained(path):
                if path == MEMORY:
                    create_tables(self._db, path)
                else:
                    self._segments = self._open_file()
        except BaseException:
            self._db.close()
            raise

    def _open_file(self) -> SegmentWriter:
        directory = self._path.parent
        self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if self._syncs_every_commit else 'NORMAL'}")
        # What a power failure tore off the log is gone now; a later check must not report it as damage.
        self._checkpoint_log()
        check_integrity(self._db, self._path, growing=False)
        create_tables(self._db, self._path)
        self._lost = find_lost(self._db, directory)
        # Sync the log first: rows that reappear after a power failure must find their files.
        self.sync_log()
        remove_unused(self._db, directory)
        return SegmentWriter(directory, first=first_free(self._db), is_always_synced=self._syncs_every_commit)

    def close(self) -> None:
        if self._segments is not None:
            # A mark that cannot be written now is recomputed at the next start.
            with suppress(StoreFaultError, sqlite3.Error):
                self._mark(self._segments.close())
            with suppress(sqlite3.Error):
                self._checkpoint_log()
        self._db.close()

    def commit(self, operations: list[Operation]) -> None:
        try:
            with explained(self._path):
                self._commit_together(operations)
            return
        except MustRedoError:
            self._roll_back()
        except Exception as error:
            self._roll_back()
            if len(operations) == 1 or isinstance(error, StoreFaultError):
                self._fail(operations, error)
                return
        except BaseException as error:  # any error must reach the callers, and the thread must survive
            self._roll_back()
            self._fail(operations, error)
            return
        # Run each operation in its own transaction, so that only the failing one fails.
        for operation in operations:
            operation.reset()
            self._commit_alone(operation)

    def _commit_together(self, operations: list[Operation]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._forget_stale_rows()
        session = SqlSession(self._db, known=self._known)
        payloads = None
        if self._segments is not None:
            payloads = SegmentPayloads(session, self._path.parent, self._segments, self._lost)
        tx = SqlTransaction(session, f"ledger file {self._path}", payloads=payloads)
        must_sync = self._syncs_every_commit
        for operation in operations:
            tx.begin()
            try:
                operation.result = operation.work(tx)
            except Exception as error:
                operation.error = fault_of(error, self._path) or error
                # After a full disk or an I/O error SQLite may have ended the whole transaction.
                if not self._db.in_transaction:
                    raise
                tx.fail()
                continue
            tx.end()
            operation.announced = tx.announced
            must_sync |= tx.must_sync
        session.flush()
        if self._segments is None or payloads is None:
            self._db.execute("COMMIT")
        else:
            self._commit_segments(tx, payloads, self._segments, must_sync=must_sync)

    def _commit_segments(
        self, tx: SqlTransaction, payloads: SegmentPayloads, segments: SegmentWriter, *, must_sync: bool
    ) -> None:
        if must_sync:
            is_everything = self._syncs_every_commit or tx.syncs_all_payloads
            segments.sync(None if is_everything else payloads.segments_of(tx.payloads_to_sync))
        marks = segments.marks()
        self._mark(marks)
        self._db.execute("COMMIT")
        segments.keep(marks)
        if self.is_checkpoint_due:
            self._checkpoint_log()
        if must_sync and not self._syncs_every_commit:
            self.sync_log()
        shrunk = self._shrunk | payloads.shrunk
        if shrunk or self._emptied:
            self._shrunk = shrunk & segments.active
            self._remove_emptied(shrunk - self._shrunk)

    def _mark(self, marks: Mapping[int, int]) -> None:
        if marks:
            self._db.executemany(SET_MARK, marks.items())

    def _remove_emptied(self, shrunk: set[int]) -> None:
        """Delete files some time after their last payload was deleted."""
        now = time.monotonic()
        for segment in shrunk - self._emptied.keys():
            sql = "SELECT 1 FROM payload_places WHERE segment = ? LIMIT 1"
            if self._db.execute(sql, (segment,)).fetchone() is None:
                self._emptied[segment] = now
        due = [segment for segment, since in self._emptied.items() if since + GRACE_S <= now]
        if due:
            self.sync_log()  # a row that reappears after a power failure must find its file
        for segment in due:
            remove_segment(self._path.parent, segment)
            del self._emptied[segment]

    def _commit_alone(self, operation: Operation) -> None:
        try:
            with explained(self._path):
                self._commit_together([operation])
        except MustRedoError:
            self._roll_back()  # it failed, and its error is set
        except BaseException as error:
            self._roll_back()
            self._fail([operation], error)

    def _fail(self, operations: list[Operation], error: BaseException) -> None:
        for operation in operations:
            operation.error = operation.error or error

    def _forget_stale_rows(self) -> None:
        """Rows are known between commits until another connection writes to the file."""
        data_version = self._db.execute("PRAGMA data_version").fetchone()[0]
        if data_version != self._data_version:
            self._data_version = data_version
            self._known.clear()

    def _roll_back(self) -> None:
        self._known.clear()
        if self._segments is not None:
            self._segments.roll_back()
        # If the rollback fails, nothing was committed either.
        with suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _checkpoint_log(self) -> None:
        """Move all commits from the log to the database and empty the log. Left for the next time if a reader needs the log."""
        self.is_checkpoint_due = False
        self._db.execute(f"PRAGMA busy_timeout = {CHECKPOINT_WAIT_MS}")
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")

    def sync_log(self) -> None:
        """Sync the write-ahead log, and with it every commit so far. May be called from any thread."""
        try:
            with Path(f"{self._path}-wal").open("rb+") as log:
                os.fsync(log.fileno())
        except FileNotFoundError:
            pass  # nothing was written since the last checkpoint, which syncs
        except OSError as error:
            raise StoreFaultError(f"ledger file {self._path}: {error}; {ADVICE[sqlite3.SQLITE_IOERR]}") from error
