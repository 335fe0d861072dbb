"""A SQL session that buffers the rows of one commit.

Rows of runs, groups, payloads and history are buffered in memory and written with one statement per table, at the commit or before
a query that could depend on them (`select_flushed`). Every operation reads and changes the run's record; the session reads and
writes it once per commit. All other tables are written at once.

The buffered rows of a failed operation are discarded. If the operation has written to the database already, the whole commit is
rolled back and every operation runs again in its own transaction (`MustRedoError`). This is rare, and cheaper than a savepoint per
operation.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.records import GroupRecord, MoveRecord, RunRecord
from rollbook.ledger.stores.sql.tables import GROUPS, MOVES, RUNS

PayloadRows = dict[tuple[RunId, GroupId], Any]
"""Bodies, or where the bodies are stored."""


class MustRedoError(Exception):
    """An operation failed after it had written to the database; nothing of this commit may remain."""


class Cursor(Protocol):
    @property
    def rowcount(self) -> int:
        """Number of rows that the statement changed, over all of its parameter sets."""

    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """The required subset of a database driver, with `?` for parameters."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Cursor: ...
    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Cursor: ...


class PendingRows:
    """Rows that are not in the database yet."""

    def __init__(self) -> None:
        self.runs: dict[RunId, RunRecord] = {}
        self.groups: dict[tuple[RunId, GroupId], GroupRecord] = {}
        self.payloads: PayloadRows = {}
        self.moves: list[MoveRecord] = []

    def __bool__(self) -> bool:
        return bool(self.runs or self.groups or self.payloads or self.moves)

    def add(self, later: "PendingRows") -> None:
        self.runs.update(later.runs)
        self.groups.update(later.groups)
        self.payloads.update(later.payloads)
        self.moves += later.moves


class SqlSession:
    """One connection during one commit. Each operation of a commit is enclosed in `begin` and `end` or `fail`.

    `cached_runs` are run records known to be current. `stream` runs a query with many rows without fetching all at once.
    """

    def __init__(
        self,
        db: Connection,
        *,
        cached_runs: dict[RunId, RunRecord] | None = None,
        stream: Callable[[str, Sequence[Any]], Iterable[Any]] | None = None,
    ) -> None:
        self._db = db
        self._stream = stream or db.execute
        self._cached_runs = {} if cached_runs is None else cached_runs
        self._commit = PendingRows()
        self.pending = PendingRows()
        """Rows of the current operation."""
        self._operation_wrote = False
        self.has_written = False
        """Whether the commit has written anything to the database."""
        self.runs_written: dict[RunId, RunRecord] = {}
        self.payload_statement: Callable[[PayloadRows], tuple[str, list[Sequence[Any]]]]
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

    def flush(self) -> None:
        """Write all buffered rows."""
        if self._commit:
            self._write_pending(self._commit)
            self._commit = PendingRows()
        if self.pending:
            self._operation_wrote = True
            self._write_pending(self.pending)
            self.pending = PendingRows()

    def _write_pending(self, rows: PendingRows) -> None:
        self.has_written = True
        if rows.runs:
            self._db.executemany(RUNS.upsert, [RUNS.row(run) for run in rows.runs.values()])
            self.runs_written.update(rows.runs)
        if rows.groups:
            self._db.executemany(GROUPS.upsert, [GROUPS.row(group) for group in rows.groups.values()])
        if rows.moves:
            self._db.executemany(MOVES.insert, [MOVES.row(move) for move in rows.moves])
        if rows.payloads:
            self._db.executemany(*self.payload_statement(rows.payloads))

    # Buffered rows

    def run(self, run_id: RunId) -> RunRecord | None:
        for known in (self.pending.runs, self._commit.runs, self.runs_written, self._cached_runs):
            if run_id in known:
                return known[run_id]
        found = RUNS.one(self._db.execute(RUNS.select + "WHERE run_id = ?", (run_id,)).fetchone())
        if found is not None:
            self._cached_runs[run_id] = found
        return found

    def buffered_group(self, run_id: RunId, group_id: GroupId) -> GroupRecord | None:
        key = (run_id, group_id)
        return self.pending.groups.get(key) or self._commit.groups.get(key)

    # Statements

    def select(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        """A query that does not depend on buffered rows."""
        return self._db.execute(sql, parameters)

    def select_flushed(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        """A query on a buffered table."""
        self.flush()
        return self._db.execute(sql, parameters)

    def stream(self, sql: str, parameters: Sequence[Any]) -> Iterable[Any]:
        """The rows of a query with many rows, on any table."""
        self.flush()
        return self._stream(sql, parameters)

    def write(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        """Write to a table that is not buffered."""
        self._operation_wrote = self.has_written = True
        self._db.execute(sql, parameters)

    def write_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        self._operation_wrote = self.has_written = True
        return self._db.executemany(sql, rows).rowcount
