"""SQL of batches, acknowledged steps and publications."""

from collections.abc import Iterator, Sequence
from typing import Any

from rollbook.contracts.admission import RunId
from rollbook.contracts.batch import BatchEntry, BatchManifest
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import PublicationId
from rollbook.ledger.records import BatchRecord, PublicationRecord, StepRecord
from rollbook.ledger.stores.sql.tables import PUBLICATIONS, STEPS
from rollbook.ledger.stores.sql.write_buffer import SqlSession

SELECT_BATCH = "SELECT step, digest, is_last, epoch, decided_at FROM batches WHERE run_id = ? "
ENTRY_COLUMNS = "group_id, sequence, payload_digest, oldest_version"


class SqlBatches:
    """Satisfies `store.Batches`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def get(self, run_id: RunId, step: int) -> BatchRecord | None:
        row = self._session.select(SELECT_BATCH + "AND step = ?", (run_id, step)).fetchone()
        return None if row is None else self._record(run_id, row)

    def put(self, batch: BatchRecord) -> None:
        manifest = batch.manifest
        self._session.write(
            "INSERT INTO batches (run_id, step, digest, is_last, epoch, decided_at) VALUES (?, ?, ?, ?, ?, ?)",
            (batch.run_id, manifest.step, manifest.digest, manifest.is_last, batch.epoch, batch.decided_at),
        )
        self._session.write_many(
            f"INSERT INTO batch_entries (run_id, step, place, {ENTRY_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                (batch.run_id, manifest.step, place, e.group_id, e.sequence, e.payload_digest, e.oldest_version)
                for place, e in enumerate(manifest.entries)
            ),
        )

    def each(self, run_id: RunId) -> Iterator[BatchRecord]:
        rows = self._session.stream(SELECT_BATCH + "ORDER BY step", (run_id,))
        return (self._record(run_id, row) for row in rows)

    def _record(self, run_id: RunId, row: Sequence[Any]) -> BatchRecord:
        step, digest, is_last, epoch, decided_at = row
        entries = self._session.select(
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


class SqlSteps:
    """Satisfies `store.Steps`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def of_step(self, run_id: RunId, step: int) -> list[StepRecord]:
        sql = STEPS.select + "WHERE run_id = ? AND step = ? ORDER BY epoch"
        return STEPS.all(self._session.select(sql, (run_id, step)))

    def page(self, run_id: RunId, *, start: int = 0, limit: int) -> list[StepRecord]:
        sql = STEPS.select + "WHERE run_id = ? AND step >= ? ORDER BY step, epoch LIMIT ?"
        return STEPS.all(self._session.select(sql, (run_id, start, limit)))

    def each(self, run_id: RunId) -> Iterator[StepRecord]:
        rows = self._session.stream(STEPS.select + "WHERE run_id = ? ORDER BY step, epoch", (run_id,))
        return (STEPS.record(row) for row in rows)

    def put(self, step: StepRecord) -> None:
        self._session.write(STEPS.upsert, STEPS.row(step))


class SqlPublications:
    """Satisfies `store.Publications`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def get(self, run_id: RunId, publication_id: PublicationId) -> PublicationRecord | None:
        sql = PUBLICATIONS.select + "WHERE run_id = ? AND id = ?"
        return PUBLICATIONS.one(self._session.select(sql, (run_id, publication_id)).fetchone())

    def effective_from(self, run_id: RunId, step: int) -> list[PublicationRecord]:
        sql = PUBLICATIONS.select + "WHERE run_id = ? AND effective_step >= ? ORDER BY id"
        return PUBLICATIONS.all(self._session.select(sql, (run_id, step)))

    def page(self, run_id: RunId, *, start: int = 0, limit: int) -> list[PublicationRecord]:
        sql = PUBLICATIONS.select + "WHERE run_id = ? AND id >= ? ORDER BY id LIMIT ?"
        return PUBLICATIONS.all(self._session.select(sql, (run_id, start, limit)))

    def each(self, run_id: RunId) -> Iterator[PublicationRecord]:
        rows = self._session.stream(PUBLICATIONS.select + "WHERE run_id = ? ORDER BY id", (run_id,))
        return (PUBLICATIONS.record(row) for row in rows)

    def put(self, publication: PublicationRecord) -> None:
        self._session.write(PUBLICATIONS.upsert, PUBLICATIONS.row(publication))
