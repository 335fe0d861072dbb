"""The file of the embedded store: how it is opened, and what a person is told when it cannot be used."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollbook.ledger.store import StoreFaultError

FILE_NAME = "ledger.sqlite"
BUSY_S = 10.0
"""How long to wait for another process that writes. The run directory is locked, so it can only be a passing one."""
ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full: make room and start again, nothing that was answered is lost",
    sqlite3.SQLITE_READONLY: "it cannot be written: check the permissions of the run directory",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: check that the run directory exists and can be written",
    sqlite3.SQLITE_IOERR: "the disk reports an error: check it, then start again",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore it from a copy of the run directory",
    sqlite3.SQLITE_NOTADB: "the file is not a ledger: restore it from a copy of the run directory",
    sqlite3.SQLITE_BUSY: "another process holds it: stop the other one and start again",
}


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what only a person can mend into a fault that says what to do; other errors are ours and pass."""
    try:
        yield
    except sqlite3.Error as error:
        fault = fault_of(error, path)
        if fault is None:
            raise
        raise fault from error


def fault_of(error: BaseException, path: Path) -> StoreFaultError | None:
    # The low byte is the kind, the rest of the code says where in SQLite it came up.
    advice = ADVICE.get((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF)
    return None if advice is None else StoreFaultError(f"ledger file {path}: {error}; {advice}")


def connect(path: Path, *, read_only: bool, query: str = "") -> sqlite3.Connection:
    with explained(path):
        if read_only:
            uri = f"{path.absolute().as_uri()}?mode=ro{query}"
            return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
