"""Upkeep of segments: find payloads that were lost in a power failure, remove unreferenced segment files, and close holes.

All bytes before a segment's mark are on the disk. Payloads behind it were acknowledged in `process_crash` mode, where a power
failure may keep a row and lose its bytes. Each of them is compared with its digest, so that a lost one is known before it is read.
Marks are recorded often enough that this concerns one segment, not the whole run.
"""

import sqlite3
from collections import defaultdict
from pathlib import Path

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.stores.sqlite.segment_payloads import PLACE_COLUMNS
from rollbook.ledger.stores.sqlite.segments import (
    EVERYTHING,
    SEGMENT_BYTES,
    SegmentPlace,
    SegmentWriter,
    is_intact,
    is_writable,
    read_payload,
    remove_segment,
    segment_path,
    segments_in,
    sync_segment,
)

SET_MARK = (
    "INSERT INTO segments (segment, synced_bytes) VALUES (?, ?) "
    "ON CONFLICT (segment) DO UPDATE SET synced_bytes = excluded.synced_bytes"
)
COPY_SIZE = 32
"""Payloads in memory at a time."""


def find_lost(db: sqlite3.Connection, directory: Path) -> dict[RunId, list[GroupId]]:
    """Verify the payloads behind the marks. Segments without a loss are synced and marked, so that the next start skips them."""
    lost: dict[RunId, list[GroupId]] = defaultdict(list)
    for segment in referenced_segments(db):
        row = db.execute("SELECT synced_bytes FROM segments WHERE segment = ?", (segment,)).fetchone()
        mark = 0 if row is None else int(row[0])
        if mark >= EVERYTHING or is_writable(directory, segment):
            continue
        unverified = db.execute(
            f"SELECT run_id, group_id, {PLACE_COLUMNS} FROM payload_places WHERE segment = ? AND place >= ?",
            (segment, mark),
        ).fetchall()
        damaged = [
            (run_id, group_id)
            for run_id, group_id, *place in unverified
            if not is_intact(directory, SegmentPlace(*place))
        ]
        for run_id, group_id in damaged:
            lost[RunId(run_id)].append(GroupId(group_id))
        if not damaged:
            sync_segment(directory, segment)
            db.execute(SET_MARK, (segment, EVERYTHING))
    return dict(lost)


def referenced_segments(db: sqlite3.Connection) -> list[int]:
    """Segments that rows refer to. One index lookup per segment, whatever the number of payloads."""
    found: list[int] = []
    while True:
        after = found[-1] if found else -1
        (segment,) = db.execute("SELECT min(segment) FROM payload_places WHERE segment > ?", (after,)).fetchone()
        if segment is None:
            return found
        found.append(segment)


def first_free(db: sqlite3.Connection) -> int:
    """Numbers are never reused: the mark of a deleted segment must not apply to a new one."""
    (places,) = db.execute("SELECT max(segment) FROM payload_places").fetchone()
    (marks,) = db.execute("SELECT max(segment) FROM segments").fetchone()
    return max(-1 if places is None else places, -1 if marks is None else marks) + 1


def remove_unused(db: sqlite3.Connection, directory: Path) -> int:
    """Remove files that no row refers to: of rolled back commits, or emptied before the last stop. The log must be synced before.

    The write lock blocks concurrent commits; the file of another writer is referenced already or still locked.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        used = set(referenced_segments(db))
        unused = [segment for segment in segments_in(directory) if segment not in used]
        removed = [segment for segment in unused if not is_writable(directory, segment)]
        for segment in removed:
            remove_segment(directory, segment)
        # The last mark stays: it keeps its number from being reused.
        marked = [segment for (segment,) in db.execute("SELECT segment FROM segments ORDER BY segment")]
        stale = [(segment,) for segment in marked[:-1] if segment not in used]
        if stale:
            db.executemany("DELETE FROM segments WHERE segment = ?", stale)
    finally:
        db.execute("COMMIT")
    return len(removed)


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
        places = [writer.append(read_payload(directory, SegmentPlace(*place))) for _, _, *place in some]
        db.executemany(
            "UPDATE payload_places SET segment = ?, place = ? WHERE run_id = ? AND group_id = ?",
            [(to.segment, to.place, run_id, group_id) for to, (run_id, group_id, *_) in zip(places, some, strict=True)],
        )
