"""The writing session of the PostgreSQL store: one turn at a time over all replicas, and no answer that is not true.

Each commit carries the next number of its replica in a row of its own. When the answer to a commit is lost, that row says whether
it happened, so it is neither reported as failed nor done twice. (PostgreSQL's own transaction ids would not do: after a crash an id
whose commit never reached the disk is handed out again, and another transaction answers for ours.)
"""

import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rollbook.concurrency.deadline import Deadline
from rollbook.concurrency.retry import backoff
from rollbook.contracts.errors import TransientError
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.stores.postgres.connection import (
    RETRY_AFTER_S,
    LostConnectionError,
    PostgresConnection,
    connect,
    described,
    explained,
    verdict,
)
from rollbook.ledger.stores.postgres.schema import migrate, prepare_commit_numbers
from rollbook.ledger.stores.sql.committer import Operation
from rollbook.ledger.stores.sql.write_buffer import Kept, MustRedoError, WriteBehind

T = TypeVar("T")

PATIENCE_S = 15.0
"""How long a call waits for a database that is away before it is answered "try again"."""
LOCK_CLASS = 0x524F_4C42
"""Sets the ledger's advisory lock apart from other programs' in the same database."""
NUMBER_A_COMMIT = (
    "INSERT INTO replica_commits (replica, number) VALUES (?, ?) "
    "ON CONFLICT (replica) DO UPDATE SET number = excluded.number, at = now()"
)
SETTINGS = {
    "synchronous_commit": "on",
    # A replica that stands still with the lock in its hand must not stop the others for ever.
    "idle_in_transaction_session_timeout": "30s",
    "lock_timeout": "15s",
}


def patiently(work: Callable[[], T], *, patience_s: float, where: str) -> T:
    """Do it again, with growing waits, as long as the connection is what fails."""
    deadline = Deadline(patience_s, f"ledger in {where}")
    waits = backoff(first_s=0.02, max_s=1.0)
    while True:
        try:
            return work()
        except LostConnectionError as error:
            wait = next(waits)
            if deadline.remaining_s() <= wait:
                raise TransientError(
                    f"ledger in {where}: the database cannot be reached ({error}); try again",
                    retry_after_s=RETRY_AFTER_S,
                ) from error
            time.sleep(wait)


class PostgresWriteBehind(WriteBehind):
    """Knows, beside what it writes, whether it wrote anything at all: a look around needs no flush."""

    def __init__(self, db: PostgresConnection) -> None:
        super().__init__(db, {})
        self._session = db
        self.has_written = False

    def before(self, sql: str) -> None:
        super().before(sql)
        self.has_written |= not sql.startswith("SELECT")

    def _write(self, kept: Kept) -> None:
        self.has_written |= not kept.is_empty
        super()._write(kept)

    def _each(self, sql: str, parameters: Sequence[Any]) -> Iterable[Any]:
        self.before(sql)
        return self._session.stream(sql, parameters)


