"""A PostgreSQL connection for the ledger's SQL, and the meaning of its errors. The only module that imports psycopg."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.numeric import FloatDumper, Int8Dumper
from psycopg.types.string import BytesBinaryDumper

from rollbook.contracts.errors import RunError, TransientError
from rollbook.ledger.store import StoreFaultError, Transaction
from rollbook.ledger.stores.objects import Objects
from rollbook.ledger.stores.postgres.payloads import PostgresPayloads
from rollbook.ledger.stores.postgres.schema import to_postgres
from rollbook.ledger.stores.sql.tables import RowsStatement
from rollbook.ledger.stores.sql.transaction import SqlTransaction
from rollbook.ledger.stores.sql.write_buffer import Cursor, KnownRows, SqlSession, Written

T = TypeVar("T")

CONNECT_S = 5
ROWS_PER_FETCH = 500
"""Rows of a long query that are fetched at once."""
RETRY_AFTER_S = 1.0
MAX_ROWS = 16
MAX_BYTES = 1_000_000
"""Limits of one statement that writes several rows."""

# Unless the URL sets them. A peer that vanishes is detected within seconds.
DEFAULTS: dict[str, Any] = {
    "application_name": "rollbook-ledger",
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
# A URL with several hosts is that of a primary and its standbys.
PRIMARY_ONLY = {"target_session_attrs": "read-write"}
LOST_CLASSES = ("08", "57P", "25P03")
"""Connection errors, a server that shuts down or starts, and sessions ended because they were idle."""
RERUN = frozenset({"40001", "40P01"})
LOCK_TIMEOUT = "55P03"
PERMANENT = ("does not exist", "authentication failed", "no pg_hba.conf entry", "permission denied", "no password")
"""Messages of connection errors that a retry does not fix. libpq gives no code for them."""
ADVICE = {
    "53100": "the disk of the database is full: free some space and start again; no acknowledged data is lost",
    "53200": "the database is out of memory: see its log",
    "42501": "the role lacks a privilege: grant it CREATE on the schema, or make the role its owner",
    "25006": "the database is read-only (a standby?): use the primary, or list the hosts of both in the URL",
    "3F000": "there is no schema to create tables in: create it, or correct search_path",
    "42P01": "a table of the ledger is missing: restore the schema from a backup",
    "XX001": "the database reports damaged data: restore it from a backup",
    "XX002": "the database reports a damaged index: REINDEX the schema of the ledger, then start again",
}


class LostConnectionError(Exception):
    """The session is lost, or its transaction must be repeated. Never leaves the store."""


def described(url: str) -> str:
    """The database and host of a URL, without the password."""
    parts = conninfo_to_dict(url)
    return (
        f"database {parts.get('dbname') or ''} at {parts.get('host') or 'the local socket'}:{parts.get('port') or 5432}"
    )


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Translate errors of psycopg as `translated` does; an error without translation passes unchanged."""
    try:
        yield
    except psycopg.Error as error:
        translation = translated(error, where)
        if translation is None:
            raise
        raise translation from error


def translated(error: BaseException, where: str) -> Exception | None:
    """A lost connection or one of the ledger's errors; None for a programming error."""
    if not isinstance(error, psycopg.Error):
        return None
    code = error.sqlstate
    if code in RERUN or (code or "").startswith(LOST_CLASSES):
        return LostConnectionError(str(error))
    if code is None and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        if any(message in str(error) for message in PERMANENT):
            return StoreFaultError(f"ledger in {where}: {error}; correct the store's URL or the privileges of its role")
        return LostConnectionError(str(error))
    if code == LOCK_TIMEOUT:
        return TransientError(
            f"ledger in {where}: another replica has been writing for too long; try again", retry_after_s=RETRY_AFTER_S
        )
    if code in ADVICE:
        return StoreFaultError(f"ledger in {where}: {error}; {ADVICE[code]}")
    if isinstance(error, psycopg.DataError):
        return RunError(f"ledger in {where}: a value cannot be stored: {error}")
    return None


class _Int(Int8Dumper):
    oid = 0


class _Float(FloatDumper):
    oid = 0


class _Bytes(BytesBinaryDumper):
    oid = 0


class _Bool(Int8Dumper):
    """The shared schema stores booleans as 1 and 0."""

    oid = 0

    def dump(self, obj: bool) -> bytes:
        return b"1" if obj else b"0"


# Parameters without a type: the server takes that of the column. Psycopg prepares a statement for each combination of types, and
# NULL has none, so rows with and without a value would need different statements.
UNTYPED: dict[type, Any] = {int: _Int, float: _Float, bytes: _Bytes, memoryview: _Bytes, bool: _Bool}


