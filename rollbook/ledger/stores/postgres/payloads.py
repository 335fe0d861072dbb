"""Payloads of the PostgreSQL store: in the database, or as objects in a directory or bucket with their digests in the rows.

Payloads of both kinds can be read at any time: where a payload is stored was decided when it was written.
"""

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.contracts.group_codec import payload_digest
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.stores.objects import Objects, objects_at
from rollbook.ledger.stores.sql.groups import INSERT_PAYLOAD
from rollbook.ledger.stores.sql.tables import Insert
from rollbook.ledger.stores.sql.write_buffer import PayloadRows, SqlSession

TRANSFERS = 16
"""Objects that are written or read at the same time."""
SELECT = (
    "SELECT body, NULL, NULL, NULL FROM payloads WHERE run_id = ? AND group_id = ? "
    "UNION ALL SELECT NULL, location, name, digest FROM payload_objects WHERE run_id = ? AND group_id = ?"
)
INSERT_OBJECT = Insert("payload_objects (run_id, group_id, location, name, size, digest)", 6)
DELETE_OBJECT = (
    "WITH gone AS (DELETE FROM payload_objects WHERE run_id = ? AND group_id = ? RETURNING location, name) "
    "INSERT INTO deleted_objects (location, name) SELECT location, name FROM gone"
)
_transfers = ThreadPoolExecutor(max_workers=TRANSFERS, thread_name_prefix="ledger-objects")


class PostgresPayloads:
    """Satisfies `store.Payloads`. `objects`: where new payloads are stored; None: in the database."""

    def __init__(self, session: SqlSession, objects: Objects | None) -> None:
        self._session = session
        self._objects = objects
        session.payload_statement = self._statement

    def put(self, run_id: RunId, group_id: GroupId, body: bytes | memoryview, digest: str | None = None) -> None:
        self._session.pending.payloads[run_id, group_id] = (body, digest)

    def get(self, run_id: RunId, group_id: GroupId) -> bytes | None:
        return _read(self._row(run_id, group_id))

    def get_many(self, run_id: RunId, group_ids: Sequence[GroupId]) -> list[bytes | memoryview | None]:
        """Objects are read concurrently."""
        return list(_transfers.map(_read, [self._row(run_id, group_id) for group_id in group_ids]))

    def delete(self, run_id: RunId, group_id: GroupId) -> None:
        """The object is deleted after the commit, by `ObjectSweeper`."""
        self._session.flush()
        self._session.write("DELETE FROM payloads WHERE run_id = ? AND group_id = ?", (run_id, group_id))
        self._session.write(DELETE_OBJECT, (run_id, group_id))

    def lost(self, run_id: RunId) -> list[GroupId]:
        return []

    def _row(self, run_id: RunId, group_id: GroupId) -> Sequence[Any] | None:
        row: Sequence[Any] | None = self._session.select_flushed(SELECT, (run_id, group_id) * 2).fetchone()
        return row

    def _statement(self, payloads: PayloadRows) -> tuple[Insert, list[Sequence[Any]]]:
        """Stores the objects of a commit concurrently, before their rows are written."""
        objects = self._objects
        if objects is None:
            return INSERT_PAYLOAD, [(run, group, body) for (run, group), (body, _) in payloads.items()]
        rows: list[Sequence[Any]] = []
        for (run, group), (body, known) in payloads.items():
            digest = known or payload_digest(body)
            name = f"{quote(run, safe='')}/{digest[:2]}/{digest}-{uuid.uuid4().hex[:12]}"
            rows.append((run, group, objects.location, name, len(body), digest))
        stored = _transfers.map(objects.put, [row[3] for row in rows], [body for body, _ in payloads.values()])
        for _ in stored:
            pass  # raises the error of a transfer
        return INSERT_OBJECT, rows


def _read(row: Sequence[Any] | None) -> bytes | None:
    if row is None:
        return None
    body, location, name, digest = row
    if body is not None:
        return bytes(body)
    found = objects_at(location).get(name)
    if found is None:
        raise StoreFaultError(f"payload {location}/{name} is missing; restore it from a backup")
    if payload_digest(found) != digest:
        raise StoreFaultError(f"payload {location}/{name} does not match its digest {digest}; restore it from a backup")
    return found
