"""SQL of runs, owners, members, actions, producers and cursor positions."""

from rollbook.contracts.admission import ActionKind, MemberId, OwnerId, RunId
from rollbook.ledger.records import ActionRecord, MemberRecord, OwnerRecord, ProducerRecord, RunRecord
from rollbook.ledger.stores.sql.tables import ACTIONS, MEMBERS, OWNERS, PRODUCERS
from rollbook.ledger.stores.sql.write_buffer import SqlSession


class SqlRuns:
    """Satisfies `store.Runs`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def get(self, run_id: RunId) -> RunRecord | None:
        return self._session.run(run_id)

    def ids(self) -> list[RunId]:
        rows = self._session.select_flushed("SELECT run_id FROM runs ORDER BY created_at, run_id")
        return [RunId(row[0]) for row in rows]

    def with_leases(self) -> list[RunId]:
        rows = self._session.select_flushed(
            "SELECT run_id FROM owners WHERE state = 'alive' UNION SELECT run_id FROM members WHERE state = 'alive' "
            "UNION SELECT run_id FROM groups WHERE lease_until IS NOT NULL"
        )
        return [RunId(row[0]) for row in rows]

    def put(self, run: RunRecord) -> None:
        self._session.pending.runs[run.run_id] = run

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
        found = self._session.select(OWNERS.select + "WHERE run_id = ? AND owner_id = ?", (run_id, owner_id))
        return OWNERS.one(found.fetchone())

    def named(self, run_id: RunId, name: str) -> list[OwnerRecord]:
        return OWNERS.all(self._session.select(OWNERS.select + "WHERE run_id = ? AND name = ?", (run_id, name)))

    def alive(self, run_id: RunId) -> list[OwnerRecord]:
        return OWNERS.all(self._session.select(OWNERS.select + "WHERE run_id = ? AND state = 'alive'", (run_id,)))

    def put(self, owner: OwnerRecord) -> None:
        self._session.write(OWNERS.upsert, OWNERS.row(owner))


class SqlMembers:
    """Satisfies `store.Members`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def get(self, run_id: RunId, member_id: MemberId) -> MemberRecord | None:
        found = self._session.select(MEMBERS.select + "WHERE run_id = ? AND member_id = ?", (run_id, member_id))
        return MEMBERS.one(found.fetchone())

    def alive(self, run_id: RunId) -> list[MemberRecord]:
        sql = MEMBERS.select + "WHERE run_id = ? AND state = 'alive' ORDER BY joined_at, member_id"
        return MEMBERS.all(self._session.select(sql, (run_id,)))

    def put(self, member: MemberRecord) -> None:
        self._session.write(MEMBERS.upsert, MEMBERS.row(member))


class SqlActions:
    """Satisfies `store.Actions`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def add(self, action: ActionRecord) -> None:
        self._session.write(ACTIONS.insert, ACTIONS.row(action))

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
        self._session.write(PRODUCERS.upsert, PRODUCERS.row(producer))


class SqlPositions:
    """Satisfies `store.Positions`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def put(self, run_id: RunId, position: int, *, unsettled: int) -> None:
        self._session.write(
            "INSERT INTO positions (run_id, position, unsettled) VALUES (?, ?, ?) "
            "ON CONFLICT (run_id, position) DO UPDATE SET unsettled = excluded.unsettled",
            (run_id, position, unsettled),
        )

    def get(self, run_id: RunId, position: int) -> int | None:
        sql = "SELECT unsettled FROM positions WHERE run_id = ? AND position = ?"
        row = self._session.select(sql, (run_id, position)).fetchone()
        return None if row is None else int(row[0])

    def all(self, run_id: RunId) -> list[tuple[int, int]]:
        sql = "SELECT position, unsettled FROM positions WHERE run_id = ? ORDER BY position"
        return [(int(at), int(unsettled)) for at, unsettled in self._session.select(sql, (run_id,))]

    def delete(self, run_id: RunId, position: int) -> None:
        self._session.write("DELETE FROM positions WHERE run_id = ? AND position = ?", (run_id, position))
