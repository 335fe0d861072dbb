"""The ledger's schema in PostgreSQL: the shared DDL with PostgreSQL's type names, and the table of commit numbers."""

import re

from rollbook.contracts.errors import RunError
from rollbook.ledger.stores.sql.schema import SqlSideTables, create_schema, require_schema
from rollbook.ledger.stores.sql.write_buffer import SqlSession

# Text is compared bytewise, as in SQLite, whatever the locale of the database. The first match wins.
TYPES = {
    "INTEGER PRIMARY KEY": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "WITHOUT ROWID": "",
    "INTEGER": "BIGINT",
    "REAL": "DOUBLE PRECISION",
    "TEXT": 'TEXT COLLATE "C"',
    "BLOB": "BYTEA",
}
_TYPE = re.compile(rf"--[^\n]*|\b(?:{'|'.join(TYPES)})\b")
POSTGRES_ONLY = (
    # Tokens and logprobs hardly compress, and trying costs more than writing them.
    "ALTER TABLE payloads ALTER COLUMN body SET STORAGE EXTERNAL",
    # The last commit of each replica, for a replica that lost the response to its commit.
    "CREATE TABLE replica_commits "
    "(replica TEXT PRIMARY KEY, number INTEGER NOT NULL, at TIMESTAMPTZ NOT NULL DEFAULT now())",
)

OBJECTS = "payload_objects"
OBJECT_TABLES = (
    "CREATE TABLE payload_objects (run_id TEXT NOT NULL, group_id TEXT NOT NULL, location TEXT NOT NULL, "
    "name TEXT NOT NULL, size INTEGER NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (run_id, group_id))",
    "CREATE TABLE deleted_objects (location TEXT NOT NULL, name TEXT NOT NULL, at TIMESTAMPTZ NOT NULL DEFAULT now(), "
    "PRIMARY KEY (location, name))",
)
"""Payloads that are stored outside the database."""


def to_postgres(ddl: str) -> str:
    return _TYPE.sub(lambda match: TYPES.get(match[0], ""), ddl)


def create_tables(session: SqlSession, where: str) -> None:
    """Runs inside the caller's transaction."""
    create_schema(session, f"ledger in {where}", translate=to_postgres, more=POSTGRES_ONLY)
    SqlSideTables(session, f"ledger in {where}", to_postgres).create(OBJECTS, 1, OBJECT_TABLES)
    session.write("DELETE FROM replica_commits WHERE at < now() - interval '7 days'")


def require_tables(session: SqlSession, where: str) -> None:
    sql = "SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'schema_versions'"
    if session.select(sql).fetchone() is None:
        raise RunError(f"ledger in {where}: there is none in this schema; check the URL and its search_path")
    require_schema(session, f"ledger in {where}")
    if not SqlSideTables(session, where, to_postgres).exists(OBJECTS):
        raise RunError(
            f"ledger in {where}: an earlier release wrote it; start its service once to add the missing tables"
        )
