"""Compacting segments: the valid payloads of segments with holes are copied into new ones. Needs exclusive access."""

import sqlite3
from pathlib import Path

from rollbook.ledger.stores.sqlite.segment_payloads import PLACE_COLUMNS
from rollbook.ledger.stores.sqlite.segment_recovery import SET_MARK, first_free, referenced_segments
from rollbook.ledger.stores.sqlite.segments import (
    SEGMENT_BYTES,
    Place,
    SegmentWriter,
    read_payload,
    segment_path,
    segments_in,
)

COPY_SIZE = 32
"""Payloads in memory at a time."""


def segment_bytes(directory: Path) -> int:
    return sum(segment_path(directory, segment).stat().st_size for segment in segments_in(directory))


def close_holes(db: sqlite3.Connection, directory: Path) -> None:
    """Copy, sync, and only then refer to the copies. `remove_unused` deletes the old files."""
    sparse = _sparse(db, directory)
    if not sparse:
        return
    writer = SegmentWriter(directory, first=first_free(db), is_always_synced=True)
    db.execute("BEGIN IMMEDIATE")
    try:
        for segment in sparse:
            _copy(db, directory, segment, writer)
        for mark in writer.close().items():
            db.execute(SET_MARK, mark)
        db.execute("COMMIT")
    except BaseException:
        writer.roll_back()
        writer.close()
        db.execute("ROLLBACK")
        raise


def _sparse(db: sqlite3.Connection, directory: Path) -> list[int]:
    """Segments with holes, and small ones if there are several, since each start of the service creates a new one."""
    sparse, small = [], []
    for segment in referenced_segments(db):
        (valid_bytes,) = db.execute("SELECT sum(size) FROM payload_places WHERE segment = ?", (segment,)).fetchone()
        path = segment_path(directory, segment)
        size = path.stat().st_size if path.exists() else 0
        if valid_bytes < size:
            sparse.append(segment)
        elif size < SEGMENT_BYTES // 2:
            small.append(segment)
    return sorted(sparse + small) if len(small) > 1 else sparse


def _copy(db: sqlite3.Connection, directory: Path, segment: int, writer: SegmentWriter) -> None:
    rows = db.execute(
        f"SELECT run_id, group_id, {PLACE_COLUMNS} FROM payload_places WHERE segment = ? ORDER BY place", (segment,)
    ).fetchall()
    for start in range(0, len(rows), COPY_SIZE):
        some = rows[start : start + COPY_SIZE]
        places = [writer.append(read_payload(directory, Place(*place))) for _, _, *place in some]
        db.executemany(
            "UPDATE payload_places SET segment = ?, place = ? WHERE run_id = ? AND group_id = ?",
            [(to.segment, to.place, run_id, group_id) for to, (run_id, group_id, *_) in zip(places, some, strict=True)],
        )
