"""SQL of groups, their history, and payloads that are stored in the database."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from rollbook.contracts.admission import OwnerId, RunId
from rollbook.contracts.group import GroupId, GroupState
from rollbook.ledger.records import GroupRecord, MoveRecord, Origin
from rollbook.ledger.store import Move, StoreFaultError
from rollbook.ledger.stores.sql.tables import GROUPS, MOVES, Insert
from rollbook.ledger.stores.sql.write_buffer import Key, PayloadRows, SqlSession

# Small results are ordered by `+sequence, +part`: the plus keeps the planner from scanning the whole run in order to save a sort.
IDS_PER_QUERY = 16
SOME_GROUPS = f"WHERE run_id = ? AND group_id IN ({', '.join('?' * IDS_PER_QUERY)})"
MAX_SEQUENCE = 2**63 - 1
GROUPS_PER_CHECK = 256
"""Each step of a check is done for all of them before the next: this takes four fifths of the time of one group after the other."""
HAS_NO_ROW = (
    "AND NOT EXISTS (SELECT 1 FROM groups WHERE groups.run_id = history.run_id AND groups.group_id = history.group_id)"
)

INSERT_PAYLOAD = Insert(
    "payloads (run_id, group_id, body)", 3, " ON CONFLICT (run_id, group_id) DO UPDATE SET body = excluded.body"
)


def padded(group_ids: Sequence[GroupId], count: int = IDS_PER_QUERY) -> Iterator[list[GroupId]]:
    """The ids in lists of this size, the last one filled up: a statement with a fixed number of ids is prepared once."""
    for start in range(0, len(group_ids), count):
        ids = list(group_ids[start : start + count])
        yield ids + ids[:1] * (count - len(ids))


def _rows_of(
    session: SqlSession, select: str, run_id: RunId, group_ids: Sequence[GroupId], rest: str = ""
) -> Iterator[Any]:
    for ids in padded(group_ids):
        yield from session.select_flushed(f"{select} {SOME_GROUPS} {rest}", (run_id, *ids))


class SqlGroups:
    """Satisfies `store.Groups`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def get(self, run_id: RunId, group_id: GroupId) -> GroupRecord | None:
        return self._session.get(GROUPS, (run_id, group_id))

    def find(self, run_id: RunId, group_ids: Sequence[GroupId]) -> dict[GroupId, GroupRecord]:
        found: dict[GroupId, GroupRecord] = {}
        others: list[GroupId] = []
        for group_id in group_ids:
            is_known, group = self._session.lookup(GROUPS, (run_id, group_id))
            if not is_known:
                others.append(group_id)
            elif group is not None:
                found[group_id] = group
        for ids in padded(others):
            rows: dict[Key, GroupRecord | None] = {(run_id, group_id): None for group_id in ids}
            for group in GROUPS.all(self._session.select(GROUPS.select + SOME_GROUPS, (run_id, *ids)).fetchall()):
                found[group.group_id] = rows[run_id, group.group_id] = group
            self._session.known.add(GROUPS, rows)
        return found

    def put(self, group: GroupRecord) -> None:
        self._session.put(GROUPS, group)

    def leased_by(self, run_id: RunId, owner: OwnerId) -> list[GroupRecord]:
        return self._where("owner = ? ORDER BY +sequence", run_id, owner)

    def leases_ending_by(self, run_id: RunId, until: float) -> list[GroupRecord]:
        return self._where("lease_until <= ? ORDER BY +sequence", run_id, until)

    def waiting(self, run_id: RunId, limit: int) -> list[GroupRecord]:
        return self._where("state = 'dispatched' AND owner IS NULL ORDER BY sequence LIMIT ?", run_id, limit)

    def dispatched(self, run_id: RunId) -> list[GroupRecord]:
        return self._where("state = 'dispatched' ORDER BY sequence", run_id)

    def oldest_dispatched(self, run_id: RunId) -> int | None:
        sql = "SELECT sequence FROM groups WHERE run_id = ? AND state = 'dispatched' ORDER BY sequence LIMIT 1"
        row = self._session.select_flushed(sql, (run_id,), GROUPS).fetchone()
        return None if row is None else int(row[0])

    def aged(self, run_id: RunId, below: int) -> tuple[int, int]:
        sql = (
            "SELECT count(*), coalesce(sum(expected_samples), 0) FROM groups "
            "WHERE run_id = ? AND state = 'dispatched' AND admission_version < ?"
        )
        groups, samples = self._session.select_flushed(sql, (run_id, below), GROUPS).fetchone()
        return int(groups), int(samples)

    def last_part(self, run_id: RunId, sequence: int) -> GroupRecord | None:
        found = self._where("sequence = ? ORDER BY part DESC LIMIT 1", run_id, sequence)
        return found[0] if found else None

    def queued(self, run_id: RunId) -> list[GroupRecord]:
        return self._where("state = 'queued' ORDER BY +sequence, +part", run_id)

    def queued_by_sequence(
        self, run_id: RunId, limit: int, *, origin: Origin, producer: str | None = None
    ) -> list[GroupRecord]:
        # `IS NULL` and `=`: both can use the index, `IS ?` cannot in PostgreSQL.
        of_producer, values = ("IS NULL", ()) if producer is None else ("= ?", (producer,))
        return self._where(
            f"state = 'queued' AND origin = '{origin.value}' AND producer {of_producer} ORDER BY sequence, part LIMIT ?",
            run_id,
            *values,
            limit,
        )

    def queued_by_arrival(self, run_id: RunId, limit: int, *, origin: Origin) -> list[GroupRecord]:
        return self._where(
            f"state = 'queued' AND origin = '{origin.value}' AND producer IS NULL ORDER BY arrival LIMIT ?",
            run_id,
            limit,
        )

    def queued_below(self, run_id: RunId, version: int, *, by_newest: bool = False) -> list[GroupRecord]:
        column = "newest_version" if by_newest else "oldest_version"
        return self._where(
            f"state = 'queued' AND {column} IS NOT NULL AND {column} < ? ORDER BY +sequence, part", run_id, version
        )

    def releasable(self, run_id: RunId, up_to_step: int, limit: int, *, dropped_only: bool) -> list[GroupRecord]:
        only = "AND state = 'dropped'" if dropped_only else ""
        return self._where(
            f"has_payload = 1 AND release_step IS NOT NULL AND release_step <= ? {only} AND NOT (part = 1 AND EXISTS "
            "(SELECT 1 FROM groups later WHERE later.run_id = groups.run_id AND later.sequence = groups.sequence "
            "AND later.state = 'dispatched')) ORDER BY release_step LIMIT ?",
            run_id,
            up_to_step,
            limit,
        )

    def page(self, run_id: RunId, *, start: int = 0, limit: int, state: GroupState | None = None) -> list[GroupRecord]:
        # The state is written into the statement: a parameter could not select a partial index.
        only = "" if state is None else f"AND state = '{state.value}'"
        if state is GroupState.QUEUED:
            some = self._where(f"+sequence >= ? {only} ORDER BY +sequence, +part LIMIT ?", run_id, start, limit)
        else:
            some = self._where(f"sequence >= ? {only} ORDER BY sequence, part LIMIT ?", run_id, start, limit)
        if some and len(some) == limit:
            last = some[-1]
            some += self._where(f"sequence = ? AND part > ? {only} ORDER BY part", run_id, last.sequence, last.part)
        return some

    def values(self, run_id: RunId, columns: Sequence[str], *, start: int = 0, limit: int) -> list[tuple[Any, ...]]:
        unknown = set(columns) - set(GROUPS.columns)
        if unknown:
            raise ValueError(f"groups have no columns {sorted(unknown)}")
        last = "SELECT sequence FROM groups WHERE run_id = ? AND sequence >= ? ORDER BY sequence, part LIMIT 1 OFFSET ?"
        sql = (
            f"SELECT {', '.join(columns)} FROM groups WHERE run_id = ? AND sequence >= ? "
            f"AND sequence <= COALESCE(({last}), {MAX_SEQUENCE}) ORDER BY sequence, part"
        )
        return self._session.select_flushed(sql, (run_id, start, run_id, start, limit - 1), GROUPS).fetchall()

    def each(self, run_id: RunId) -> Iterator[GroupRecord]:
        rows = self._session.stream(GROUPS.select + "WHERE run_id = ? ORDER BY group_id", (run_id,))
        return (GROUPS.record(row) for row in rows)

    def checked(
        self, run_id: RunId, on_damage: Callable[[str], None], group_ids: Sequence[GroupId] | None = None
    ) -> Iterator[list[GroupRecord]]:
        if group_ids is None:
            sql = GROUPS.select_checked + "WHERE run_id = ? ORDER BY sequence, part"
            rows = iter(self._session.stream(sql, (run_id,)))
        else:
            rows = _rows_of(self._session, GROUPS.select_checked, run_id, group_ids)
        while some := list(islice(rows, GROUPS_PER_CHECK)):
            for sentence in GROUPS.damaged(some):
                on_damage(sentence)
            groups: list[GroupRecord] = []
            for row in some:
                try:
                    groups.append(GROUPS.record(row[:-1]))
                except StoreFaultError as error:
                    on_damage(str(error))
            yield groups

    def _where(self, condition: str, run_id: RunId, *parameters: Any) -> list[GroupRecord]:
        sql = f"{GROUPS.select} WHERE run_id = ? AND {condition}"
        return GROUPS.all(self._session.select_flushed(sql, (run_id, *parameters), GROUPS))


