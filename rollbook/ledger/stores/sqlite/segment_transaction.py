"""A transaction whose payloads lie in segments. Those that an older release wrote into the database are read from there."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.records import RunRecord
from rollbook.ledger.stores.sql.transaction import Connection, SqlTransaction
from rollbook.ledger.stores.sql.write_buffer import KeptPayloads, WriteBehind
from rollbook.ledger.stores.sqlite.segments import Place, SegmentWriter, read_payload, read_payloads

PLACE_COLUMNS = "segment, place, size, digest"
SELECT_PLACE = f"SELECT {PLACE_COLUMNS} FROM payload_places WHERE run_id = ? AND group_id = ?"
ASKED_TOGETHER = 8
SELECT_PLACES = (
    f"SELECT group_id, {PLACE_COLUMNS} FROM payload_places WHERE run_id = ? AND group_id IN "
    f"({', '.join('?' * ASKED_TOGETHER)})"
)
INSERT_PLACE = (
    f"INSERT INTO payload_places (run_id, group_id, {PLACE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (run_id, group_id) DO UPDATE SET segment = excluded.segment, place = excluded.place, size = excluded.size, "
    "digest = excluded.digest"
)


def _places(db: Connection, run_id: RunId, group_ids: Sequence[GroupId]) -> dict[GroupId, Place]:
    """Of those whose payloads lie in segments."""
    places: dict[GroupId, Place] = {}
    for start in range(0, len(group_ids), ASKED_TOGETHER):
        some = list(group_ids[start : start + ASKED_TOGETHER])
        # Always as many, so that the statement is prepared once; an id that is asked for twice is found once.
        some += some[:1] * (ASKED_TOGETHER - len(some))
        for group_id, *place in db.execute(SELECT_PLACES, (run_id, *some)).fetchall():
            places[group_id] = Place(*place)
    return places


class SegmentedTransaction(SqlTransaction):
    """For readers."""

    def __init__(self, connection: Connection, directory: Path) -> None:
        super().__init__(connection)
        self._directory = directory

    def payload(self, run_id: RunId, group_id: GroupId) -> bytes | None:
        row = self._db.execute(SELECT_PLACE, (run_id, group_id)).fetchone()
        return super().payload(run_id, group_id) if row is None else read_payload(self._directory, Place(*row))

    def payloads(self, run_id: RunId, group_ids: Sequence[GroupId]) -> list[bytes | memoryview | None]:
        places = _places(self._db, run_id, group_ids)
        found = read_payloads(self._directory, list(places.values()))
        return [
            found[places[group_id]]
            if group_id in places
            else super(SegmentedTransaction, self).payload(run_id, group_id)
            for group_id in group_ids
        ]


class SegmentedWriteBehind(WriteBehind):
    """For the writer: payloads go to their segment at once, and the rows that make them count with the others of the commit."""

    def __init__(
        self,
        db: Connection,
        known_runs: dict[RunId, RunRecord],
        *,
        directory: Path,
        segments: SegmentWriter,
        lost: Mapping[RunId, Sequence[GroupId]],
    ) -> None:
        super().__init__(db, known_runs)
        self._directory = directory
        self._segments = segments
        self._lost = lost
        self.thinned: set[int] = set()
        """Segments that a payload was deleted from."""
        self.awaited: set[int] = set()
        """Segments that must be on the disk when this is committed."""
        self.awaits_all = False

    def put_payload(
        self, run_id: RunId, group_id: GroupId, body: bytes | memoryview, digest: str | None = None
    ) -> None:
        self._operation.payloads[run_id, group_id] = self._segments.append(body, digest)

    def _write_payloads(self, payloads: KeptPayloads) -> None:
        self._segments.flush()
        self._file.executemany(
            INSERT_PLACE,
            [(run, group, at.segment, at.place, at.size, at.digest) for (run, group), at in payloads.items()],
        )

    def payload(self, run_id: RunId, group_id: GroupId) -> bytes | None:
        row = self._db.execute(SELECT_PLACE, (run_id, group_id)).fetchone()
        return super().payload(run_id, group_id) if row is None else read_payload(self._directory, Place(*row))

    def delete_payload(self, run_id: RunId, group_id: GroupId) -> None:
        row = self._db.execute(SELECT_PLACE, (run_id, group_id)).fetchone()
        if row is None:
            super().delete_payload(run_id, group_id)
        else:
            self._db.execute("DELETE FROM payload_places WHERE run_id = ? AND group_id = ?", (run_id, group_id))
            self.thinned.add(row[0])

    def sync_to_disk(self, run_id: RunId | None = None, group_ids: Sequence[GroupId] = ()) -> None:
        super().sync_to_disk(run_id, group_ids)
        if run_id is None:
            self.awaits_all = True
        else:
            self.awaited |= {place.segment for place in _places(self._db, run_id, group_ids).values()}

    def lost_payloads(self, run_id: RunId) -> list[GroupId]:
        return list(self._lost.get(run_id, ()))
