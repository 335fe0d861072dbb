"""The SQLite store and its file: faults, schema, durability."""

import os
import sqlite3
from pathlib import Path

import pytest

from rollbook.contracts.admission import OwnerId
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupState
from rollbook.ledger.config import Durability
from rollbook.ledger.records import Origin, OwnerRecord, OwnerState
from rollbook.ledger.store import ChangedRows, StoreFaultError, Transaction
from rollbook.ledger.stores.sql.transaction import SqlTransaction
from rollbook.ledger.stores.sql.write_buffer import SqlSession
from rollbook.ledger.stores.sqlite import file as sqlite_file
from rollbook.ledger.stores.sqlite import writer as sqlite_writer
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.ledger.stores.sqlite.store import open_sqlite_store
from tests.parts.ledger.groups import RUN, settings
from tests.parts.ledger.run_driver import RunDriver, blocking_sqlite


async def test_written_data_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path) as store:
        await store.write(lambda tx: tx.payloads.put(RUN, GroupId("a"), b"body"))
    async with open_sqlite_store(tmp_path) as store:
        assert await store.read(lambda tx: tx.payloads.get(RUN, GroupId("a"))) == b"body"


async def test_a_file_from_a_newer_release_is_refused(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path):
        pass
    db = sqlite3.connect(tmp_path / FILE_NAME)
    with db:
        db.execute("UPDATE schema_versions SET version = 999")
    db.close()
    with pytest.raises(RunError, match="have schema 999, this release needs 7"):
        async with open_sqlite_store(tmp_path):
            pass


async def test_a_file_that_is_not_a_ledger_is_a_fault_with_advice(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database at all" * 500)
    with pytest.raises(StoreFaultError, match=r"ledger\.sqlite.*restore it from a copy"):
        async with open_sqlite_store(tmp_path):
            pass


@pytest.mark.parametrize("table", ["runs", "groups"])
async def test_a_damaged_table_is_refused(tmp_path: Path, table: str) -> None:
    """A small table at the start, a growing one as soon as the check in the background has reached it."""
    driver = RunDriver(blocking_sqlite(tmp_path / FILE_NAME)).create(settings())
    for number in range(200):
        driver.submit(f"task{number}", (-1,))
    driver.store.close()
    db = sqlite3.connect(tmp_path / FILE_NAME)
    page = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
    size = db.execute("PRAGMA page_size").fetchone()[0]
    db.close()
    with (tmp_path / FILE_NAME).open("rb+") as file:
        file.seek((page - 1) * size + 8)
        file.write(b"\xff" * 64)

    async def read_for_ever() -> None:
        async with open_sqlite_store(tmp_path) as store:
            while True:
                await store.read(lambda tx: tx.runs.ids())

    with pytest.raises(StoreFaultError, match=r"damaged.*restore it from a copy"):
        await read_for_ever()


async def test_a_directory_that_cannot_be_made_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreFaultError, match="cannot be made"):
        async with open_sqlite_store(tmp_path / "file" / "ledger"):
            pass


async def test_a_full_disk_is_a_fault_and_no_acknowledged_data_is_lost(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path) as store:
        await store.write(lambda tx: tx.payloads.put(RUN, GroupId("kept"), b"body"))

        def fill(tx: Transaction) -> None:
            # As many pages as there are now, and no more: what a full disk looks like to SQLite.
            tx.session.write("PRAGMA max_page_count = 1")  # type: ignore[attr-defined]
            tx.payloads.put(RUN, GroupId("lost"), b"x" * 10_000_000)
            tx.owners.put(
                OwnerRecord(
                    run_id=RUN,
                    owner_id=OwnerId("o"),
                    name="o" * 1_000_000,
                    nonce="n",
                    state=OwnerState.ALIVE,
                    last_seen=0.0,
                )
            )

        with pytest.raises(StoreFaultError, match="the disk is full"):
            await store.write(fill)

        def room(tx: Transaction) -> None:
            tx.session.write("PRAGMA max_page_count = 1000000")  # type: ignore[attr-defined]

        await store.write(room)
        await store.write(lambda tx: tx.payloads.put(RUN, GroupId("after"), b"body"))
        found = await store.read(lambda tx: [tx.payloads.get(RUN, GroupId(n)) for n in ("kept", "lost", "after")])
    assert found == [b"body", None, b"body"]


async def test_another_process_that_holds_the_file_is_a_fault_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sqlite_file, sqlite_writer):
        monkeypatch.setattr(module, "BUSY_S", 0.05)
    async with open_sqlite_store(tmp_path) as store:
        other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreFaultError, match="another process holds it"):
            await store.write(lambda tx: tx.payloads.put(RUN, GroupId("a"), b"body"))
        other.execute("ROLLBACK")
        other.close()
        await store.write(lambda tx: tx.payloads.put(RUN, GroupId("a"), b"body"))


