"""The shared store: one PostgreSQL database for any number of stateless replicas of the service.

The writes of a run are serialised over all replicas by an advisory lock, so the rules need no other isolation and two replicas can
never decide the same batch. Runs do not wait for each other. Group commit compensates for the lock: a replica writes all waiting
operations in one transaction. A commit sends a notification, so that calls that wait at another replica check again.

Every commit is flushed before its callers get their results, in both durability modes: PostgreSQL has no mode between "flushed" and
"lost with its own process". A server that runs with `fsync = off` is refused.

While the database restarts, calls wait until the store has reconnected.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeVar

from rollbook.concurrency.retry import backoff
from rollbook.contracts.admission import RunId
from rollbook.ledger.config import Durability
from rollbook.ledger.store import StoreFaultError, Transaction
from rollbook.ledger.stores.objects import objects_at
from rollbook.ledger.stores.postgres.connection import (
    LostConnectionError,
    PostgresConnection,
    connect,
    described,
    explained,
    read_snapshot,
)
from rollbook.ledger.stores.postgres.schema import require_tables
from rollbook.ledger.stores.postgres.writer import RECONNECT_S, PostgresWriter, require_durability, retry_connection
from rollbook.ledger.stores.sql.committer import Committer
from rollbook.ledger.stores.sql.write_buffer import SqlSession

T = TypeVar("T")

OPEN_WITHIN_S = 60.0
LISTEN_S = 1.0
READERS = 4
TOTAL_BYTES = (
    "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c "
    "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = current_schema() AND c.relkind = 'r'"
)
SWEEP_S = 30.0
KEPT_S = 60
"""Seconds that an object stays after its row was deleted: a reader may have read the row before."""
UNUSED_S = 3600.0
"""After this time, an object without a row is the rest of a commit that failed."""
SWEPT_AT_ONCE = 1000
TAKE_DELETED = (
    "DELETE FROM deleted_objects WHERE (location, name) IN (SELECT location, name FROM deleted_objects "
    "WHERE at < now() - make_interval(secs => ?) LIMIT ? FOR UPDATE SKIP LOCKED) RETURNING location, name"
)


class _Readers:
    """A few threads, each with its own session."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._where = described(url)
        self._local = threading.local()
        self._open: list[PostgresConnection] = []
        self.pool = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="ledger-reader")

    def read(self, work: Callable[[Transaction], T]) -> T:
        return retry_connection(lambda: self._attempt(work), within_s=RECONNECT_S, where=self._where)

    def _attempt(self, work: Callable[[Transaction], T]) -> T:
        with explained(self._where):
            db: PostgresConnection | None = getattr(self._local, "db", None)
            if db is not None and db.is_lost:
                self._open.remove(db)
                db.close()
                db = self._local.db = None
            if db is None:
                db = self._local.db = connect(self._url, waits_for_standby=True)
                self._open.append(db)
            return read_snapshot(db, work, self._where)

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for db in self._open:
            db.close()


class _Listener:
    """Receives notifications of other replicas' commits. After a lost connection it announces all runs."""

    def __init__(self, url: str, writer: PostgresWriter, announce: Callable[[set[RunId]], None]) -> None:
        self._url = url
        self._writer = writer
        self._announce = announce
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        with suppress(Exception):  # only speeds up the stop: the listener checks every second
            self._writer.notify("")
        self._thread.join()

    def _run(self) -> None:
        """Announces notified runs until `close`. Reconnects after a lost connection."""
        delays = backoff(max_s=1.0)
        while not self._stopping.is_set():
            try:
                with explained(self._writer.where):
                    self._listen()
                delays = backoff(max_s=1.0)
            except Exception:  # calls report the error; without a listener every waiting call would time out
                self._stopping.wait(next(delays))

    def _listen(self) -> None:
        db = connect(self._url)
        try:
            db.execute(f"LISTEN {self._writer.channel}")
            self._announce({RunId(row[0]) for row in db.execute("SELECT run_id FROM runs").fetchall()})
            while not self._stopping.is_set():
                for note in db.raw.notifies(timeout=LISTEN_S, stop_after=1):
                    if note.payload and note.pid != self._writer.backend_pid:
                        self._announce({RunId(note.payload)})
        finally:
            db.close()


class PostgresStore:
    """Satisfies `store.Store`. Made by `open_postgres_store`."""

    is_shared = True

    def __init__(
        self, url: str, writer: PostgresWriter, loop: asyncio.AbstractEventLoop, *, has_objects: bool = False
    ) -> None:
        self._loop = loop
        self._writer = writer
        self._committer = Committer(writer.commit, loop)
        self._readers = _Readers(url)
        self._listener = _Listener(url, writer, self._committer.announce)
        self._sweeper = ObjectSweeper(lambda: connect(url)) if has_objects else None

    async def write(
        self,
        work: Callable[[Transaction], T],
        *,
        run_id: RunId | None = None,
        before: Callable[[], None] | None = None,
    ) -> T:
        return await self._committer.write(work, run_id=run_id, before=before)

    async def read(self, work: Callable[[Transaction], T]) -> T:
        return await self._loop.run_in_executor(self._readers.pool, self._readers.read, work)

    async def journal(self, run_id: RunId, *, checkpoint: bool = False) -> None:
        """PostgreSQL checks its own log, and its operator backs it up."""

    def listen(self, on_change: Callable[[RunId], None]) -> None:
        self._committer.listen(on_change)

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.close()
        self._committer.close()
        self._listener.close()
        self._writer.close()
        self._readers.close()


