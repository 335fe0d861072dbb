"""The primitives of a transaction as SQL. Knows statements; drivers, threads and commits are the store's."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from rollbook.contracts.admission import OwnerId, RunId
from rollbook.contracts.batch import BatchEntry, BatchManifest
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.policy import PublicationId
from rollbook.ledger.atropos.stores.sql import SqlAtroposTables
from rollbook.ledger.records import (
    BatchRecord,
    GroupRecord,
    MoveRecord,
    OwnerRecord,
    ProducerRecord,
    PublicationRecord,
    RunRecord,
    StepRecord,
)
from rollbook.ledger.stores.sql.tables import GROUPS, MOVES, OWNERS, PRODUCERS, PUBLICATIONS, RUNS, STEPS

# Small sets are ordered by `+sequence`: the plus keeps the planner from walking the whole run in order to save a sort.
ASKED_TOGETHER = 16
SOME_GROUPS = f"WHERE run_id = ? AND group_id IN ({', '.join('?' * ASKED_TOGETHER)})"
ENTRY_COLUMNS = "group_id, sequence, payload_digest, oldest_version"


class Cursor(Protocol):
    @property
    def rowcount(self) -> int:
        """Rows that the statement changed, in all of its repetitions."""

    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """What is needed of a database driver: `?` for parameters."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Cursor: ...
    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Cursor: ...


