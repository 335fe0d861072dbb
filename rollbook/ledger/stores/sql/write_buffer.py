"""A SQL session that buffers the rows of one commit and remembers the rows that it has read.

Rows of runs, owners, members, groups, positions, publications, payloads and history are buffered in memory and written with one
statement per table: at the commit, or before a query that could depend on them (`select_flushed`). All other tables are written at
once.

A row is read by its key once: the session caches it (`KnownRows`), including misses. Its writer may keep the known
rows for the next commit, if it can tell that no other session has written meanwhile.

The buffered rows of a failed operation are discarded. If the operation has written to the database already, the whole commit is
rolled back and every operation runs again in its own transaction (`MustRedoError`). This is rare, and cheaper than a savepoint per
operation.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.records import MoveRecord, Record
from rollbook.ledger.stores.sql.tables import MOVES, Insert, RowsStatement, Table

R = TypeVar("R", bound=Record)
Key = tuple[Any, ...]
PayloadRows = dict[tuple[RunId, GroupId], Any]
"""Bodies, or where the bodies are stored."""

MAX_KNOWN = 2_000
"""Known rows of a table: a few megabytes for groups, and more than a run has open at a time."""


class MustRedoError(Exception):
    """An operation failed after it had written to the database; nothing of this commit may remain."""


class Written(Protocol):
    @property
    def rowcount(self) -> int:
        """Number of rows that the statement changed, over all of its parameter sets."""


class Cursor(Protocol):
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """The required subset of a database driver, with `?` for parameters."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Cursor: ...
    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Written: ...


class KnownRows:
    """Records as the database has them, by table and key. None: there is no such row."""

    def __init__(self) -> None:
        self._tables: defaultdict[Table[Any], dict[Key, Any]] = defaultdict(dict)

    def of(self, table: Table[Any]) -> Mapping[Key, Any]:
        return self._tables[table]

    def add(self, table: Table[Any], rows: Mapping[Key, Any], *, limit: int = MAX_KNOWN) -> None:
        known = self._tables[table]
        if len(known) + len(rows) > limit:
            known.clear()
        known.update(rows)

    def clear(self) -> None:
        self._tables.clear()


class PendingRows:
    """Rows that are not in the database yet. A row that is None is to be deleted."""

    def __init__(self) -> None:
        self.rows: defaultdict[Table[Any], dict[Key, Any]] = defaultdict(dict)
        self.payloads: PayloadRows = {}
        self.moves: list[MoveRecord] = []

    def has(self, tables: Sequence[Table[Any]]) -> bool:
        """Whether there are rows of these tables; without one, any rows."""
        if tables:
            return any(table in self.rows for table in tables)
        return bool(self.rows or self.moves or self.payloads)

    def add(self, later: "PendingRows") -> None:
        for table, rows in later.rows.items():
            self.rows[table].update(rows)
        self.payloads.update(later.payloads)
        self.moves += later.moves


class SqlSession:
    """One connection during one commit. Each operation of a commit is enclosed in `begin` and `end` or `fail`.

    `known` are rows known to be current; its owner clears it if the commit fails. `stream` runs a query with many rows without
    fetching all at once; `write_rows` writes or deletes several rows (default: with a statement for each).
    """

    def __init__(
        self,
        db: Connection,
        *,
        known: KnownRows | None = None,
        stream: Callable[[str, Sequence[Any]], Iterable[Any]] | None = None,
        write_rows: Callable[[RowsStatement, Sequence[Sequence[Any]]], object] | None = None,
    ) -> None:
        self._db = db
        self._stream = stream or db.execute
        self._write_rows = write_rows or (lambda statement, rows: db.executemany(statement.sql(), rows))
        self.known = KnownRows() if known is None else known
        self._commit = PendingRows()
        self.pending = PendingRows()
        """Rows of the current operation."""
        self._operation_wrote = False
        self.has_written = False
        """Whether the commit has written anything to the database."""
        self.payload_statement: Callable[[PayloadRows], tuple[Insert, list[Sequence[Any]]]]
        """How payload rows are written; set by the payloads part of the transaction."""

    def begin(self) -> None:
        self.pending = PendingRows()
        self._operation_wrote = False

    def end(self) -> None:
        """The operation succeeded; its rows belong to the commit."""
        self._commit.add(self.pending)
        self.pending = PendingRows()

    def fail(self) -> None:
        """The operation failed; discard its rows."""
        self.pending = PendingRows()
        if self._operation_wrote:
            raise MustRedoError

    def flush(self, *tables: Table[Any]) -> None:
        """Write the buffered rows of these tables; without one, all buffered rows."""
        for pending in (self._commit, self.pending):
            if not pending.has(tables):
                continue
            has_written = self._operation_wrote
            # If a statement fails, nothing of the commit may remain.
            self._operation_wrote = self.has_written = True
            self._write_tables(pending, tables or tuple(pending.rows))
            if not tables:
                self._write_moves_and_payloads(pending)
            self._operation_wrote = has_written or pending is self.pending

    def _write_tables(self, pending: PendingRows, tables: Iterable[Table[Any]]) -> None:
        for table in tables:
            rows = pending.rows.pop(table, {})
            written = [table.row(record) for record in rows.values() if record is not None]
            deleted = [key for key, record in rows.items() if record is None]
            if written:
                self._write_rows(table.upsert, written)
            if deleted:
                self._write_rows(table.delete, deleted)
            self.known.add(table, rows)

    def _write_moves_and_payloads(self, pending: PendingRows) -> None:
        if pending.moves:
            self._write_rows(MOVES.insert, [MOVES.row(move) for move in pending.moves])
        if pending.payloads:
            self._write_rows(*self.payload_statement(pending.payloads))
        pending.moves, pending.payloads = [], {}

    # Buffered and known rows

    def get(self, table: Table[R], key: Key) -> R | None:
        """The row with this key, as this operation sees it."""
        known, found = self.lookup(table, key)
        if not known:
            found = table.one(self._db.execute(table.select + table.with_key, key).fetchone())
            self.known.add(table, {key: found})
        return found

    def lookup(self, table: Table[R], key: Key) -> tuple[bool, R | None]:
        """Whether the row is buffered or known, and the row. None: there is no such row."""
        for rows in (self.pending.rows.get(table), self._commit.rows.get(table), self.known.of(table)):
            if rows and key in rows:
                return True, rows[key]
        return False, None

    def put(self, table: Table[R], record: R) -> None:
        self.pending.rows[table][table.key_of(record)] = record

    def delete(self, table: Table[Any], key: Key) -> None:
        self.pending.rows[table][key] = None

    # Statements

    def select(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        """A query that does not depend on buffered rows."""
        return self._db.execute(sql, parameters)

    def select_flushed(self, sql: str, parameters: Sequence[Any], *tables: Table[Any]) -> Cursor:
        """A query on these buffered tables; without one, on payloads or history."""
        self.flush(*tables)
        return self._db.execute(sql, parameters)

    def stream(self, sql: str, parameters: Sequence[Any]) -> Iterable[Any]:
        """The rows of a query with many rows, on any table."""
        self.flush()
        return self._stream(sql, parameters)

    def write(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        """Write to a table that is not buffered."""
        self._operation_wrote = self.has_written = True
        self._db.execute(sql, parameters)

    def insert(self, statement: Insert, rows: Sequence[Sequence[Any]]) -> None:
        """Write rows of a table that is not buffered."""
        self._operation_wrote = self.has_written = True
        self._write_rows(statement, rows)

    def write_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        self._operation_wrote = self.has_written = True
        return self._db.executemany(sql, rows).rowcount
