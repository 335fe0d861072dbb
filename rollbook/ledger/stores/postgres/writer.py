"""The writing session of the PostgreSQL store: one writer of a run at a time, over all replicas.

Each commit writes the next commit number of its replica into a row. If the response to a COMMIT is lost, that row tells whether it
happened, so a commit is neither reported as failed by mistake nor applied twice. (PostgreSQL's transaction ids do not suffice:
after a crash, the id of a commit that never reached the disk is assigned again.)

The numbers also tell whether another replica has written: each commit that writes changes the number of its replica. While those
of the others are unchanged, the rows that this replica has read and written stay known (`KnownRows`). The numbers are read under
the locks of the runs, so no other session can change these runs until the commit.
"""

import time
import uuid
import zlib
from collections.abc import Callable, Collection
from typing import TypeVar

from rollbook.concurrency.deadline import Deadline
from rollbook.concurrency.retry import backoff
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import TransientError
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.stores.objects import Objects
from rollbook.ledger.stores.postgres.connection import (
    RETRY_AFTER_S,
    LostConnectionError,
    PostgresConnection,
    await_standby,
    connect,
    described,
    explained,
    transaction,
    translated,
)
from rollbook.ledger.stores.postgres.schema import create_tables
from rollbook.ledger.stores.sql.committer import Operation
from rollbook.ledger.stores.sql.write_buffer import KnownRows, MustRedoError, SqlSession

T = TypeVar("T")

RECONNECT_S = 15.0
"""How long a call waits for an unreachable database before it fails with "try again"."""
LOCK_CLASS = 0x524F_4C42
"""Distinguishes the ledger's advisory locks from those of other programs in the same database. The next number is the class of the
locks of runs."""
SET_COMMIT_NUMBER = (
    "INSERT INTO replica_commits (replica, number) VALUES (?, ?) "
    "ON CONFLICT (replica) DO UPDATE SET number = excluded.number, at = now()"
)
OTHER_NUMBERS = (
    "SELECT string_agg(concat(replica, ' ', number), ', ' ORDER BY replica) FROM replica_commits WHERE replica <>"
)
SETTINGS = {
    "synchronous_commit": "on",
    # A replica that hangs while it holds the lock must not block the others forever.
    "idle_in_transaction_session_timeout": "30s",
    "lock_timeout": "15s",
    # A timeout would end the wait for a synchronous standby and report the commit as complete.
    "statement_timeout": "0",
}


def retry_connection(work: Callable[[], T], *, within_s: float, where: str) -> T:
    """Repeat `work`, with growing delays, while the connection fails."""
    deadline = Deadline(within_s, f"ledger in {where}")
    delays = backoff(first_s=0.02, max_s=1.0)
    while True:
        try:
            return work()
        except LostConnectionError as error:
            delay = next(delays)
            if deadline.remaining_s() <= delay:
                raise TransientError(
                    f"ledger in {where}: the database cannot be reached ({error}); try again",
                    retry_after_s=RETRY_AFTER_S,
                ) from error
            time.sleep(delay)


def require_durability(db: PostgresConnection, where: str) -> None:
    for setting in ("fsync", "full_page_writes"):
        if db.execute(f"SHOW {setting}").fetchone()[0] != "on":
            raise StoreFaultError(
                f"ledger in {where}: the database runs with {setting} = off and would lose acknowledged groups in a "
                "power failure; turn it on"
            )


def _lock_key(name: str) -> int:
    """A signed number of 32 bits. Two runs with the same one only wait for each other."""
    return zlib.crc32(name.encode()) - 2**31


