"""A PostgreSQL connection as the ledger's SQL wants it, and what its errors mean. The only door of psycopg."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.numeric import Int4Dumper

from rollbook.contracts.errors import RunError, TransientError
from rollbook.ledger.store import StoreFaultError, Transaction
from rollbook.ledger.stores.sql.transaction import Cursor, SqlTransaction

T = TypeVar("T")

CONNECT_S = 5
ROWS_AT_ONCE = 500
"""How many rows of a long search are fetched together."""
RETRY_AFTER_S = 1.0

# Unless the URL says otherwise. A peer that vanished without a word is noticed within some seconds.
DEFAULTS: dict[str, Any] = {
    "application_name": "rollbook-ledger",
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
LOST_CLASSES = ("08", "57P", "25P03")
"""Connection trouble, a server that shuts down or starts, and sessions that were ended because they stood still."""
RERUN = frozenset({"40001", "40P01"})
LOCK_TIMEOUT = "55P03"
HOPELESS = ("does not exist", "authentication failed", "no pg_hba.conf entry", "permission denied", "no password")
"""Refusals that waiting does not mend. libpq gives no code for them."""
ADVICE = {
    "53100": "the disk of the database is full: make room and start again, nothing that was answered is lost",
    "53200": "the database is out of memory: see its log",
    "42501": "the role may not do this: grant it CREATE on the schema, or make the role its owner",
    "25006": "the database takes no writes (a standby?): name the primary, or add target_session_attrs=read-write",
    "3F000": "there is no schema to create tables in: create it, or mend search_path",
    "42P01": "a table of the ledger is missing: restore the schema from a backup",
    "XX001": "the database reports damaged data: restore it from a backup",
    "XX002": "the database reports a damaged index: REINDEX the schema of the ledger, then start again",
}


class LostConnectionError(Exception):
    """The session is gone, or its transaction must be run once more. Never leaves the store."""


def described(url: str) -> str:
    """Where the ledger lies, without the secret."""
    parts = conninfo_to_dict(url)
    return (
        f"database {parts.get('dbname') or ''} at {parts.get('host') or 'the local socket'}:{parts.get('port') or 5432}"
    )


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn what psycopg raises into a lost connection or one of our verdicts. What is a mistake of ours passes unchanged."""
    try:
        yield
    except psycopg.Error as error:
        told = verdict(error, where)
        if told is None:
            raise
        raise told from error


def verdict(error: BaseException, where: str) -> Exception | None:
    if not isinstance(error, psycopg.Error):
        return None
    code = error.sqlstate
    if code in RERUN or (code or "").startswith(LOST_CLASSES):
        return LostConnectionError(str(error))
    if code is None and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        if any(word in str(error) for word in HOPELESS):
            return StoreFaultError(f"ledger in {where}: {error}; mend the store's URL or the rights of its role")
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


class _BoolAsNumber(Int4Dumper):
    """The schema keeps yes and no as 1 and 0, in every database."""

    def dump(self, obj: bool) -> bytes:
        return b"1" if obj else b"0"


@lru_cache(maxsize=512)
def _in_dialect(sql: str) -> bytes:
    return sql.replace("?", "%s").encode()


class PostgresConnection:
    """Satisfies `sql_transaction.Connection`. Made by `connect`; commits are said in SQL by whoever holds it."""

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self.raw = raw
        self._names = itertools.count()

    @property
    def backend_pid(self) -> int:
        return self.raw.info.backend_pid

    @property
    def is_lost(self) -> bool:
        return self.raw.closed or self.raw.broken

    @property
    def is_spoiled(self) -> bool:
        """A statement failed: the transaction can only be rolled back."""
        return self.raw.info.transaction_status is psycopg.pq.TransactionStatus.INERROR

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor:
        # Results in binary: a payload as hexadecimal text would be twice its size and has to be parsed.
        return self.raw.execute(_in_dialect(sql), parameters, binary=True)

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Cursor:
        cursor = self.raw.cursor()
        cursor.executemany(_in_dialect(sql), parameters)
        return cursor

    def run_script(self, sql: str) -> None:
        """Several statements, no parameters."""
        self.raw.execute(sql.encode())

    def stream(self, sql: str, parameters: Sequence[Any]) -> Iterator[Any]:
        with self.raw.cursor(name=f"rows{next(self._names)}") as cursor:
            cursor.itersize = ROWS_AT_ONCE
            cursor.execute(_in_dialect(sql), parameters, binary=True)
            yield from cursor

    def close(self) -> None:
        self.raw.close()


class PostgresTransaction(SqlTransaction):
    def __init__(self, connection: PostgresConnection) -> None:
        super().__init__(connection)
        self._connection = connection

    def _each(self, sql: str, parameters: Sequence[Any]) -> Iterable[Any]:
        return self._connection.stream(sql, parameters)


def connect(url: str, settings: dict[str, str] | None = None) -> PostgresConnection:
    """A session of its own. `settings` are those of the session; raises as `explained` says."""
    with explained(described(url)):
        given = conninfo_to_dict(url)
        missing = {name: value for name, value in DEFAULTS.items() if name not in given}
        raw = psycopg.connect(url, autocommit=True, **missing)
        raw.adapters.register_dumper(bool, _BoolAsNumber)
        try:
            for name, value in (settings or {}).items():
                raw.execute("SELECT set_config(%s, %s, false)", (name, value))
        except BaseException:
            raw.close()
            raise
        return PostgresConnection(raw)


def read_at_one_moment(db: PostgresConnection, work: Callable[[Transaction], T]) -> T:
    db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        return work(PostgresTransaction(db))
    finally:
        if not db.is_lost:
            db.execute("ROLLBACK")
