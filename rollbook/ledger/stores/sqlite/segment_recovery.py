"""After a start: which payloads a power cut took, and which files nobody points to.

Everything before a segment's mark is on the disk for certain. What lies behind it was answered in `process_crash` mode, where a
power cut may keep a row and lose its bytes: each such payload is compared with its digest, so that a lost one is known before
anybody asks for it. Marks are set often enough that this is a matter of one segment, not of the run.
"""

import sqlite3
from collections import defaultdict
from pathlib import Path

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.stores.sqlite.segment_payloads import PLACE_COLUMNS
from rollbook.ledger.stores.sqlite.segments import (
    EVERYTHING,
    Place,
    is_whole,
    is_written,
    remove_segment,
    segments_in,
    sync_segment,
)

SET_MARK = (
    "INSERT INTO segments (segment, synced_bytes) VALUES (?, ?) "
    "ON CONFLICT (segment) DO UPDATE SET synced_bytes = excluded.synced_bytes"
)


def find_lost(db: sqlite3.Connection, directory: Path) -> dict[RunId, list[GroupId]]:
    """Compare what no mark vouches for. Segments that turn out whole are synced and marked, so that nobody looks again."""
    lost: dict[RunId, list[GroupId]] = defaultdict(list)
    for segment in pointed_to(db):
        row = db.execute("SELECT synced_bytes FROM segments WHERE segment = ?", (segment,)).fetchone()
        mark = 0 if row is None else int(row[0])
        if mark >= EVERYTHING or is_written(directory, segment):
            continue
        unsure = db.execute(
            f"SELECT run_id, group_id, {PLACE_COLUMNS} FROM payload_places WHERE segment = ? AND place >= ?",
            (segment, mark),
        ).fetchall()
        gone = [(run_id, group_id) for run_id, group_id, *place in unsure if not is_whole(directory, Place(*place))]
        for run_id, group_id in gone:
            lost[RunId(run_id)].append(GroupId(group_id))
        if not gone:
            sync_segment(directory, segment)
            db.execute(SET_MARK, (segment, EVERYTHING))
    return dict(lost)


def pointed_to(db: sqlite3.Connection) -> list[int]:
    """Segments with a payload that counts. One step along the index for each, however many payloads there are."""
    found: list[int] = []
    while True:
        after = found[-1] if found else -1
        (segment,) = db.execute("SELECT min(segment) FROM payload_places WHERE segment > ?", (after,)).fetchone()
        if segment is None:
            return found
        found.append(segment)


def first_free(db: sqlite3.Connection) -> int:
    """No number is used twice: marks of a segment that is gone must never vouch for another one."""
    (places,) = db.execute("SELECT max(segment) FROM payload_places").fetchone()
    (marks,) = db.execute("SELECT max(segment) FROM segments").fetchone()
    return max(-1 if places is None else places, -1 if marks is None else marks) + 1


def remove_unused(db: sqlite3.Connection, directory: Path) -> int:
    """Files that no row points to: of commits that never were, or emptied before the last stop. The log must be on the disk.

    Nobody can commit meanwhile: another writer's file is pointed to already, or it is still locked.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        used = set(pointed_to(db))
        unused = [segment for segment in segments_in(directory) if segment not in used]
        removed = [segment for segment in unused if not is_written(directory, segment)]
        for segment in removed:
            remove_segment(directory, segment)
        # The last mark stays: it is what keeps numbers from being used again.
        marked = [segment for (segment,) in db.execute("SELECT segment FROM segments ORDER BY segment")]
        stale = [(segment,) for segment in marked[:-1] if segment not in used]
        if stale:
            db.executemany("DELETE FROM segments WHERE segment = ?", stale)
    finally:
        db.execute("COMMIT")
    return len(removed)