@asynccontextmanager
async def open_postgres_store(
    url: str, *, durability: Durability = Durability.POWER_LOSS, payloads: str | None = None
) -> AsyncIterator[PostgresStore]:
    """Both durability modes flush every commit. `payloads`: the directory or bucket of new payloads; None: in the database."""
    del durability
    writer = PostgresWriter(url, None if payloads is None else objects_at(payloads))
    try:
        await asyncio.to_thread(retry_connection, writer.prepare, within_s=OPEN_WITHIN_S, where=writer.where)
    except BaseException:
        writer.close()
        raise
    store = PostgresStore(url, writer, asyncio.get_running_loop(), has_objects=payloads is not None)
    try:
        yield store
    finally:
        await asyncio.to_thread(store.close)


class LedgerDatabase:
    """Read-only access to a database that may be in service. Satisfies `store.Reader`."""

    def __init__(self, db: PostgresConnection, where: str) -> None:
        self._db = db
        self._where = where

    def read_now(self, work: Callable[[Transaction], T]) -> T:
        with explained(self._where):
            return read_snapshot(self._db, work, self._where)


@contextmanager
def open_readonly(url: str) -> Iterator[LedgerDatabase]:
    with _session(url) as db:
        yield LedgerDatabase(db, described(url))


def warnings(url: str) -> list[str]:
    """Refuses a database that the ledger cannot use, and says what a fail-over may lose."""
    where = described(url)
    try:
        with explained(where):
            db = connect(url)
            try:
                require_durability(db, where)
                standbys = db.execute("SHOW synchronous_standby_names").fetchone()[0]
            finally:
                db.close()
    except LostConnectionError as error:
        raise StoreFaultError(f"ledger in {where}: the database cannot be reached ({error})") from error
    if standbys:
        return []
    return [
        f"{where} has no synchronous standby (synchronous_standby_names is empty): its own restart loses nothing, but a "
        "fail-over to an asynchronous standby loses the groups and steps that were acknowledged after the last replicated "
        "commit. A run with a newer checkpoint then stops with an error instead of training a step twice"
    ]


@contextmanager
def _session(url: str) -> Iterator[PostgresConnection]:
    """A session that fails at once if the database is unreachable."""
    where = described(url)
    try:
        with explained(where):
            db = connect(url)
            try:
                require_tables(SqlSession(db), where)
                yield db
            finally:
                db.close()
    except LostConnectionError as error:
        raise StoreFaultError(f"ledger in {where}: the database cannot be reached ({error})") from error


def reclaim(url: str) -> tuple[int, int]:
    """Rewrite the payloads' table without its holes; readers and writers wait. Returns the bytes before and after.

    Also deletes objects that no row names.
    """
    with _session(url) as db:
        delete_unused(db)
        before = int(db.execute(TOTAL_BYTES).fetchone()[0])
        db.execute("VACUUM (FULL) payloads")
        for table in ("groups", "history"):
            db.execute(f"VACUUM {table}")
        return before, int(db.execute(TOTAL_BYTES).fetchone()[0])


def sweep(db: PostgresConnection, *, kept_s: float = KEPT_S) -> None:
    """Delete the objects whose rows were deleted. If this fails, they are deleted later."""
    while True:
        db.execute("BEGIN")
        try:
            rows = db.execute(TAKE_DELETED, (float(kept_s), SWEPT_AT_ONCE)).fetchall()
            for location in {row[0] for row in rows}:
                objects_at(location).delete([name for at, name in rows if at == location])
        except BaseException:
            if not db.is_lost:
                db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")
        if len(rows) < SWEPT_AT_ONCE:
            return


def delete_unused(db: PostgresConnection) -> None:
    """Delete old objects that no row names, at every location that rows name."""
    sweep(db, kept_s=0)
    for (location,) in db.execute("SELECT DISTINCT location FROM payload_objects").fetchall():
        objects = objects_at(location)
        # Listed before the rows are read: an object of a row that is written meanwhile is not listed, or is young.
        listed = set(objects.names(older_than_s=UNUSED_S))
        db.execute("BEGIN")  # rows are fetched a few at a time, in a transaction
        used = {row[0] for row in db.stream("SELECT name FROM payload_objects WHERE location = ?", (location,))}
        db.execute("COMMIT")
        objects.delete(sorted(listed - used))


class ObjectSweeper:
    """Deletes objects whose rows were deleted, in its own thread."""

    def __init__(self, connected: Callable[[], PostgresConnection]) -> None:
        self._connected = connected
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-sweeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(SWEEP_S):
            with suppress(Exception):  # the database or the bucket cannot be reached: the next sweep repeats it
                db = self._connected()
                try:
                    sweep(db)
                finally:
                    db.close()
