"""Numbered schema files, applied in order, never edited. The database knows the last one it has seen."""

from pathlib import Path
from typing import Protocol

from rollbook.contracts.errors import RunError
from rollbook.ledger.stores.sql.transaction import Cursor

SCHEMA = Path(__file__).parent / "schema"


class MigratableConnection(Protocol):
    def execute(self, sql: str, /) -> Cursor: ...
    def executescript(self, sql: str, /) -> Cursor: ...


def known_scripts() -> dict[int, Path]:
    return {int(script.name[:4]): script for script in sorted(SCHEMA.glob("[0-9][0-9][0-9][0-9]_*.sql"))}


def schema_version(db: MigratableConnection) -> int:
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'schema_version'").fetchone() is None:
        return 0
    return int(db.execute("SELECT version FROM schema_version").fetchone()[0])


def migrate(db: MigratableConnection, path: Path) -> None:
    """Apply what this database has not seen, each file in a transaction. A database from the future is refused."""
    scripts = known_scripts()
    have = schema_version(db)
    _refuse_newer(have, max(scripts), path)
    for number in sorted(n for n in scripts if n > have):
        sql = scripts[number].read_text(encoding="utf-8")
        db.executescript(
            "BEGIN IMMEDIATE; CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL);\n"
            f"{sql}\nDELETE FROM schema_version; INSERT INTO schema_version VALUES ({number}); COMMIT;"
        )


def require_known_schema(db: MigratableConnection, path: Path) -> None:
    """For readers, who may not migrate."""
    newest, have = max(known_scripts()), schema_version(db)
    _refuse_newer(have, newest, path)
    if have < newest:
        raise RunError(
            f"ledger file {path} has schema {have}, this release reads {newest}; resume the run once to bring it up to date"
        )


def _refuse_newer(have: int, newest: int, path: Path) -> None:
    if have > newest:
        raise RunError(
            f"ledger file {path} has schema {have}, this release knows up to {newest}; use the release that wrote it"
        )