async def test_decided_batches_are_synced_where_other_commits_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    synced_data: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(os, "fdatasync", synced_data.append)
    async with open_sqlite_store(tmp_path, durability=Durability.PROCESS_CRASH) as store:
        await store.write(lambda tx: tx.payloads.put(RUN, GroupId("a"), b"body"))
        # The names of a new segment and its directory are on the disk at once, its bytes are not.
        before = len(synced)
        await store.write(lambda tx: tx.payloads.put(RUN, GroupId("b"), b"body"))
        assert (len(synced), len(synced_data)) == (before, 0)
        await store.write(lambda tx: tx.sync_to_disk())
        assert (len(synced), len(synced_data)) == (before + 1, 1)


@pytest.mark.parametrize(("durability", "level"), [(Durability.POWER_LOSS, 2), (Durability.PROCESS_CRASH, 1)])
async def test_the_durability_mode_sets_the_synchronous_level(
    tmp_path: Path, durability: Durability, level: int
) -> None:
    async with open_sqlite_store(tmp_path, durability=durability) as store:
        modes = await store.write(
            lambda tx: [tx.session.select(f"PRAGMA {p}").fetchone()[0] for p in ("synchronous", "journal_mode")]  # type: ignore[attr-defined]
        )
    assert modes == [level, "wal"]


async def test_queries_on_the_hot_path_use_the_partial_indexes_of_open_groups(tmp_path: Path) -> None:
    """The cost of a query that scans all groups would grow with the length of the run."""
    async with open_sqlite_store(tmp_path):
        pass
    db = sqlite3.connect(tmp_path / FILE_NAME)
    tx = SqlTransaction(SqlSession(db), FILE_NAME)
    queries: list[str] = []
    db.set_trace_callback(queries.append)
    tx.groups.leased_by(RUN, OwnerId("w"))
    tx.groups.leases_ending_by(RUN, 5.0)
    tx.groups.waiting(RUN, 5)
    tx.groups.oldest_dispatched(RUN)
    tx.groups.dispatched(RUN)
    tx.groups.queued_by_sequence(RUN, 5, origin=Origin.DRAWN)
    tx.groups.queued_by_sequence(RUN, 5, origin=Origin.EXTERNAL, producer="p")
    tx.groups.queued_by_arrival(RUN, 5, origin=Origin.EXTERNAL)
    tx.groups.queued_below(RUN, 5)
    tx.groups.queued_below(RUN, 5, by_newest=True)
    tx.groups.aged(RUN, 5)
    tx.groups.last_part(RUN, 5)
    tx.groups.releasable(RUN, 5, 5, dropped_only=True)
    tx.groups.releasable(RUN, 5, 5, dropped_only=False)
    for state in GroupState:
        tx.groups.page(RUN, limit=5, state=state)
    tx.groups.queued(RUN)
    list(tx.damage(RUN, ChangedRows(after_step=5, publication=5)))
    list(tx.groups.checked(RUN, pytest.fail, [GroupId("g")]))
    tx.history.checked(RUN, pytest.fail, [GroupId("g")])
    db.set_trace_callback(None)
    # The last line that searches a table: the ids of groups are joined as a table of their own.
    lines = [[row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}")] for sql in queries]
    # A condition with a query of its own is searched last.
    plans = [
        [line for line in found if line.startswith(("SEARCH", "SCAN"))][0 if "EXISTS" in sql else -1]
        for sql, found in zip(queries, lines, strict=True)
    ]
    db.close()
    # Of the tables that grow with the run, the damage check reads the rows of these groups, steps and publications only.
    checks = {
        sql.split(" FROM ")[1].split()[0]: plan
        for sql, plan in zip(queries, plans, strict=True)
        if "checksum FROM" in sql
    }
    for table in ("groups", "history", "batches", "batch_entries", "steps", "publications"):
        assert any(key in checks[table] for key in ("group_id=?", "step>?", "id>?")), checks[table]
    plans = [plan for sql, plan in zip(queries, plans, strict=True) if "checksum FROM" not in sql]
    expected = [
        *("groups_owned", "groups_leases", "groups_waiting", "groups_dispatched", "groups_dispatched"),
        *("groups_queued_by_sequence", "groups_queued_by_sequence", "groups_queued_by_arrival"),
        *("groups_queued_by_version", "groups_queued_by_newest_version", "groups_dispatched_by_version"),
        *("groups_by_sequence", "groups_dropped_releasable", "groups_releasable"),
        *("groups_dispatched", "groups_queued_by_sequence", "groups_batched", "groups_trained", "groups_by_sequence"),
        *("groups_dropped", "groups_queued_by_sequence"),
    ]
    assert [plan.split(" INDEX ")[1].split(" ")[0] for plan in plans] == expected
