"""Replaces the database of a SQLite store by a new one with the same payload files. The old files are kept."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.stores.sql.transaction import SqlTransaction
from rollbook.ledger.stores.sql.write_buffer import SqlSession
from rollbook.ledger.stores.sqlite.file import FILE_NAME, connect, create_tables, explained
from rollbook.ledger.stores.sqlite.segment_payloads import SegmentPayloads
from rollbook.ledger.stores.sqlite.segments import SegmentPlace, digest_of, is_intact, sync_directory

T = TypeVar("T")
KEPT = "damaged"
"""Folder of the replaced files, with a number."""


class NewDatabase:
    """A database that is being written. `tx` writes all rows except those of payloads."""

    def __init__(self, tx: SqlTransaction, directory: Path) -> None:
        self.tx = tx
        self._directory = directory

    def refer_to_payload(
        self, run_id: RunId, group_id: GroupId, place: tuple[int, int], size: int, digest: str
    ) -> None:
        """The payload is already in a segment file."""
        self.tx.session.pending.payloads[run_id, group_id] = SegmentPlace(*place, size, digest_of(b"", digest))

    def has_payload(self, place: tuple[int, int], size: int, digest: str) -> bool:
        return is_intact(self._directory, SegmentPlace(*place, size, digest_of(b"", digest)))


def replace_database(directory: Path, write: Callable[[NewDatabase], T]) -> tuple[T, Path]:
    """Write a new database, then move it to the place of the old one. Returns also the folder of the old files.

    Nothing is replaced if `write` raises. Needs exclusive access.
    """
    path, unfinished = directory / FILE_NAME, directory / f"{FILE_NAME}.new"
    for name in (unfinished.name, f"{unfinished.name}-journal"):
        (directory / name).unlink(missing_ok=True)
    with explained(unfinished), closing(connect(unfinished, read_only=False)) as db:
        create_tables(db, unfinished)
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        session = SqlSession(db)
        payloads = SegmentPayloads(session, directory)
        tx = SqlTransaction(session, f"ledger file {unfinished}", payloads=payloads)
        found = write(NewDatabase(tx, directory))
        session.flush()
        db.execute("COMMIT")
    number = 1 + sum(1 for _ in directory.glob(f"{KEPT}-*"))
    kept = directory / f"{KEPT}-{number}"
    kept.mkdir()
    for suffix in ("", "-wal", "-shm"):
        old = path.with_name(f"{path.name}{suffix}")
        if old.exists():
            old.rename(kept / old.name)
    unfinished.rename(path)
    sync_directory(directory)
    return found, kept