@lru_cache(maxsize=1024)
def _to_postgres(sql: str) -> bytes:
    """The statement with PostgreSQL's placeholders."""
    first, *others = sql.split("?")
    return (first + "".join(f"${number}{text}" for number, text in enumerate(others, start=1))).encode()


def _chunks(rows: Sequence[Sequence[Any]]) -> Iterator[Sequence[Sequence[Any]]]:
    """In sizes that are powers of two, so that few statements are prepared. Large rows are alone."""
    start, size = 0, MAX_ROWS
    while start < len(rows):
        while size > len(rows) - start or (size > 1 and _num_bytes(rows[start : start + size]) > MAX_BYTES):
            size //= 2
        yield rows[start : start + size]
        start += size


def _num_bytes(rows: Sequence[Sequence[Any]]) -> int:
    return sum(len(value) for row in rows for value in row if isinstance(value, bytes | memoryview))


class PostgresConnection:
    """Satisfies `write_buffer.Connection`. Opened by `connect`; its owner sends BEGIN and COMMIT as SQL."""

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self.raw = raw
        self._cursor_numbers = itertools.count()

    @property
    def backend_pid(self) -> int:
        return self.raw.info.backend_pid

    @property
    def is_lost(self) -> bool:
        return self.raw.closed or self.raw.broken

    @property
    def must_roll_back(self) -> bool:
        """Whether a statement failed; the transaction can only be rolled back then."""
        return self.raw.info.transaction_status is psycopg.pq.TransactionStatus.INERROR

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor:
        # Binary results: a payload as hexadecimal text would be twice as large and need parsing.
        return self.raw.execute(_to_postgres(sql), parameters, binary=True)

    def execute_script(self, script: str) -> Cursor:
        """Run several statements without parameters in one round trip. Returns the rows of the last one."""
        cursor = self.raw.execute(script.encode())
        while cursor.nextset():
            pass
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Written:
        cursor = self.raw.cursor()
        cursor.executemany(_to_postgres(sql), parameters)
        return cursor

    def write_rows(self, statement: RowsStatement, rows: Sequence[Sequence[Any]]) -> None:
        """One statement for many rows takes half of the time of a pipeline with one for each, in the client and in the server."""
        for some in _chunks(rows):
            self.raw.execute(_to_postgres(statement.sql(len(some))), [value for row in some for value in row])

    def stream(self, sql: str, parameters: Sequence[Any]) -> Iterator[Any]:
        with self.raw.cursor(name=f"rows{next(self._cursor_numbers)}") as cursor:
            cursor.itersize = ROWS_PER_FETCH
            cursor.execute(_to_postgres(sql), parameters, binary=True)
            yield from cursor

    def close(self) -> None:
        self.raw.close()


def transaction(
    db: PostgresConnection, where: str, *, objects: Objects | None = None, known: KnownRows | None = None
) -> SqlTransaction:
    """`objects`: where new payloads are stored; None: in the database. `known`: rows known to be current."""
    session = SqlSession(db, known=known, stream=db.stream, write_rows=db.write_rows)
    payloads = PostgresPayloads(session, objects)
    return SqlTransaction(session, f"ledger in {where}", payloads=payloads, translate=to_postgres)


def connect(url: str, settings: dict[str, str] | None = None, *, waits_for_standby: bool = False) -> PostgresConnection:
    """A new session with these session settings. Raises as `explained` describes.

    `waits_for_standby`: the session is not used before `await_standby`.
    """
    with explained(described(url)):
        given = conninfo_to_dict(url)
        defaults = DEFAULTS | (PRIMARY_ONLY if "," in str(given.get("host", "")) else {})
        missing = {name: value for name, value in defaults.items() if name not in given}
        raw = psycopg.connect(url, autocommit=True, cursor_factory=psycopg.RawCursor, **missing)
        raw.server_cursor_factory = psycopg.RawServerCursor
        for kind, dumper in UNTYPED.items():
            raw.adapters.register_dumper(kind, dumper)
        db = PostgresConnection(raw)
        try:
            for name, value in (settings or {}).items():
                raw.execute("SELECT set_config($1, $2, false)", (name, value))
            if waits_for_standby:
                await_standby(db)
        except BaseException:
            raw.close()
            raise
        return db


def await_standby(db: PostgresConnection) -> None:
    """Wait until the synchronous standby has every commit that is visible now. Without a standby: one flush.

    A primary that was killed shows commits after its restart that its standby may not have: a fail-over would lose them. A commit
    waits for everything before it in the log.
    """
    db.execute("SELECT pg_logical_emit_message(true, 'rollbook', '')")


def read_snapshot(db: PostgresConnection, work: Callable[[Transaction], T], where: str) -> T:
    db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        return work(transaction(db, where))
    finally:
        if not db.is_lost:
            db.execute("ROLLBACK")
