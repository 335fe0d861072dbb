"""The ledger's schema in PostgreSQL: the same numbered files as everywhere, in this database's words.

One set of files, so that no store can fall behind another. They keep to statements that both databases know; the words that differ
are listed here.
"""

import re
from typing import Protocol

from rollbook.contracts.errors import RunError
from rollbook.ledger.stores.sql.transaction import Connection
from rollbook.ledger.stores.sqlite.migrations import known_scripts

# Text is compared byte by byte, as the other stores do, whatever the locale of the database. First match wins.
WORDS = {
    "INTEGER PRIMARY KEY": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "WITHOUT ROWID": "",
    "INTEGER": "BIGINT",
    "REAL": "DOUBLE PRECISION",
    "TEXT": 'TEXT COLLATE "C"',
    "BLOB": "BYTEA",
}
_WORD = re.compile(rf"--[^\n]*|\b(?:{'|'.join(WORDS)})\b")


class SchemaConnection(Connection, Protocol):
    def run_script(self, sql: str) -> None: ...


def in_postgres_words(sql: str) -> str:
    return _WORD.sub(lambda match: WORDS.get(match[0], ""), sql)


def schema_version(db: SchemaConnection) -> int:
    found = db.execute(
        "SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'schema_version'"
    ).fetchone()
    return 0 if found is None else int(db.execute("SELECT version FROM schema_version").fetchone()[0])


def migrate(db: SchemaConnection, where: str) -> None:
    """Apply what this database has not seen, inside the caller's transaction. A database from the future is refused."""
    scripts = known_scripts()
    have = schema_version(db)
    refuse_newer(have, where)
    if have == max(scripts):
        return
    db.execute("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
    for number in sorted(n for n in scripts if n > have):
        db.run_script(in_postgres_words(scripts[number].read_text(encoding="utf-8")))
    if have == 0:
        # Tokens and logprobs hardly shrink under PostgreSQL's own compression, and trying costs more than writing them.
        db.execute("ALTER TABLE payloads ALTER COLUMN body SET STORAGE EXTERNAL")
    db.execute("DELETE FROM schema_version")
    db.execute("INSERT INTO schema_version VALUES (?)", (max(scripts),))


def prepare_commit_numbers(db: SchemaConnection) -> None:
    """Which commit of which replica came last: what only a store with a connection that can break needs to know."""
    db.execute(
        "CREATE TABLE IF NOT EXISTS replica_commits "
        "(replica TEXT PRIMARY KEY, number BIGINT NOT NULL, at TIMESTAMPTZ NOT NULL DEFAULT now())"
    )
    db.execute("DELETE FROM replica_commits WHERE at < now() - interval '7 days'")


def require_known_schema(db: SchemaConnection, where: str) -> None:
    """For readers, who may not migrate."""
    newest, have = max(known_scripts()), schema_version(db)
    refuse_newer(have, where)
    if have == 0:
        raise RunError(f"ledger in {where}: there is none in this schema; check the URL and its search_path")
    if have < newest:
        raise RunError(
            f"ledger in {where} has schema {have}, this release reads {newest}; start the service once to bring it up to date"
        )


def refuse_newer(have: int, where: str) -> None:
    newest = max(known_scripts())
    if have > newest:
        raise RunError(
            f"ledger in {where} has schema {have}, this release knows up to {newest}; use the release that wrote it"
        )
