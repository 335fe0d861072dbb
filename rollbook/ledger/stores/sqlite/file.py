"""The SQLite file: connecting to it, checking it, and explaining its errors."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rollbook.ledger.journal import JOURNAL, read_marks
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.stores.sql.schema import create_schema, require_schema, statements_of
from rollbook.ledger.stores.sql.write_buffer import SqlSession
from rollbook.ledger.stores.sqlite.log_check import log_damage

FILE_NAME = "ledger.sqlite"
MEMORY = Path(":memory:")
"""The path of a database that exists only in memory."""
BUSY_S = 10.0
"""How long to wait for another writing process. The run directory is locked, so another writer is short-lived."""
SEGMENTS = (Path(__file__).parent / "segments.sql").read_text(encoding="utf-8")
GROWING = frozenset({"groups", "batches", "batch_entries", "steps", "publications", "payload_places"})
"""Tables that the rules read and that grow with the length of the run."""
NOT_CHECKED = frozenset({"payloads", "history"})
"""Payloads are compared with their digests on every read; the audit checks the history."""
WAY_BACK = "restore it from a copy of the run directory, or run `rollbook ledger rebuild`"
ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full: free some space and start again; no acknowledged data is lost",
    sqlite3.SQLITE_READONLY: "it cannot be written: check the permissions of the run directory",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: check that the run directory exists and can be written",
    sqlite3.SQLITE_IOERR: "the disk reports an error: check it, then start again",
    sqlite3.SQLITE_CORRUPT: f"the file is damaged: {WAY_BACK}",
    sqlite3.SQLITE_NOTADB: f"the file is not a ledger: {WAY_BACK}",
    # The statements are fixed, so tables or columns that they name and that do not exist are damage too.
    sqlite3.SQLITE_ERROR: f"its tables are damaged: {WAY_BACK}",
    sqlite3.SQLITE_MISMATCH: f"its tables are damaged: {WAY_BACK}",
    sqlite3.SQLITE_BUSY: "another process holds it: stop the other one and start again",
}


def rebuild_command(path: Path) -> str:
    return f"rollbook ledger rebuild --store sqlite:///{path.parent}"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors that an operator must fix into `StoreFaultError` with advice; other errors pass."""
    try:
        yield
    except sqlite3.Error as error:
        fault = fault_of(error, path)
        if fault is None:
            raise
        raise fault from error


def fault_of(error: BaseException, path: Path) -> StoreFaultError | None:
    # The low byte is the primary code; the rest is an extended code. Text that is not UTF-8 has none.
    code = getattr(error, "sqlite_errorcode", None) or 0
    if not code and isinstance(error, sqlite3.OperationalError) and "decode to UTF-8" in str(error):
        code = sqlite3.SQLITE_CORRUPT
    advice = ADVICE.get(code & 0xFF)
    return None if advice is None else StoreFaultError(f"ledger file {path}: {error}; {advice}")


def connect(path: Path, *, read_only: bool, query: str = "") -> sqlite3.Connection:
    with explained(path):
        if read_only:
            uri = f"{path.absolute().as_uri()}?mode=ro{query}"
            return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)


def refuse_lost_commits(path: Path) -> None:
    """Writing to a database that lost commits would delete what is left of them, and the payload files that it does not know.

    Called before a connection may write: closing such a connection deletes the log. Commits behind the last sync may be missing
    after a power failure; the journal has only synced ones.
    """
    if not path.exists():
        if read_marks(path.parent).runs:
            raise StoreFaultError(
                f"ledger file {path} is missing, its journal is not. Rebuild it: {rebuild_command(path)}"
            )
        return
    with closing(connect(path, read_only=True)) as db:
        for sentence in behind_journal(db, path):
            raise StoreFaultError(f"ledger file {path}: {sentence}")


def behind_journal(db: sqlite3.Connection, path: Path) -> Iterator[str]:
    """For each run of the journal that has later moves than the database."""
    for run_id, mark in read_marks(path.parent).runs.items():
        try:
            sql = "SELECT id FROM history WHERE id >= ? AND run_id || '' = ? LIMIT 1"
            is_there = db.execute(sql, (mark.number, run_id)).fetchone() is not None
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF not in (
                sqlite3.SQLITE_ERROR,
                sqlite3.SQLITE_CORRUPT,
                sqlite3.SQLITE_NOTADB,
            ):
                raise
            is_there = False  # it has no tables
        if mark.number and not is_there:
            yield (
                f"the ledger is behind its journal: {JOURNAL} has moves of run {run_id} up to {mark.number}, step "
                f"{mark.acknowledged}, which the database has lost. Rebuild it: {rebuild_command(path)}"
            )


def create_tables(db: sqlite3.Connection, path: Path) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        create_schema(SqlSession(db), f"ledger file {path}", translate=str, more=statements_of(SEGMENTS))
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def require_tables(db: sqlite3.Connection, path: Path) -> None:
    try:
        found = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'schema_versions'").fetchone()
    except UnicodeDecodeError as error:
        raise StoreFaultError(f"ledger file {path}: its schema is damaged; {ADVICE[sqlite3.SQLITE_CORRUPT]}") from error
    if found is None:
        raise StoreFaultError(f"ledger file {path}: it has no ledger tables; check the path")
    require_schema(SqlSession(db), f"ledger file {path}")


def check_integrity(db: sqlite3.Connection, path: Path, *, growing: bool) -> None:
    """Raise `StoreFaultError` if a table that the rules read is damaged: a growing table, or any other one.

    Small tables are checked before the store serves, growing ones meanwhile, so that the start-up time does not grow with the run.
    """
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    for table in tables:
        if table in NOT_CHECKED or (table in GROWING) is not growing:
            continue
        found = [row[0] for row in db.execute(f"PRAGMA quick_check('{table}')")]
        if found != ["ok"]:
            raise StoreFaultError(
                f"ledger file {path}: table {table} is damaged ({found[0]}); {ADVICE[sqlite3.SQLITE_CORRUPT]}"
            )


def find_damage(db: sqlite3.Connection, path: Path, *, is_complete: bool, is_in_service: bool) -> Iterator[str]:
    """Lost commits, and with `is_complete` what SQLite finds in all pages, tables and indexes."""
    # A service may be writing the log at this moment.
    if not is_in_service:
        damage = log_damage(path)
        if damage is not None:
            yield f"the ledger has lost commits: {damage}. Rebuild it: {rebuild_command(path)}"
        yield from behind_journal(db, path)
    if not is_complete:
        return
    for (finding,) in db.execute("PRAGMA integrity_check"):
        if finding != "ok":
            yield f"the ledger file is damaged: {finding}"
