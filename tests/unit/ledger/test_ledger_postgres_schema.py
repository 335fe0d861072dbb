"""The schema has the same tables and columns in SQLite and PostgreSQL."""

import sqlite3
from pathlib import Path

import psycopg
import pytest

from rollbook.ledger.stores.postgres.schema import to_postgres
from rollbook.ledger.stores.postgres.store import open_postgres_store
from rollbook.ledger.stores.sqlite.file import create_tables
from tests.parts.ledger.postgres import shared_server

KINDS = {"TEXT": "text", "INTEGER": "bigint", "REAL": "double precision", "BLOB": "bytea"}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("id INTEGER PRIMARY KEY,", "id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"),
        ("num INTEGER NOT NULL", "num BIGINT NOT NULL"),
        ("at REAL, body BLOB", "at DOUBLE PRECISION, body BYTEA"),
        ("name TEXT NOT NULL -- TEXT, really?", 'name TEXT COLLATE "C" NOT NULL '),
        (") WITHOUT ROWID;", ") ;"),
        ("WHERE has_payload = 1", "WHERE has_payload = 1"),
    ],
)
def test_type_names_are_translated_for_postgresql(ours: str, theirs: str) -> None:
    assert to_postgres(ours) == theirs


async def test_every_table_has_the_same_columns_in_both_databases(tmp_path: Path) -> None:
    file = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    create_tables(file, tmp_path / "ledger.sqlite")
    tables = [row[0] for row in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    tables = [name for name in tables if name not in ("payload_places", "segments")]
    expected = {
        (table, column, KINDS[kind], not (is_needed or key))
        for table in tables
        for _, column, kind, is_needed, _, key in file.execute(f"PRAGMA table_info({table})")
    }
    file.close()
    url = shared_server().fresh_url()
    async with open_postgres_store(url):
        pass
    with psycopg.connect(url) as db:
        rows = db.execute(
            "SELECT table_name, column_name, data_type, is_nullable = 'YES' FROM information_schema.columns "
            "WHERE table_schema = current_schema() "
            "AND table_name NOT IN ('replica_commits', 'payload_objects', 'deleted_objects')"
        ).fetchall()
    assert set(rows) == expected
