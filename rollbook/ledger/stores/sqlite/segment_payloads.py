"""Payloads of the SQLite store: the bodies are in segment files, the rows that refer to them in the database."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.stores.sql.groups import padded
from rollbook.ledger.stores.sql.tables import Insert
from rollbook.ledger.stores.sql.write_buffer import PayloadRows, SqlSession
from rollbook.ledger.stores.sqlite.segments import SegmentPlace, SegmentWriter, read_payload, read_payloads

PLACE_COLUMNS = "segment, place, size, digest"
SELECT_PLACE = f"SELECT {PLACE_COLUMNS} FROM payload_places WHERE run_id = ? AND group_id = ?"
IDS_PER_QUERY = 8
SELECT_PLACES = (
    f"SELECT group_id, {PLACE_COLUMNS} FROM payload_places WHERE run_id = ? AND group_id IN "
    f"({', '.join('?' * IDS_PER_QUERY)})"
)
INSERT_PLACE = Insert(
    f"payload_places (run_id, group_id, {PLACE_COLUMNS})",
    6,
    " ON CONFLICT (run_id, group_id) DO UPDATE SET segment = excluded.segment, place = excluded.place, size = excluded.size, "
    "digest = excluded.digest",
)


class SegmentPayloads:
    """Satisfies `store.Payloads`. A reader has no segment writer."""

    def __init__(
        self,
        session: SqlSession,
        directory: Path,
        writer: SegmentWriter | None = None,
        lost: Mapping[RunId, Sequence[GroupId]] | None = None,
    ) -> None:
        self._session = session
        self._directory = directory
        self._writer = writer
        self._lost = lost or {}
        self.shrunk: set[int] = set()
        """Segments from which a payload was deleted."""
        session.payload_statement = self._statement

    def put(self, run_id: RunId, group_id: GroupId, body: bytes | memoryview, digest: str | None = None) -> None:
        """The body is appended to its segment at once; its row is written with the other rows of the commit."""
        assert self._writer is not None
        self._session.pending.payloads[run_id, group_id] = self._writer.append(body, digest)

    def get(self, run_id: RunId, group_id: GroupId) -> bytes | None:
        row = self._session.select_flushed(SELECT_PLACE, (run_id, group_id)).fetchone()
        return None if row is None else read_payload(self._directory, SegmentPlace(*row))

    def get_many(self, run_id: RunId, group_ids: Sequence[GroupId]) -> list[bytes | memoryview | None]:
        places = self._places(run_id, group_ids)
        found = read_payloads(self._directory, list(places.values()))
        return [found[places[group_id]] if group_id in places else None for group_id in group_ids]

    def delete(self, run_id: RunId, group_id: GroupId) -> None:
        row = self._session.select_flushed(SELECT_PLACE, (run_id, group_id)).fetchone()
        if row is not None:
            self._session.write("DELETE FROM payload_places WHERE run_id = ? AND group_id = ?", (run_id, group_id))
            self.shrunk.add(row[0])

    def lost(self, run_id: RunId) -> list[GroupId]:
        return list(self._lost.get(run_id, ()))

    def segments_of(self, groups: Iterable[tuple[RunId, Sequence[GroupId]]]) -> set[int]:
        return {place.segment for run_id, group_ids in groups for place in self._places(run_id, group_ids).values()}

    def places(self, run_id: RunId, group_ids: Sequence[GroupId]) -> dict[GroupId, tuple[int, int]]:
        """Segment and offset of these payloads."""
        return {group_id: (at.segment, at.place) for group_id, at in self._places(run_id, group_ids).items()}

    def _places(self, run_id: RunId, group_ids: Sequence[GroupId]) -> dict[GroupId, SegmentPlace]:
        places: dict[GroupId, SegmentPlace] = {}
        for ids in padded(group_ids, IDS_PER_QUERY):
            for group_id, *place in self._session.select_flushed(SELECT_PLACES, (run_id, *ids)).fetchall():
                places[group_id] = SegmentPlace(*place)
        return places

    def _statement(self, payloads: PayloadRows) -> tuple[Insert, list[Sequence[Any]]]:
        if self._writer is not None:
            self._writer.flush()
        rows: list[Sequence[Any]] = [
            (run, group, at.segment, at.place, at.size, at.digest) for (run, group), at in payloads.items()
        ]
        return INSERT_PLACE, rows