class SqlTransaction:
    """Satisfies `store.Transaction` on one connection."""

    def __init__(self, connection: Connection) -> None:
        self._db = connection
        self.atropos = SqlAtroposTables(connection)
        self.must_sync = False
        self.announced: set[RunId] = set()

    def run(self, run_id: RunId) -> RunRecord | None:
        return RUNS.one(self._db.execute(RUNS.select + "WHERE run_id = ?", (run_id,)).fetchone())

    def runs(self) -> list[RunId]:
        return [RunId(row[0]) for row in self._db.execute("SELECT run_id FROM runs ORDER BY created_at, run_id")]

    def put_run(self, run: RunRecord) -> None:
        self._db.execute(RUNS.upsert, RUNS.row(run))

    def drops(self, run_id: RunId) -> dict[str, int]:
        return dict(self._db.execute("SELECT kind, num FROM drops WHERE run_id = ?", (run_id,)).fetchall())

    def count_drop(self, run_id: RunId, kind: str) -> None:
        self._db.execute(
            "INSERT INTO drops (run_id, kind, num) VALUES (?, ?, 1) ON CONFLICT (run_id, kind) DO UPDATE SET num = drops.num + 1",
            (run_id, kind),
        )

    def owner(self, run_id: RunId, owner_id: OwnerId) -> OwnerRecord | None:
        found = self._db.execute(OWNERS.select + "WHERE run_id = ? AND owner_id = ?", (run_id, owner_id))
        return OWNERS.one(found.fetchone())

    def owners_named(self, run_id: RunId, name: str) -> list[OwnerRecord]:
        return OWNERS.all(self._db.execute(OWNERS.select + "WHERE run_id = ? AND name = ?", (run_id, name)))

    def owners_alive(self, run_id: RunId) -> list[OwnerRecord]:
        return OWNERS.all(self._db.execute(OWNERS.select + "WHERE run_id = ? AND state = 'alive'", (run_id,)))

    def put_owner(self, owner: OwnerRecord) -> None:
        self._db.execute(OWNERS.upsert, OWNERS.row(owner))

    def producers(self, run_id: RunId) -> list[ProducerRecord]:
        return PRODUCERS.all(self._db.execute(PRODUCERS.select + "WHERE run_id = ? ORDER BY name", (run_id,)))

    def put_producer(self, producer: ProducerRecord) -> None:
        self._db.execute(PRODUCERS.upsert, PRODUCERS.row(producer))

    def group(self, run_id: RunId, group_id: GroupId) -> GroupRecord | None:
        found = self._db.execute(GROUPS.select + "WHERE run_id = ? AND group_id = ?", (run_id, group_id))
        return GROUPS.one(found.fetchone())

    def known_groups(self, run_id: RunId, group_ids: Sequence[GroupId]) -> dict[GroupId, GroupRecord]:
        return self._find_groups(self._db, run_id, group_ids)

    def put_group(self, group: GroupRecord) -> None:
        self._db.execute(GROUPS.upsert, GROUPS.row(group))

    def leased_by(self, run_id: RunId, owner: OwnerId) -> list[GroupRecord]:
        return self._groups("owner = ? ORDER BY +sequence", run_id, owner)

    def leases_ending_by(self, run_id: RunId, until: float) -> list[GroupRecord]:
        return self._groups("lease_until <= ? ORDER BY +sequence", run_id, until)

    def waiting(self, run_id: RunId, limit: int) -> list[GroupRecord]:
        return self._groups("state = 'dispatched' AND owner IS NULL ORDER BY sequence LIMIT ?", run_id, limit)

    def oldest_running(self, run_id: RunId) -> int | None:
        sql = "SELECT sequence FROM groups WHERE run_id = ? AND state = 'dispatched' ORDER BY sequence LIMIT 1"
        row = self._db.execute(sql, (run_id,)).fetchone()
        return None if row is None else int(row[0])

    def queued(self, run_id: RunId) -> list[GroupRecord]:
        return self._groups("state = 'queued' ORDER BY +sequence", run_id)

    def queued_by_sequence(self, run_id: RunId, limit: int, *, producer: str | None = None) -> list[GroupRecord]:
        if producer is None:
            return self._groups("state = 'queued' AND producer IS NULL ORDER BY sequence LIMIT ?", run_id, limit)
        return self._groups("state = 'queued' AND producer = ? ORDER BY sequence LIMIT ?", run_id, producer, limit)

    def queued_by_arrival(self, run_id: RunId, limit: int) -> list[GroupRecord]:
        return self._groups("state = 'queued' AND producer IS NULL ORDER BY arrival LIMIT ?", run_id, limit)

    def queued_below(self, run_id: RunId, version: int) -> list[GroupRecord]:
        return self._groups(
            "state = 'queued' AND oldest_version IS NOT NULL AND oldest_version < ? ORDER BY +sequence", run_id, version
        )

    def dispatched(self, run_id: RunId) -> list[GroupRecord]:
        return self._groups("state = 'dispatched' ORDER BY sequence", run_id)

    def groups(self, run_id: RunId, state: GroupState | None, limit: int, offset: int) -> list[GroupRecord]:
        if state is None:
            return self._groups("TRUE ORDER BY sequence LIMIT ? OFFSET ?", run_id, limit, offset)
        return self._groups("state = ? ORDER BY sequence LIMIT ? OFFSET ?", run_id, state, limit, offset)

    def groups_after(self, run_id: RunId, sequence: int, limit: int) -> list[GroupRecord]:
        return self._groups("sequence > ? ORDER BY sequence LIMIT ?", run_id, sequence, limit)

    def each_group(self, run_id: RunId) -> Iterator[GroupRecord]:
        rows = self._each(GROUPS.select + "WHERE run_id = ? ORDER BY group_id", (run_id,))
        return (GROUPS.record(row) for row in rows)

    def put_payload(
        self, run_id: RunId, group_id: GroupId, body: bytes | memoryview, digest: str | None = None
    ) -> None:
        self._db.execute(
            "INSERT INTO payloads (run_id, group_id, body) VALUES (?, ?, ?) "
            "ON CONFLICT (run_id, group_id) DO UPDATE SET body = excluded.body",
            (run_id, group_id, body),
        )

    def payload(self, run_id: RunId, group_id: GroupId) -> bytes | None:
        sql = "SELECT body FROM payloads WHERE run_id = ? AND group_id = ?"
        row = self._db.execute(sql, (run_id, group_id)).fetchone()
        return None if row is None else bytes(row[0])

    def payloads(self, run_id: RunId, group_ids: Sequence[GroupId]) -> list[bytes | memoryview | None]:
        return [self.payload(run_id, group_id) for group_id in group_ids]

    def delete_payload(self, run_id: RunId, group_id: GroupId) -> None:
        self._db.execute("DELETE FROM payloads WHERE run_id = ? AND group_id = ?", (run_id, group_id))

    def lost_payloads(self, run_id: RunId) -> list[GroupId]:
        return []

    def releasable(self, run_id: RunId, up_to_step: int, *, dropped_only: bool) -> list[GroupRecord]:
        which = "AND state = 'dropped'" if dropped_only else ""
        return self._groups(
            f"has_payload = 1 AND release_step IS NOT NULL AND release_step <= ? {which} ORDER BY +sequence",
            run_id,
            up_to_step,
        )

    def put_position(self, run_id: RunId, position: int, *, is_settled: bool) -> None:
        self._db.execute(
            "INSERT INTO positions (run_id, position, is_settled) VALUES (?, ?, ?) "
            "ON CONFLICT (run_id, position) DO UPDATE SET is_settled = excluded.is_settled",
            (run_id, position, is_settled),
        )

    def position(self, run_id: RunId, position: int) -> bool | None:
        sql = "SELECT is_settled FROM positions WHERE run_id = ? AND position = ?"
        row = self._db.execute(sql, (run_id, position)).fetchone()
        return None if row is None else bool(row[0])

    def positions(self, run_id: RunId) -> list[tuple[int, bool]]:
        sql = "SELECT position, is_settled FROM positions WHERE run_id = ? ORDER BY position"
        return [(int(at), bool(is_settled)) for at, is_settled in self._db.execute(sql, (run_id,))]

    def delete_position(self, run_id: RunId, position: int) -> None:
        self._db.execute("DELETE FROM positions WHERE run_id = ? AND position = ?", (run_id, position))

    def add_move(self, move: MoveRecord) -> None:
        self._db.execute(MOVES.insert, MOVES.row(move))

    def moves(self, run_id: RunId, group_id: GroupId) -> list[MoveRecord]:
        found = self._db.execute(MOVES.select + "WHERE run_id = ? AND group_id = ? ORDER BY id", (run_id, group_id))
        return MOVES.all(found)

    def each_move(self, run_id: RunId) -> Iterator[MoveRecord]:
        rows = self._each(MOVES.select + "WHERE run_id = ? ORDER BY group_id, id", (run_id,))
        return (MOVES.record(row) for row in rows)

    def batch(self, run_id: RunId, step: int) -> BatchRecord | None:
        sql = "SELECT step, digest, is_last, epoch, decided_at FROM batches WHERE run_id = ? AND step = ?"
        row = self._db.execute(sql, (run_id, step)).fetchone()
        return None if row is None else self._batch(run_id, row)

    def put_batch(self, batch: BatchRecord) -> None:
        manifest = batch.manifest
        self._db.execute(
            "INSERT INTO batches (run_id, step, digest, is_last, epoch, decided_at) VALUES (?, ?, ?, ?, ?, ?)",
            (batch.run_id, manifest.step, manifest.digest, manifest.is_last, batch.epoch, batch.decided_at),
        )
        self._db.executemany(
            f"INSERT INTO batch_entries (run_id, step, place, {ENTRY_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                (batch.run_id, manifest.step, place, e.group_id, e.sequence, e.payload_digest, e.oldest_version)
                for place, e in enumerate(manifest.entries)
            ),
        )

    def each_batch(self, run_id: RunId) -> Iterator[BatchRecord]:
        sql = "SELECT step, digest, is_last, epoch, decided_at FROM batches WHERE run_id = ? ORDER BY step"
        return (self._batch(run_id, row) for row in self._each(sql, (run_id,)))

    def steps(self, run_id: RunId, step: int | None = None) -> list[StepRecord]:
        if step is None:
            return STEPS.all(self._db.execute(STEPS.select + "WHERE run_id = ? ORDER BY step, epoch", (run_id,)))
        found = self._db.execute(STEPS.select + "WHERE run_id = ? AND step = ? ORDER BY epoch", (run_id, step))
        return STEPS.all(found)

    def put_step(self, step: StepRecord) -> None:
        self._db.execute(STEPS.upsert, STEPS.row(step))

    def publication(self, run_id: RunId, publication_id: PublicationId) -> PublicationRecord | None:
        found = self._db.execute(PUBLICATIONS.select + "WHERE run_id = ? AND id = ?", (run_id, publication_id))
        return PUBLICATIONS.one(found.fetchone())

    def publications(self, run_id: RunId, *, effective_from: int = 0) -> list[PublicationRecord]:
        found = self._db.execute(
            PUBLICATIONS.select + "WHERE run_id = ? AND effective_step >= ? ORDER BY id", (run_id, effective_from)
        )
        return PUBLICATIONS.all(found)

    def put_publication(self, publication: PublicationRecord) -> None:
        self._db.execute(PUBLICATIONS.upsert, PUBLICATIONS.row(publication))

    def sync_to_disk(self, run_id: RunId | None = None, group_ids: Sequence[GroupId] = ()) -> None:
        self.must_sync = True

    def announce(self, run_id: RunId) -> None:
        self.announced.add(run_id)

    def _each(self, sql: str, parameters: Sequence[Any]) -> Iterable[Any]:
        """Rows of a search that may be long: never all of them in memory."""
        return self._db.execute(sql, parameters)

    def _find_groups(self, db: Connection, run_id: RunId, group_ids: Sequence[GroupId]) -> dict[GroupId, GroupRecord]:
        found: dict[GroupId, GroupRecord] = {}
        for start in range(0, len(group_ids), ASKED_TOGETHER):
            some = list(group_ids[start : start + ASKED_TOGETHER])
            # Always as many, so that the statement is prepared once; an id that is asked for twice is found once.
            some += some[:1] * (ASKED_TOGETHER - len(some))
            for group in GROUPS.all(db.execute(GROUPS.select + SOME_GROUPS, (run_id, *some)).fetchall()):
                found[group.group_id] = group
        return found

    def _groups(self, where: str, run_id: RunId, *parameters: Any) -> list[GroupRecord]:
        return GROUPS.all(self._db.execute(f"{GROUPS.select} WHERE run_id = ? AND {where}", (run_id, *parameters)))

    def _batch(self, run_id: RunId, row: Sequence[Any]) -> BatchRecord:
        step, digest, is_last, epoch, decided_at = row
        entries = self._db.execute(
            f"SELECT {ENTRY_COLUMNS} FROM batch_entries WHERE run_id = ? AND step = ? ORDER BY place", (run_id, step)
        )
        manifest = BatchManifest(
            step=step,
            entries=tuple(
                BatchEntry(group_id=GroupId(g), sequence=s, payload_digest=d, oldest_version=v)
                for g, s, d, v in entries
            ),
            digest=digest,
            is_last=bool(is_last),
        )
        return BatchRecord(run_id=run_id, manifest=manifest, epoch=epoch, decided_at=decided_at)