class PostgresWriter:
    """The writing session. Once the store is open, only the committer's thread uses it."""

    def __init__(self, url: str, objects: Objects | None = None) -> None:
        self._url = url
        self._objects = objects
        self.where = described(url)
        self._db: PostgresConnection | None = None
        self._schema = ""
        self._replica = uuid.uuid4().hex
        self._num_commits = 0
        self._known = KnownRows()
        self._other_numbers: str | None = None
        """The commit numbers of the other replicas when the known rows were current."""
        self.channel = ""

    @property
    def backend_pid(self) -> int | None:
        return None if self._db is None else self._db.backend_pid

    def prepare(self) -> None:
        """Refuse a database that cannot guarantee durability; create the tables."""
        if self._objects is not None:
            self._objects.require()
        with explained(self.where):
            db = self._connected()
            schema = db.execute("SELECT current_schema()").fetchone()[0]
            if schema is None:
                raise StoreFaultError(f"ledger in {self.where}: search_path names no schema that exists; create it")
            require_durability(db, self.where)
            self._schema = schema
            self.channel = f"rollbook_ledger_{zlib.crc32(schema.encode()):08x}"
            db.execute_script(self._begin(None))
            try:
                create_tables(SqlSession(db), self.where)
            except BaseException:
                if not db.is_lost:
                    db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    def commit(self, operations: list[Operation]) -> None:
        if not self._commit_together(operations):
            # Run each operation in its own transaction, so that only the failing one fails.
            for operation in operations:
                self._commit_together([operation])

    def _commit_together(self, operations: list[Operation]) -> bool:
        """False: nothing was committed, and each operation must run in its own transaction."""
        for operation in operations:
            if operation.before is not None:
                operation.before()  # before the lock, so that other replicas do not wait for it
        try:
            retry_connection(lambda: self._attempt_all(operations), within_s=RECONNECT_S, where=self.where)
        except MustRedoError:
            return len(operations) == 1  # a single operation has its error set
        except BaseException as error:  # any error must reach the callers, and the thread must survive
            self.close()
            if len(operations) > 1 and not isinstance(error, StoreFaultError | TransientError):
                return False
            for operation in operations:
                operation.error = operation.error or error
        return True

    def notify(self, payload: str) -> None:
        with explained(self.where):
            self._connected().execute("SELECT pg_notify(?, ?)", (self.channel, payload))

    def close(self) -> None:
        self._known.clear()
        if self._db is not None:
            self._db.close()
            self._db = None

    def _connected(self) -> PostgresConnection:
        if self._db is None or self._db.is_lost:
            self.close()
            self._db = connect(self._url, SETTINGS, waits_for_standby=True)
        return self._db

    def _begin(self, runs: Collection[RunId] | None) -> str:
        """A script that begins a transaction with the locks of these runs; None: with the lock of the whole ledger."""
        whole = _lock_key(self._schema)
        if runs is None:
            locks = [f"pg_advisory_xact_lock({LOCK_CLASS}, {whole})"]
        else:
            # In the same order in every replica, so that two of them cannot wait for each other.
            keys = sorted({_lock_key(f"{self._schema}/{run}") for run in runs})
            locks = [f"pg_advisory_xact_lock_shared({LOCK_CLASS}, {whole})"]
            locks += [f"pg_advisory_xact_lock({LOCK_CLASS + 1}, {key})" for key in keys]
        return f"BEGIN; SELECT {', '.join(locks)}"

    def _forget_stale_rows(self, other_numbers: str | None) -> None:
        if other_numbers != self._other_numbers:
            self._known.clear()
            self._other_numbers = other_numbers

    def _attempt_all(self, operations: list[Operation]) -> None:
        for operation in operations:
            operation.reset()
        self._num_commits += 1
        named = {operation.run_id for operation in operations if operation.run_id is not None}
        runs = named if all(operation.run_id is not None for operation in operations) else None
        try:
            with explained(self.where):
                db = self._connected()
                # Each statement has its own snapshot, so the numbers are read after the locks are taken.
                script = f"{self._begin(runs)}; {OTHER_NUMBERS} '{self._replica}'"
                self._forget_stale_rows(db.execute_script(script).fetchone()[0])
                try:
                    has_written = self._write(db, operations)
                except MustRedoError:
                    self._known.clear()
                    db.execute("ROLLBACK")
                    raise
        except MustRedoError:
            raise
        except BaseException:
            self.close()  # ends the transaction
            raise
        self._finish(db, runs, has_written=has_written)

    def _write(self, db: PostgresConnection, operations: list[Operation]) -> bool:
        """Run the operations; COMMIT follows. False: there is nothing to commit."""
        tx = transaction(db, self.where, objects=self._objects, known=self._known)
        for operation in operations:
            tx.begin()
            try:
                operation.result = operation.work(tx)
            except Exception as error:
                translation = translated(error, self.where)
                if isinstance(translation, LostConnectionError) or db.is_lost:
                    raise
                operation.error = translation or error
                if db.must_roll_back:
                    raise MustRedoError from error
                tx.fail()
                continue
            tx.end()
            operation.announced = tx.announced
        tx.session.flush()
        announced = sorted(set().union(*(operation.announced for operation in operations)))
        if not tx.session.has_written and not announced:
            return False
        # The cast: the function's void result has no binary form.
        notify = f" RETURNING {', '.join(['pg_notify(?, ?)::text'] * len(announced))}" if announced else ""
        notes = [value for run_id in announced for value in (self.channel, run_id)]
        db.execute(SET_COMMIT_NUMBER + notify, (self._replica, self._num_commits, *notes))
        return True

    def _finish(self, db: PostgresConnection, runs: Collection[RunId] | None, *, has_written: bool) -> None:
        try:
            with explained(self.where):
                db.execute("COMMIT")
        except LostConnectionError as error:
            self.close()
            if not has_written:
                return
            if not retry_connection(lambda: self._was_committed(runs), within_s=RECONNECT_S, where=self.where):
                raise LostConnectionError(f"the transaction was not committed: {error}") from error

    def _was_committed(self, runs: Collection[RunId] | None) -> bool:
        """Whether the last COMMIT, whose response was lost, happened. Waits until its session has released its locks."""
        with explained(self.where):
            db = self._connected()
            db.execute_script(self._begin(runs))
            row = db.execute("SELECT number FROM replica_commits WHERE replica = ?", (self._replica,)).fetchone()
            await_standby(db)
            db.execute("COMMIT")
        return row is not None and int(row[0]) == self._num_commits
