"""The tables of a ledger database: created once, then only checked. A database of another schema version is refused.

`schema_versions` has one row for the ledger's own tables and one for each extension.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rollbook.contracts.errors import RunError
from rollbook.ledger.store import Rows
from rollbook.ledger.stores.sql.write_buffer import SqlSession

LEDGER = "ledger"
VERSION = 7
SCHEMA = (Path(__file__).parent / "schema.sql").read_text(encoding="utf-8")
CREATE_VERSIONS = "CREATE TABLE IF NOT EXISTS schema_versions (name TEXT PRIMARY KEY, version INTEGER NOT NULL)"

Translate = Callable[[str], str]
"""Turns DDL with SQLite's type names into that of the database."""


def statements_of(script: str) -> list[str]:
    """The statements of a script. A semicolon at the end of a line ends a statement."""
    return [statement for statement in script.split(";\n") if statement.strip()]


def create_schema(session: SqlSession, where: str, *, translate: Translate, more: Iterable[str] = ()) -> None:
    """Create the ledger's tables, and those of the statements in `more`, unless they exist; refuse another version."""
    session.write(translate(CREATE_VERSIONS))
    _create(session, LEDGER, VERSION, [*statements_of(SCHEMA), *more], where=where, translate=translate)


def require_schema(session: SqlSession, where: str) -> None:
    """For read-only sessions. The table of versions must exist."""
    found = _version(session, LEDGER)
    if found != VERSION:
        raise _mismatch(LEDGER, found, VERSION, where)


class SqlSideTables:
    """Satisfies `store.SideTables`."""

    def __init__(self, session: SqlSession, where: str, translate: Translate) -> None:
        self._session = session
        self._where = where
        self._translate = translate

    def exists(self, name: str) -> bool:
        return _version(self._session, name) is not None

    def create(self, name: str, version: int, statements: Sequence[str]) -> None:
        _create(self._session, name, version, statements, where=self._where, translate=self._translate)

    def select(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        return self._session.select(sql, parameters)

    def write(self, sql: str, parameters: Sequence[Any]) -> None:
        self._session.write(sql, parameters)

    def write_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        return self._session.write_many(sql, rows)


def _create(
    session: SqlSession, name: str, version: int, statements: Iterable[str], *, where: str, translate: Translate
) -> None:
    found = _version(session, name)
    if found is not None and found != version:
        raise _mismatch(name, found, version, where)
    if found is None:
        for statement in statements:
            session.write(translate(statement))
        session.write("INSERT INTO schema_versions (name, version) VALUES (?, ?)", (name, version))


def _version(session: SqlSession, name: str) -> int | None:
    row = session.select("SELECT version FROM schema_versions WHERE name = ?", (name,)).fetchone()
    return None if row is None else int(row[0])


def _mismatch(name: str, found: int | None, expected: int, where: str) -> RunError:
    return RunError(
        f"{where}: its {name} tables have schema {found}, this release needs {expected}; use the release that wrote them"
    )
