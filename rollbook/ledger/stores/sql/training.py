"""SQL of batches, acknowledged steps and publications."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from rollbook.contracts.admission import RunId
from rollbook.contracts.batch import BatchEntry, BatchManifest
from rollbook.contracts.policy import PublicationId
from rollbook.ledger.records import BatchRecord, PublicationRecord, StepRecord
from rollbook.ledger.stores.sql.tables import BATCHES, ENTRIES, PUBLICATIONS, STEPS, BatchRow, EntryRow
from rollbook.ledger.stores.sql.write_buffer import SqlSession

BATCHES_PER_READ = 64
"""Their entries are read together."""
MAX_KNOWN_BATCHES = 8
"""A batch may have thousands of entries. A trainer needs the last ones."""
STEP = ENTRIES.columns.index("step")


class SqlBatches:
    """Satisfies `store.Batches`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def get(self, run_id: RunId, step: int) -> BatchRecord | None:
        known = self._session.known.of(BATCHES)
        if (run_id, step) not in known:
            row = BATCHES.one(self._session.select(BATCHES.select + BATCHES.with_key, (run_id, step)).fetchone())
            self._remember(run_id, step, None if row is None else next(self._records([row])))
        batch: BatchRecord | None = known[run_id, step]
        return batch

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
        self._session.insert(BATCHES.insert, [BATCHES.row(row)])
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
        self._session.insert(ENTRIES.insert, [ENTRIES.row(entry) for entry in entries])
        self._remember(batch.run_id, manifest.step, batch)

    def _remember(self, run_id: RunId, step: int, batch: BatchRecord | None) -> None:
        self._session.known.add(BATCHES, {(run_id, step): batch}, limit=MAX_KNOWN_BATCHES)

    def each(self, run_id: RunId, *, after: int = 0) -> Iterator[BatchRecord]:
        rows = self._session.stream(BATCHES.select + "WHERE run_id = ? AND step > ? ORDER BY step", (run_id, after))
        batches = (BATCHES.record(row) for row in rows)
        while some := list(islice(batches, BATCHES_PER_READ)):
            yield from self._records(some)

    def _records(self, rows: Sequence[BatchRow]) -> Iterator[BatchRecord]:
        """Batches in the order of their steps, with their entries."""
        sql = ENTRIES.select + "WHERE run_id = ? AND step BETWEEN ? AND ? ORDER BY step, place"
        found: defaultdict[int, list[Any]] = defaultdict(list)
        for entry in self._session.select(sql, (rows[0].run_id, rows[0].step, rows[-1].step)):
            found[entry[STEP]].append(entry)
        for row in rows:
            entries = tuple(
                BatchEntry(
                    group_id=entry.group_id,
                    sequence=entry.sequence,
                    payload_digest=entry.payload_digest,
                    oldest_version=entry.oldest_version,
                    masked=entry.masked,
                )
                for entry in ENTRIES.all(found[row.step])
            )
            manifest = BatchManifest(
                step=row.step, entries=entries, digest=row.digest, is_last=row.is_last, cut=row.cut
            )
            yield BatchRecord(run_id=row.run_id, manifest=manifest, epoch=row.epoch, decided_at=row.decided_at)


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
        self._session.insert(STEPS.upsert, [STEPS.row(step)])


class SqlPublications:
    """Satisfies `store.Publications`."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def get(self, run_id: RunId, publication_id: PublicationId) -> PublicationRecord | None:
        return self._session.get(PUBLICATIONS, (run_id, publication_id))

    def effective_from(self, run_id: RunId, step: int) -> list[PublicationRecord]:
        sql = PUBLICATIONS.select + "WHERE run_id = ? AND effective_step >= ? ORDER BY id"
        return PUBLICATIONS.all(self._session.select_flushed(sql, (run_id, step), PUBLICATIONS))

    def page(self, run_id: RunId, *, start: int = 0, limit: int) -> list[PublicationRecord]:
        sql = PUBLICATIONS.select + "WHERE run_id = ? AND id >= ? ORDER BY id LIMIT ?"
        return PUBLICATIONS.all(self._session.select_flushed(sql, (run_id, start, limit), PUBLICATIONS))

    def each(self, run_id: RunId, *, start: int = 0) -> Iterator[PublicationRecord]:
        rows = self._session.stream(PUBLICATIONS.select + "WHERE run_id = ? AND id >= ? ORDER BY id", (run_id, start))
        return (PUBLICATIONS.record(row) for row in rows)

    def put(self, publication: PublicationRecord) -> None:
        self._session.put(PUBLICATIONS, publication)
