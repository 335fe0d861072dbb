"""The ledger is killed under load: no acknowledged data is lost, no group is trained twice, the audit finds no violation."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.ledger.config import Durability
from tests.faults.ledger_crashes import Counts, crash_postgresql, crash_sqlite
from tests.parts.ledger.postgres import PostgresServer, own_server


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    server = own_server()
    yield server
    server.kill()


def assert_nothing_is_missing(counts: Counts, *, kills: int) -> None:
    assert counts.findings == []
    assert (counts.kills, counts.audits) == (kills, kills + 1)
    assert counts.acknowledged == counts.trained + counts.dropped_stale
    assert counts.steps > 0


def test_a_ledger_on_sqlite_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    assert_nothing_is_missing(crash_sqlite(tmp_path, kills=3, seed=11), kills=3)


def test_replicas_and_their_postgresql_may_be_killed_at_any_moment(server: PostgresServer) -> None:
    assert_nothing_is_missing(crash_postgresql(server, kills=4, seed=12), kills=4)


@pytest.mark.slow
def test_with_process_crash_durability_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    counts = crash_sqlite(tmp_path, kills=20, seed=13, durability=Durability.PROCESS_CRASH)
    assert_nothing_is_missing(counts, kills=20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_ledger_on_sqlite_survives_two_hundred_kills(tmp_path: Path) -> None:
    assert_nothing_is_missing(crash_sqlite(tmp_path, kills=200, seed=1), kills=200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_replicas_and_their_postgresql_survive_fifty_kills(server: PostgresServer) -> None:
    assert_nothing_is_missing(crash_postgresql(server, kills=50, seed=1), kills=50)
