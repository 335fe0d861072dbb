"""The shared store: one PostgreSQL database behind any number of replicas of the service, none of which keeps anything to itself.

Writes happen one after the other over all replicas: each takes the same advisory lock, so the rules need to know nothing of each
other's transactions and two replicas can never decide the same batch. Group commit makes up for it: a replica writes all that waits
in one transaction. A commit notifies, so that whoever waits at another replica looks again.

Durability. A commit is flushed before anybody hears of it, in both modes: PostgreSQL has nothing between "flushed" and "lost when
its own process dies". A server that runs with `fsync = off` is refused.

When the database restarts, everybody waits while the store connects again.
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
from rollbook.ledger.stores.postgres.connection import (
    LostConnectionError,
    PostgresConnection,
    connect,
    described,
    explained,
    read_at_one_moment,
)
from rollbook.ledger.stores.postgres.schema import require_known_schema
from rollbook.ledger.stores.postgres.writer import PATIENCE_S, PostgresWriter, patiently
from rollbook.ledger.stores.sql.committer import Committer

T = TypeVar("T")

OPENING_PATIENCE_S = 60.0
LISTEN_S = 1.0
READERS = 4
TOTAL_BYTES = (
    "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c "
    "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = current_schema() AND c.relkind = 'r'"
)


class _Readers:
    """A few threads, each with a session of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._where = described(url)
        self._local = threading.local()
        self._open: list[PostgresConnection] = []
        self.pool = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="ledger-reader")

    def read(self, work: Callable[[Transaction], T]) -> T:
        return patiently(lambda: self._attempt(work), patience_s=PATIENCE_S, where=self._where)

    def _attempt(self, work: Callable[[Transaction], T]) -> T:
        with explained(self._where):
            db: PostgresConnection | None = getattr(self._local, "db", None)
            if db is not None and db.is_lost:
                self._open.remove(db)
                db.close()
                db = self._local.db = None
            if db is None:
                db = self._local.db = connect(self._url)
                self._open.append(db)
            return read_at_one_moment(db, work)

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for db in self._open:
            db.close()


class _Ear:
    """Hears of the commits of other replicas. After a lost connection it rings for every run: something may have been missed."""

    def __init__(self, url: str, writer: PostgresWriter, announce: Callable[[set[RunId]], None]) -> None:
        self._url = url
        self._writer = writer
        self._announce = announce
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-ear", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        with suppress(Exception):  # only to be quicker: the ear looks up every second anyhow
            self._writer.notify("")
        self._thread.join()

    def _run(self) -> None:
        """Waits: for notifications. Gives: announcements. Ends: when stopping; a lost connection is made anew."""
        waits = backoff(max_s=1.0)
        while not self._stopping.is_set():
            try:
                with explained(self._writer.where):
                    self._listen()
                waits = backoff(max_s=1.0)
            except (
                Exception
            ):  # whatever it is, calls report it; an ear that stays deaf would make every wait a long one
                self._stopping.wait(next(waits))

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

    def __init__(self, url: str, writer: PostgresWriter, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._writer = writer
        self._committer = Committer(writer.commit, loop)
        self._readers = _Readers(url)
        self._ear = _Ear(url, writer, self._committer.announce)

    async def write(self, work: Callable[[Transaction], T], *, before: Callable[[], None] | None = None) -> T:
        return await self._committer.write(work, before=before)

    async def read(self, work: Callable[[Transaction], T]) -> T:
        return await self._loop.run_in_executor(self._readers.pool, self._readers.read, work)

    def listen(self, heard: Callable[[RunId], None]) -> None:
        self._committer.listen(heard)

    def close(self) -> None:
        self._committer.close()
        self._ear.close()
        self._writer.close()
        self._readers.close()


@asynccontextmanager
async def open_postgres_store(
    url: str, *, durability: Durability = Durability.POWER_LOSS
) -> AsyncIterator[PostgresStore]:
    """`durability` is kept in either mode: every commit is flushed before it is answered."""
    del durability
    writer = PostgresWriter(url)
    try:
        await asyncio.to_thread(patiently, writer.prepare, patience_s=OPENING_PATIENCE_S, where=writer.where)
    except BaseException:
        writer.close()
        raise
    store = PostgresStore(url, writer, asyncio.get_running_loop())
    try:
        yield store
    finally:
        await asyncio.to_thread(store.close)


class LedgerDatabase:
    """A database read by somebody who is not its ledger. Satisfies `store.Reader`."""

    def __init__(self, db: PostgresConnection, where: str) -> None:
        self._db = db
        self._where = where

    def read_now(self, work: Callable[[Transaction], T]) -> T:
        with explained(self._where):
            return read_at_one_moment(self._db, work)


@contextmanager
def open_readonly(url: str) -> Iterator[LedgerDatabase]:
    with _session(url) as db:
        yield LedgerDatabase(db, described(url))


@contextmanager
def _session(url: str) -> Iterator[PostgresConnection]:
    """For somebody who comes once and does not wait for a database that is away."""
    where = described(url)
    try:
        with explained(where):
            db = connect(url)
            try:
                require_known_schema(db, where)
                yield db
            finally:
                db.close()
    except LostConnectionError as error:
        raise StoreFaultError(f"ledger in {where}: the database cannot be reached ({error})") from error


def reclaim(url: str) -> tuple[int, int]:
    """Write the payloads' table anew without its holes; whoever reads or writes waits. Returns the bytes before and after."""
    with _session(url) as db:
        before = int(db.execute(TOTAL_BYTES).fetchone()[0])
        db.execute("VACUUM (FULL) payloads")
        for table in ("groups", "history"):
            db.execute(f"VACUUM {table}")
        return before, int(db.execute(TOTAL_BYTES).fetchone()[0])
