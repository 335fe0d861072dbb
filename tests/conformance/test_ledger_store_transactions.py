"""Conformance tests of stores: what writes promise, and tables of other modules."""

import asyncio
from collections.abc import Callable

import pytest

from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupState
from rollbook.ledger.records import (
    RunRecord,
)
from rollbook.ledger.store import Store, Transaction
from tests.parts.ledger.groups import RUN, settings
from tests.parts.ledger.records import group, ids, put


async def test_a_failed_write_is_rolled_back_completely(store: Store) -> None:
    await put(store, group("kept", 0))

    def fail(tx: Transaction) -> None:
        tx.groups.put(group("kept", 0, GroupState.QUEUED, arrival=0))
        tx.groups.put(group("new", 1))
        tx.payloads.put(RUN, GroupId("kept"), b"x")
        tx.runs.count_drop(RUN, "stale")
        tx.positions.put(RUN, 1, unsettled=0)
        tx.announce(RUN)
        raise LookupError("on purpose")

    notified: list[RunId] = []
    store.listen(notified.append)
    with pytest.raises(LookupError, match="on purpose"):
        await store.write(fail)

    def look(tx: Transaction) -> None:
        assert ids(tx.groups.dispatched(RUN)) == ["kept"]
        assert tx.groups.queued(RUN) == []
        assert tx.groups.get(RUN, GroupId("new")) is None
        assert tx.payloads.get(RUN, GroupId("kept")) is None
        assert tx.runs.drops(RUN) == {}
        assert tx.positions.all(RUN) == []

    await store.read(look)
    assert notified == []


async def test_rows_of_a_failed_write_are_not_seen_by_later_writes(store: Store) -> None:
    def fail(tx: Transaction) -> None:
        tx.groups.put(group("a", 0))
        tx.positions.put(RUN, 0, unsettled=1)
        assert ids(tx.groups.dispatched(RUN)) == ["a"]
        assert tx.positions.all(RUN) == [(0, 1)]
        raise LookupError("on purpose")

    def look(tx: Transaction) -> tuple[object, object]:
        return tx.groups.get(RUN, GroupId("a")), tx.positions.get(RUN, 0)

    for _ in range(2):
        assert await store.write(look) == (None, None)
        with pytest.raises(LookupError, match="on purpose"):
            await store.write(fail)
    assert await store.write(look) == await store.read(look) == (None, None)


async def test_a_failing_write_does_not_affect_the_others(store: Store) -> None:
    def write(number: int) -> Callable[[Transaction], int]:
        def work(tx: Transaction) -> int:
            tx.groups.put(group(f"g{number:02}", number))
            if number % 3 == 0:
                raise LookupError(f"{number} fails")
            return number

        return work

    answers = await asyncio.gather(*(store.write(write(n)) for n in range(40)), return_exceptions=True)
    good = [n for n in range(40) if n % 3]
    assert [answer for answer in answers if isinstance(answer, int)] == good
    assert [str(a) for a in answers if isinstance(a, LookupError)] == [f"{n} fails" for n in range(0, 40, 3)]
    assert ids(await store.read(lambda tx: tx.groups.page(RUN, limit=99))) == [f"g{n:02}" for n in good]


async def test_a_write_sees_those_before_it(store: Store) -> None:
    def count(tx: Transaction) -> int:
        run = tx.runs.get(RUN)
        assert run is not None
        tx.runs.put(run.changed(next_sequence=run.next_sequence + 1))
        return run.next_sequence

    await store.write(lambda tx: tx.runs.put(RunRecord(run_id=RUN, settings=settings(), created_at=0.0)))
    assert sorted(await asyncio.gather(*(store.write(count) for _ in range(50)))) == list(range(50))


async def test_listeners_are_notified_after_a_commit(store: Store) -> None:
    notified: list[RunId] = []
    store.listen(notified.append)
    await store.write(lambda tx: tx.announce(RUN))
    assert notified == [RUN]


async def test_a_synced_write_returns_its_result(store: Store) -> None:
    def work(tx: Transaction) -> str:
        tx.groups.put(group("a", 0))
        tx.sync_to_disk()
        return "done"

    assert await store.write(work) == "done"
    assert ids(await store.read(lambda tx: tx.groups.dispatched(RUN))) == ["a"]


async def test_a_cancelled_caller_does_not_affect_other_writes(store: Store) -> None:
    cancelled = asyncio.ensure_future(store.write(lambda tx: tx.groups.put(group("a", 0))))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await put(store, group("b", 1))
    assert "b" in ids(await store.read(lambda tx: tx.groups.dispatched(RUN)))


NOTES = ("CREATE TABLE notes (name TEXT PRIMARY KEY, num INTEGER NOT NULL)",)


def add_notes(tx: Transaction, *rows: tuple[str, int]) -> int:
    tx.side_tables.create("notes", 1, NOTES)
    return tx.side_tables.write_many("INSERT INTO notes (name, num) VALUES (?, ?)", rows)


async def test_side_tables_are_created_once_and_share_the_transaction(store: Store) -> None:
    def fail(tx: Transaction) -> None:
        add_notes(tx, ("lost", 1))
        tx.groups.put(group("lost", 0))
        raise LookupError("on purpose")

    with pytest.raises(LookupError):
        await store.write(fail)
    assert not await store.read(lambda tx: tx.side_tables.exists("notes"))
    assert await store.write(lambda tx: add_notes(tx, ("b", 2), ("a", 1))) == 2
    assert await store.write(lambda tx: add_notes(tx, ("c", 3))) == 1
    await store.write(lambda tx: tx.side_tables.write("DELETE FROM notes WHERE name = ?", ("b",)))

    def look(tx: Transaction) -> None:
        assert tx.side_tables.exists("notes")
        assert list(tx.side_tables.select("SELECT name, num FROM notes ORDER BY name")) == [("a", 1), ("c", 3)]
        assert tx.side_tables.select("SELECT 1 FROM notes WHERE name = ?", ("lost",)).fetchone() is None
        assert tx.groups.get(RUN, GroupId("lost")) is None

    await store.read(look)


async def test_side_tables_of_another_version_are_refused(store: Store) -> None:
    await store.write(add_notes)
    with pytest.raises(RunError, match="its notes tables have schema 1, this release needs 2"):
        await store.write(lambda tx: tx.side_tables.create("notes", 2, NOTES))
