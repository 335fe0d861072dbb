"""SQL of runs, owners, members, actions, producers and cursor positions."""

from rollbook.contracts.admission import ActionKind, MemberId, OwnerId, RunId
from rollbook.ledger.records import ActionRecord, MemberRecord, OwnerRecord, ProducerRecord, RunRecord
from rollbook.ledger.stores.sql.tables import (
    ACTIONS,
    GROUPS,
    MEMBERS,
    OWNERS,
    POSITIONS,
    PRODUCERS,
    RUNS,
    PositionRow,
)
from rollbook.ledger.stores.sql.write_buffer import Key, SqlSession

POSITIONS_PER_READ = 16


class SqlRuns:
    """Satisfies `store.Runs`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def get(self, run_id: RunId) -> RunRecord | None:
        return self._session.get(RUNS, (run_id,))

    def ids(self) -> list[RunId]:
        rows = self._session.select_flushed("SELECT run_id FROM runs ORDER BY created_at, run_id", (), RUNS)
        return [RunId(row[0]) for row in rows]

    def with_leases(self) -> list[RunId]:
        rows = self._session.select_flushed(
            "SELECT run_id FROM owners WHERE state = 'alive' UNION SELECT run_id FROM members WHERE state = 'alive' "
            "UNION SELECT run_id FROM groups WHERE lease_until IS NOT NULL",
            (),
            OWNERS,
            MEMBERS,
            GROUPS,
        )
        return [RunId(row[0]) for row in rows]

    def put(self, run: RunRecord) -> None:
        self._session.put(RUNS, run)

    def drops(self, run_id: RunId) -> dict[str, int]:
        return dict(self._session.select("SELECT kind, num FROM drops WHERE run_id = ?", (run_id,)).fetchall())

    def missing(self, run_id: RunId) -> dict[str, int]:
        sql = "SELECT kind, missing FROM drops WHERE run_id = ? AND missing > 0"
        return dict(self._session.select(sql, (run_id,)).fetchall())

    def count_drop(self, run_id: RunId, kind: str, *, num: int = 1, missing: int = 0) -> None:
        self._session.write(
            "INSERT INTO drops (run_id, kind, num, missing) VALUES (?, ?, ?, ?) ON CONFLICT (run_id, kind) "
            "DO UPDATE SET num = drops.num + excluded.num, missing = drops.missing + excluded.missing",
            (run_id, kind, num, missing),
        )


class SqlOwners:
    """Satisfies `store.Owners`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def get(self, run_id: RunId, owner_id: OwnerId) -> OwnerRecord | None:
        return self._session.get(OWNERS, (run_id, owner_id))

    def named(self, run_id: RunId, name: str) -> list[OwnerRecord]:
        return self._where("name = ?", run_id, name)

    def alive(self, run_id: RunId) -> list[OwnerRecord]:
        return self._where("state = 'alive'", run_id)

    def put(self, owner: OwnerRecord) -> None:
        self._session.put(OWNERS, owner)

    def _where(self, condition: str, *parameters: str) -> list[OwnerRecord]:
        sql = f"{OWNERS.select} WHERE run_id = ? AND {condition}"
        return OWNERS.all(self._session.select_flushed(sql, parameters, OWNERS))


class SqlMembers:
    """Satisfies `store.Members`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def get(self, run_id: RunId, member_id: MemberId) -> MemberRecord | None:
        return self._session.get(MEMBERS, (run_id, member_id))

    def alive(self, run_id: RunId) -> list[MemberRecord]:
        sql = MEMBERS.select + "WHERE run_id = ? AND state = 'alive' ORDER BY joined_at, member_id"
        return MEMBERS.all(self._session.select_flushed(sql, (run_id,), MEMBERS))

    def put(self, member: MemberRecord) -> None:
        self._session.put(MEMBERS, member)


class SqlActions:
    """Satisfies `store.Actions`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def add(self, action: ActionRecord) -> None:
        self._session.insert(ACTIONS.insert, [ACTIONS.row(action)])

    def by_nonce(self, run_id: RunId, nonce: str) -> ActionRecord | None:
        found = self._session.select(ACTIONS.select + "WHERE run_id = ? AND nonce = ?", (run_id, nonce))
        return ACTIONS.one(found.fetchone())

    def page(self, run_id: RunId, *, start: int = 0, limit: int) -> list[ActionRecord]:
        sql = ACTIONS.select + "WHERE run_id = ? AND number >= ? ORDER BY number LIMIT ?"
        return ACTIONS.all(self._session.select(sql, (run_id, start, limit)))

    def of_target(self, run_id: RunId, target: str) -> list[ActionRecord]:
        sql = ACTIONS.select + "WHERE run_id = ? AND target = ? ORDER BY number"
        return ACTIONS.all(self._session.select(sql, (run_id, target)))

    def quarantined(self, run_id: RunId) -> frozenset[str]:
        sql = "SELECT kind, target FROM actions WHERE run_id = ? AND kind IN ('quarantine', 'readmit') ORDER BY number"
        last = {target: kind for kind, target in self._session.select(sql, (run_id,))}
        return frozenset(target for target, kind in last.items() if kind == ActionKind.QUARANTINE)


class SqlProducers:
    """Satisfies `store.Producers`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def all(self, run_id: RunId) -> list[ProducerRecord]:
        return PRODUCERS.all(self._session.select(PRODUCERS.select + "WHERE run_id = ? ORDER BY name", (run_id,)))

    def put(self, producer: ProducerRecord) -> None:
        self._session.insert(PRODUCERS.upsert, [PRODUCERS.row(producer)])


class SqlPositions:
    """Satisfies `store.Positions`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def put(self, run_id: RunId, position: int, *, unsettled: int) -> None:
        self._session.put(POSITIONS, PositionRow(run_id=run_id, position=position, unsettled=unsettled))

    def get(self, run_id: RunId, position: int) -> int | None:
        is_known, found = self._session.lookup(POSITIONS, (run_id, position))
        if not is_known:
            found = self._read_around(run_id, position)
        return None if found is None else found.unsettled

    def all(self, run_id: RunId) -> list[tuple[int, int]]:
        sql = "SELECT position, unsettled FROM positions WHERE run_id = ? ORDER BY position"
        return [(int(at), int(unsettled)) for at, unsettled in self._session.select_flushed(sql, (run_id,), POSITIONS)]

    def delete(self, run_id: RunId, position: int) -> None:
        self._session.delete(POSITIONS, (run_id, position))

    def _read_around(self, run_id: RunId, position: int) -> PositionRow | None:
        """Read some positions at once: a commit opens and settles adjacent ones."""
        first = position - position % POSITIONS_PER_READ
        after = first + POSITIONS_PER_READ
        sql = POSITIONS.select + "WHERE run_id = ? AND position >= ? AND position < ?"
        rows: dict[Key, PositionRow | None] = {(run_id, at): None for at in range(first, after)}
        for row in POSITIONS.all(self._session.select(sql, (run_id, first, after))):
            rows[run_id, row.position] = row
        self._session.known.add(POSITIONS, rows)
        return rows[run_id, position]
