"""A commit's worth of operations on SQLite, written as late and as much together as possible.

Runs, groups, histories and payloads that operations of one commit write are kept in memory and go to the file in one statement a
table, before the commit or before anything is asked that could depend on them. A run's record, which every operation reads and
changes, is read once and written once.

An operation that fails is forgotten with what it kept. Should it have written to the file already, the whole commit is taken back
and every operation done again by itself (`MustRedoError`): rare, and simpler than a savepoint for each, which all would pay for.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.records import GroupRecord, MoveRecord, RunRecord
from rollbook.ledger.stores.sql.tables import GROUPS, MOVES, RUNS
from rollbook.ledger.stores.sql.transaction import Connection, Cursor, SqlTransaction

KEPT = re.compile(r"\b(FROM|INTO|UPDATE|JOIN)\s+(runs|groups|payloads|payload_places|history)\b")
"""Statements about what is kept in memory."""
INSERT_PAYLOAD = (
    "INSERT INTO payloads (run_id, group_id, body) VALUES (?, ?, ?) "
    "ON CONFLICT (run_id, group_id) DO UPDATE SET body = excluded.body"
)


KeptPayloads = dict[tuple[RunId, GroupId], Any]
"""Bodies, or where they lie already."""


class MustRedoError(Exception):
    """An operation failed after it had written: nothing of this commit may stay."""


class Kept:
    """Rows that are not in the file yet."""

    def __init__(self) -> None:
        self.runs: dict[RunId, RunRecord] = {}
        self.groups: dict[tuple[RunId, GroupId], GroupRecord] = {}
        self.payloads: KeptPayloads = {}
        self.moves: list[MoveRecord] = []

    @property
    def is_empty(self) -> bool:
        return not (self.runs or self.groups or self.payloads or self.moves)

    def take(self, later: "Kept") -> None:
        self.runs.update(later.runs)
        self.groups.update(later.groups)
        self.payloads.update(later.payloads)
        self.moves += later.moves

    def write(self, db: Connection) -> None:
        """The rows; payloads go where the store keeps them."""
        if self.runs:
            db.executemany(RUNS.upsert, [RUNS.row(run) for run in self.runs.values()])
        if self.groups:
            db.executemany(GROUPS.upsert, [GROUPS.row(group) for group in self.groups.values()])
        if self.moves:
            db.executemany(MOVES.insert, [MOVES.row(move) for move in self.moves])


class _Door:
    """The connection as `SqlTransaction` sees it: what is kept goes through first, where a statement could depend on it."""

    def __init__(self, owner: "WriteBehind", db: Connection) -> None:
        self._owner = owner
        self._db = db

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor:
        self._owner.before(sql)
        return self._db.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Cursor:
        self._owner.before(sql)
        return self._db.executemany(sql, parameters)


_is_about_kept: dict[str, bool] = {}
"""Statements are few, and written in this program."""


class WriteBehind(SqlTransaction):
    """One for each commit; `begin` and `end` or `fail` around each operation."""

    def __init__(self, db: Connection, known_runs: dict[RunId, RunRecord]) -> None:
        super().__init__(_Door(self, db))
        self._file = db
        self._known_runs = known_runs
        self._commit = Kept()
        self._operation = Kept()
        self._wrote = False
        self.runs_written: dict[RunId, RunRecord] = {}

    # ------------------------------------------------------------------ an operation's frame

    def begin(self) -> None:
        self._operation = Kept()
        self._wrote = False
        self.announced = set()
        self.must_sync = False

    def end(self) -> None:
        """The operation succeeded: its rows belong to the commit."""
        self._commit.take(self._operation)
        self._operation = Kept()

    def fail(self) -> None:
        """The operation failed: forget its rows."""
        self._operation = Kept()
        if self._wrote:
            raise MustRedoError

    def finish(self) -> None:
        """Write what is left; the commit follows."""
        self._write(self._commit)

    def before(self, sql: str) -> None:
        is_about_kept = _is_about_kept.get(sql)
        if is_about_kept is None:
            is_about_kept = _is_about_kept[sql] = KEPT.search(sql) is not None
        if is_about_kept:
            self._write(self._commit)
            self._commit = Kept()
            self._wrote |= not self._operation.is_empty
            self._write(self._operation)
            self._operation = Kept()
        self._wrote |= not sql.startswith("SELECT")

    def _write(self, kept: Kept) -> None:
        kept.write(self._file)
        if kept.payloads:
            self._write_payloads(kept.payloads)
        self.runs_written.update(kept.runs)

    def _write_payloads(self, payloads: KeptPayloads) -> None:
        self._file.executemany(INSERT_PAYLOAD, [(run, group, body) for (run, group), body in payloads.items()])

    # ------------------------------------------------------------------ what is kept

    def run(self, run_id: RunId) -> RunRecord | None:
        for kept in (self._operation.runs, self._commit.runs, self.runs_written, self._known_runs):
            if run_id in kept:
                return kept[run_id]
        found = RUNS.one(self._file.execute(RUNS.select + "WHERE run_id = ?", (run_id,)).fetchone())
        if found is not None:
            self._known_runs[run_id] = found
        return found

    def put_run(self, run: RunRecord) -> None:
        self._operation.runs[run.run_id] = run

    def group(self, run_id: RunId, group_id: GroupId) -> GroupRecord | None:
        key = (run_id, group_id)
        found = self._operation.groups.get(key) or self._commit.groups.get(key)
        if found is not None:
            return found
        return GROUPS.one(self._file.execute(GROUPS.select + "WHERE run_id = ? AND group_id = ?", key).fetchone())

    def known_groups(self, run_id: RunId, group_ids: Sequence[GroupId]) -> dict[GroupId, GroupRecord]:
        kept: dict[GroupId, GroupRecord] = {}
        for group_id in group_ids:
            found = self._operation.groups.get((run_id, group_id)) or self._commit.groups.get((run_id, group_id))
            if found is not None:
                kept[group_id] = found
        others = [group_id for group_id in group_ids if group_id not in kept]
        return kept | self._find_groups(self._file, run_id, others) if others else kept

    def put_group(self, group: GroupRecord) -> None:
        self._operation.groups[group.run_id, group.group_id] = group

    def put_payload(
        self, run_id: RunId, group_id: GroupId, body: bytes | memoryview, digest: str | None = None
    ) -> None:
        self._operation.payloads[run_id, group_id] = body

    def add_move(self, move: MoveRecord) -> None:
        self._operation.moves.append(move)
