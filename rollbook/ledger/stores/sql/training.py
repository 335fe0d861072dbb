"""SQL of batches, acknowledged steps and publications."""

from collections.abc import Iterator

from rollbook.contracts.admission import RunId
from rollbook.contracts.batch import BatchEntry, BatchManifest
from rollbook.contracts.policy import PublicationId
from rollbook.ledger.records import BatchRecord, PublicationRecord, StepRecord
from rollbook.ledger.stores.sql.tables import BATCHES, ENTRIES, PUBLICATIONS, STEPS, BatchRow, EntryRow
from rollbook.ledger.stores.sql.write_buffer import SqlSession


class SqlBatches:
    """Satisfies `store.Batches`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def get(self, run_id: RunId, step: int) -> BatchRecord | None:
        sql = BATCHES.select + "WHERE run_id = ? AND step = ?"
        row = BATCHES.one(self._session.select(sql, (run_id, step)).fetchone())
        return None if row is None else self._record(row)

    def put(self, batch: BatchRecord) -> None:
        manifest = batch.manifest
        row = BatchRow(
            run_id=batch.run_id,
            step=manifest.step,
            digest=manifest.digest,
            is_last=manifest.is_last,
            cut=manifest.cut,
            epoch=batch.epoch,
            decided_at=batch.decided_at,
        )
        self._session.write(BATCHES.insert, BATCHES.row(row))
        entries = [
            EntryRow(
                run_id=batch.run_id,
                step=manifest.step,
                place=place,
                group_id=entry.group_id,
                sequence=entry.sequence,
                payload_digest=entry.payload_digest,
                oldest_version=entry.oldest_version,
                masked=entry.masked,
            )
            for place, entry in enumerate(manifest.entries)
        ]
        self._session.write_many(ENTRIES.insert, [ENTRIES.row(entry) for entry in entries])

    def each(self, run_id: RunId, *, after: int = 0) -> Iterator[BatchRecord]:
        rows = self._session.stream(BATCHES.select + "WHERE run_id = ? AND step > ? ORDER BY step", (run_id, after))
        return (self._record(BATCHES.record(row)) for row in rows)

    def _record(self, row: BatchRow) -> BatchRecord:
        sql = ENTRIES.select + "WHERE run_id = ? AND step = ? ORDER BY place"
        entries = tuple(
            BatchEntry(
                group_id=entry.group_id,
                sequence=entry.sequence,
                payload_digest=entry.payload_digest,
                oldest_version=entry.oldest_version,
                masked=entry.masked,
            )
            for entry in ENTRIES.all(self._session.select(sql, (row.run_id, row.step)))
        )
        manifest = BatchManifest(step=row.step, entries=entries, digest=row.digest, is_last=row.is_last, cut=row.cut)
        return BatchRecord(run_id=row.run_id, manifest=manifest, epoch=row.epoch, decided_at=row.decided_at)


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

    def each(self, run_id: RunId, *, after: int = 0) -> Iterator[StepRecord]:
        rows = self._session.stream(
            STEPS.select + "WHERE run_id = ? AND step > ? ORDER BY step, epoch", (run_id, after)
        )
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

    def each(self, run_id: RunId, *, start: int = 0) -> Iterator[PublicationRecord]:
        rows = self._session.stream(PUBLICATIONS.select + "WHERE run_id = ? AND id >= ? ORDER BY id", (run_id, start))
        return (PUBLICATIONS.record(row) for row in rows)

    def put(self, publication: PublicationRecord) -> None:
        self._session.write(PUBLICATIONS.upsert, PUBLICATIONS.row(publication))