class SqlHistory:
    """Satisfies `store.History`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def add(self, move: MoveRecord) -> None:
        self._session.pending.moves.append(move)

    def of_group(self, run_id: RunId, group_id: GroupId) -> list[MoveRecord]:
        sql = MOVES.select + "WHERE run_id = ? AND group_id = ? ORDER BY id"
        return MOVES.all(self._session.select_flushed(sql, (run_id, group_id)))

    def after(self, number: int, limit: int) -> list[tuple[int, RunId, GroupId]]:
        sql = "SELECT id, run_id, group_id FROM history WHERE id > ? ORDER BY id LIMIT ?"
        return [(row[0], row[1], row[2]) for row in self._session.select_flushed(sql, (number, limit))]

    def records_after(self, run_id: RunId, number: int) -> list[tuple[int, MoveRecord]]:
        # An expression, so that the planner reads the moves after the number instead of all moves of the run.
        sql = f"SELECT {', '.join(MOVES.columns)}, id FROM history WHERE id > ? AND run_id || '' = ? ORDER BY id"
        return [(row[-1], MOVES.record(row[:-1])) for row in self._session.select_flushed(sql, (number, run_id))]

    def last_number(self, run_id: RunId) -> int:
        # An expression, so that the planner reads the moves from the last one on instead of sorting all moves of the run.
        sql = "SELECT id FROM history WHERE run_id || '' = ? ORDER BY id DESC LIMIT 1"
        row = self._session.select_flushed(sql, (run_id,)).fetchone()
        return 0 if row is None else int(row[0])

    def checked(
        self, run_id: RunId, on_damage: Callable[[str], None], group_ids: Sequence[GroupId]
    ) -> dict[GroupId, list[Move]]:
        # A join: without statistics, PostgreSQL would read all moves of the run for a condition on its id and a list of groups.
        sql = (
            f"WITH wanted (name) AS (VALUES {', '.join(['(?)'] * IDS_PER_QUERY)}) {MOVES.select_checked} "
            "JOIN wanted ON group_id = name WHERE run_id = ? ORDER BY group_id, id"
        )
        rows: list[Any] = []
        for start in range(0, len(group_ids), IDS_PER_QUERY):
            ids = group_ids[start : start + IDS_PER_QUERY]
            no_ids = (None,) * (IDS_PER_QUERY - len(ids))
            rows += self._session.select_flushed(sql, (*ids, *no_ids, run_id)).fetchall()
        for sentence in MOVES.damaged(rows):
            on_damage(sentence)
        found: defaultdict[GroupId, list[Move]] = defaultdict(list)
        for row in rows:
            found[row[1]].append(row[2:5])
        return found

    def without_row(self, run_id: RunId, group_ids: Sequence[GroupId] | None = None) -> list[GroupId]:
        select = "SELECT DISTINCT group_id FROM history"
        if group_ids is None:
            rows = self._session.stream(f"{select} WHERE run_id = ? {HAS_NO_ROW}", (run_id,))
        else:
            rows = _rows_of(self._session, select, run_id, group_ids, HAS_NO_ROW)
        return [row[0] for row in rows]


class SqlPayloads:
    """Payloads in a table of the database. Satisfies `store.Payloads`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session
        session.payload_statement = self._statement

    def put(self, run_id: RunId, group_id: GroupId, body: bytes | memoryview, digest: str | None = None) -> None:
        self._session.pending.payloads[run_id, group_id] = body

    def get(self, run_id: RunId, group_id: GroupId) -> bytes | None:
        sql = "SELECT body FROM payloads WHERE run_id = ? AND group_id = ?"
        row = self._session.select_flushed(sql, (run_id, group_id)).fetchone()
        return None if row is None else bytes(row[0])

    def get_many(self, run_id: RunId, group_ids: Sequence[GroupId]) -> list[bytes | memoryview | None]:
        return [self.get(run_id, group_id) for group_id in group_ids]

    def delete(self, run_id: RunId, group_id: GroupId) -> None:
        self._session.flush()
        self._session.write("DELETE FROM payloads WHERE run_id = ? AND group_id = ?", (run_id, group_id))

    def lost(self, run_id: RunId) -> list[GroupId]:
        return []

    @staticmethod
    def _statement(payloads: PayloadRows) -> tuple[Insert, list[Sequence[Any]]]:
        return INSERT_PAYLOAD, [(run_id, group_id, body) for (run_id, group_id), body in payloads.items()]