class PostgresWriter:
    """The writing session. Only the committer's thread works on it, once the store is open."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.where = described(url)
        self._db: PostgresConnection | None = None
        self._lock_key = 0
        self._replica = uuid.uuid4().hex
        self._num_commits = 0
        self.channel = ""

    @property
    def backend_pid(self) -> int | None:
        return None if self._db is None else self._db.backend_pid

    def prepare(self) -> None:
        """Refuse what cannot keep the promise, and bring the schema up to date."""
        with explained(self.where):
            db = self._connected()
            schema = db.execute("SELECT current_schema()").fetchone()[0]
            if schema is None:
                raise StoreFaultError(f"ledger in {self.where}: search_path names no schema that exists; create it")
            for setting in ("fsync", "full_page_writes"):
                if db.execute(f"SHOW {setting}").fetchone()[0] != "on":
                    raise StoreFaultError(
                        f"ledger in {self.where}: the database runs with {setting} = off and would lose answered groups in a "
                        "power cut; switch it on"
                    )
            self._lock_key = zlib.crc32(schema.encode()) - 2**31
            self.channel = f"rollbook_ledger_{zlib.crc32(schema.encode()):08x}"
            self._begin(db)
            try:
                migrate(db, self.where)
                prepare_commit_numbers(db)
            except BaseException:
                if not db.is_lost:
                    db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    def commit(self, operations: list[Operation]) -> None:
        if not self._commit_together(operations):
            # One of them spoiled it for all: each by itself, so that only that one fails.
            for operation in operations:
                self._commit_together([operation])

    def _commit_together(self, operations: list[Operation]) -> bool:
        """False: nothing of it stays, and each operation must be done by itself."""
        for operation in operations:
            if operation.before is not None:
                operation.before()  # the other replicas need not wait for this
        try:
            patiently(lambda: self._attempt_all(operations), patience_s=PATIENCE_S, where=self.where)
        except MustRedoError:
            return len(operations) == 1  # by itself it has its error already
        except BaseException as error:  # whatever it is, the callers must hear it and the thread must live
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
        if self._db is not None:
            self._db.close()
            self._db = None

    def _connected(self) -> PostgresConnection:
        if self._db is None or self._db.is_lost:
            self.close()
            self._db = connect(self._url, SETTINGS)
        return self._db

    def _begin(self, db: PostgresConnection) -> None:
        """Take the turn to write."""
        db.execute("BEGIN")
        # The cast keeps the function's empty answer out of the binary protocol's way.
        db.execute("SELECT pg_advisory_xact_lock(?, ?)::text", (LOCK_CLASS, self._lock_key))

    def _attempt_all(self, operations: list[Operation]) -> None:
        for operation in operations:
            operation.forget()
        self._num_commits += 1
        try:
            with explained(self.where):
                db = self._connected()
                self._begin(db)
                try:
                    has_written = self._write(db, operations)
                except MustRedoError:
                    db.execute("ROLLBACK")
                    raise
        except MustRedoError:
            raise
        except BaseException:
            self.close()  # and with the session goes its transaction
            raise
        self._finish(db, has_written=has_written)

    def _write(self, db: PostgresConnection, operations: list[Operation]) -> bool:
        """Everything but the commit. A run's record is read anew each time: another replica may have changed it.

        False: there is nothing to commit.
        """
        tx = PostgresWriteBehind(db)
        for operation in operations:
            tx.begin()
            try:
                operation.result = operation.work(tx)
            except Exception as error:
                told = verdict(error, self.where)
                if isinstance(told, LostConnectionError) or db.is_lost:
                    raise
                operation.error = told or error
                if db.is_spoiled:
                    raise MustRedoError from error
                tx.fail()
                continue
            tx.end()
            operation.announced = tx.announced
        tx.finish()
        announced = sorted(set().union(*(operation.announced for operation in operations)))
        for run_id in announced:
            db.execute("SELECT pg_notify(?, ?)", (self.channel, run_id))
        if not tx.has_written and not announced:
            return False
        db.execute(NUMBER_A_COMMIT, (self._replica, self._num_commits))
        return True

    def _finish(self, db: PostgresConnection, *, has_written: bool) -> None:
        try:
            with explained(self.where):
                db.execute("COMMIT")
        except LostConnectionError as error:
            self.close()
            if has_written and not patiently(self._was_committed, patience_s=PATIENCE_S, where=self.where):
                raise LostConnectionError(f"the transaction was not committed: {error}") from error

    def _was_committed(self) -> bool:
        """The answer to the commit was lost: look what became of it, once its session has let go of the lock."""
        with explained(self.where):
            db = self._connected()
            self._begin(db)
            row = db.execute("SELECT number FROM replica_commits WHERE replica = ?", (self._replica,)).fetchone()
            db.execute("COMMIT")
        return row is not None and int(row[0]) == self._num_commits
