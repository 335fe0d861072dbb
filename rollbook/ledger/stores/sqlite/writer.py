"""The writing connection of the embedded store, and its segments of payloads: only the committer's thread works on them."""

import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.config import Durability
from rollbook.ledger.records import RunRecord
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.stores.sql.committer import Operation
from rollbook.ledger.stores.sql.write_buffer import MustRedoError
from rollbook.ledger.stores.sqlite.file import ADVICE, connect, explained, fault_of
from rollbook.ledger.stores.sqlite.migrations import migrate
from rollbook.ledger.stores.sqlite.segment_recovery import SET_MARK, find_lost, first_free, remove_unused
from rollbook.ledger.stores.sqlite.segment_transaction import SegmentedWriteBehind
from rollbook.ledger.stores.sqlite.segments import SegmentWriter, remove_segment

PAGE_BYTES = 4_096
MOST_REMEMBERED_RUNS = 1_000
CHECKED_ELSEWHERE = frozenset({"payloads", "history"})
GRACE_S = 60.0
"""An emptied segment stays this long: who began to read before may still want it."""


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


class SqliteWriter:
    """Commits what operations did: rows and payloads, together or not at all."""

    def __init__(self, path: Path, durability: Durability) -> None:
        self._path = path
        self._syncs_itself = durability is Durability.POWER_LOSS
        self._runs: dict[RunId, RunRecord] = {}
        self._seen = -1
        self._emptied: dict[int, float] = {}
        """Segments without a payload, and since when."""
        self._db = connect(path, read_only=False)
        try:
            with explained(path):
                self._prepare()
                self._lost = self._recover()
                self._segments = SegmentWriter(
                    path.parent, first=first_free(self._db), is_always_synced=self._syncs_itself
                )
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if self._syncs_itself else 'NORMAL'}")
        _check_integrity(self._db, self._path)
        migrate(self._db, self._path)

    def _recover(self) -> dict[RunId, list[GroupId]]:
        lost = find_lost(self._db, self._path.parent)
        # First the log: rows that a power cut brings back must find their files.
        self._sync_log()
        remove_unused(self._db, self._path.parent)
        return lost

    def close(self) -> None:
        # What cannot be noted now is found out at the next start.
        with suppress(StoreFaultError, sqlite3.Error):
            self._mark(self._segments.close())
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
        tx = SegmentedWriteBehind(
            self._db, self._runs, directory=self._path.parent, segments=self._segments, lost=self._lost
        )
        must_sync = self._syncs_itself
        for operation in operations:
            tx.begin()
            try:
                operation.result = operation.work(tx)
            except Exception as error:
                operation.error = fault_of(error, self._path) or error
                # After a full disk or an I/O error SQLite may have ended the whole transaction: then nobody's work is there.
                if not self._db.in_transaction:
                    raise
                tx.fail()
                continue
            tx.end()
            operation.announced = tx.announced
            must_sync |= tx.must_sync
        tx.finish()
        if must_sync:
            is_everything = self._syncs_itself or tx.awaits_all
            self._segments.sync(None if is_everything else tx.awaited)
        marks = self._segments.marks()
        self._mark(marks)
        self._db.execute("COMMIT")
        self._segments.keep(marks)
        self._runs.update(tx.runs_written)
        if must_sync and not self._syncs_itself:
            self._sync_log()
        if tx.thinned or self._emptied:
            self._remove_emptied(tx.thinned)

    def _mark(self, marks: Mapping[int, int]) -> None:
        if marks:
            self._db.executemany(SET_MARK, marks.items())

    def _remove_emptied(self, thinned: set[int]) -> None:
        """Whole files go, some time after their last payload went."""
        now = time.monotonic()
        for segment in thinned - self._segments.active - self._emptied.keys():
            if (
                self._db.execute("SELECT 1 FROM payload_places WHERE segment = ? LIMIT 1", (segment,)).fetchone()
                is None
            ):
                self._emptied[segment] = now
        due = [segment for segment, since in self._emptied.items() if since + GRACE_S <= now]
        if due:
            self._sync_log()  # a row that a power cut brings back must find its file
        for segment in due:
            remove_segment(self._path.parent, segment)
            del self._emptied[segment]

    def _commit_alone(self, operation: Operation) -> None:
        try:
            with explained(self._path):
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
        self._segments.take_back()
        # Should even this fail: nothing was committed, which is all that is asked for.
        with suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _sync_log(self) -> None:
        """Bring the write-ahead log to the disk, and with it every commit so far."""
        try:
            with Path(f"{self._path}-wal").open("rb+") as log:
                os.fsync(log.fileno())
        except FileNotFoundError:
            pass  # nothing was written since the last checkpoint, which syncs
        except OSError as error:
            raise StoreFaultError(f"ledger file {self._path}: {error}; {ADVICE[sqlite3.SQLITE_IOERR]}") from error
