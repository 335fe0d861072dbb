"""Databases that the ledger refuses: of a newer release, without durability, wrong, or of an unknown kind."""

from collections.abc import Iterator

import psycopg
import pytest

from rollbook.contracts.errors import RunError
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.stores.postgres.store import open_postgres_store
from rollbook.ledger.stores.registry import open_reader, open_store
from tests.parts.ledger.postgres import PostgresServer, own_server, shared_server


@pytest.fixture
def url() -> str:
    return shared_server().fresh_url()


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    server = own_server()
    yield server
    server.kill()


async def test_a_database_of_a_newer_release_is_refused(url: str) -> None:
    async with open_postgres_store(url):
        pass
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("UPDATE schema_versions SET version = 999")
    with pytest.raises(RunError, match="have schema 999, this release needs 7"):
        async with open_postgres_store(url):
            pass
    with pytest.raises(RunError, match="have schema 999"), open_reader(url):
        pass


def test_a_reader_of_a_schema_without_a_ledger_is_told_so(url: str) -> None:
    with pytest.raises(RunError, match="there is none in this schema"), open_reader(url):
        pass


async def test_a_database_that_does_not_sync_is_refused(server: PostgresServer) -> None:
    server.stop()
    server.start(fsync="off")
    with pytest.raises(StoreFaultError, match="runs with fsync = off and would lose acknowledged groups"):
        async with open_postgres_store(server.fresh_url()):
            pass


async def test_a_wrong_database_is_a_fault_at_once_and_tells_no_password(url: str) -> None:
    wrong = url.replace("tester@", "tester:s3cret@").replace("/postgres?", "/nowhere?")
    with pytest.raises(StoreFaultError, match=r'database nowhere at 127\.0\.0\.1.*"nowhere" does not exist') as refused:
        async with open_store(wrong):
            pass
    assert "s3cret" not in str(refused.value)


async def test_a_store_of_unknown_kind_is_refused() -> None:
    for url, message in (("mysql://x", "scheme 'mysql' is unknown"), ("sqlite:///", "names no directory")):
        with pytest.raises(RunError, match=message):
            async with open_store(url):
                pass
