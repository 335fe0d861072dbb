"""The write buffer on SQLite: operations of one commit see each other's buffered rows and fail independently."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.task import TaskId
from rollbook.ledger.records import GroupRecord, MoveRecord, Origin, RunRecord
from rollbook.ledger.store import Transaction
from rollbook.ledger.stores.sqlite.store import SqliteStore, open_sqlite_store
from tests.parts.ledger.groups import RUN, settings

NEW_RUN = RunRecord(run_id=RUN, settings=settings(), created_at=1.0)


def group(name: str, sequence: int) -> GroupRecord:
    return GroupRecord(
        run_id=RUN,
        group_id=GroupId(name),
        task_id=TaskId("t"),
        draw=0,
        position=None,
        origin=Origin.EXTERNAL,
        state=GroupState.QUEUED,
        sequence=sequence,
        opened_at=1.0,
    )


def count_opened(tx: Transaction) -> int:
    run = tx.runs.get(RUN)
    assert run is not None
    tx.runs.put(run.changed(num_opened=run.num_opened + 1))
    return run.num_opened


async def together(store: SqliteStore, *works: Callable[[Transaction], Any]) -> list[Any]:
    """In one commit: the first holds the writer up until all wait behind it."""
    return await asyncio.gather(*(store.write(work) for work in works), return_exceptions=True)


async def test_operations_of_one_commit_see_each_other(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path) as store:
        await store.write(lambda tx: tx.runs.put(NEW_RUN))

        def put(tx: Transaction) -> int:
            tx.groups.put(group("a", 1))
            tx.payloads.put(RUN, GroupId("a"), b"body")
            tx.history.add(
                MoveRecord(
                    run_id=RUN,
                    group_id=GroupId("a"),
                    at=1.0,
                    from_state=None,
                    to_state=GroupState.QUEUED,
                    note="n",
                    by="b",
                )
            )
            return count_opened(tx)

        def look(tx: Transaction) -> Any:
            found = tx.groups.get(RUN, GroupId("a"))
            return (
                found,
                len(tx.groups.queued(RUN)),
                tx.payloads.get(RUN, GroupId("a")),
                len(tx.history.of_group(RUN, GroupId("a"))),
            )

        numbers = await together(store, put, look, count_opened, look)
        assert numbers[0] == 0
        assert numbers[2] == 1
        assert numbers[1] == numbers[3] == (group("a", 1), 1, b"body", 1)
        run = await store.read(lambda tx: tx.runs.get(RUN))
        assert run is not None
        assert run.num_opened == 2


@pytest.mark.parametrize(
    "writes_first", [False, True], ids=["before it wrote to the file", "after it wrote to the file"]
)
async def test_a_failed_operation_is_rolled_back_without_affecting_the_others(
    tmp_path: Path, writes_first: bool
) -> None:
    async with open_sqlite_store(tmp_path) as store:
        await store.write(lambda tx: tx.runs.put(NEW_RUN))

        def fail(tx: Transaction) -> None:
            count_opened(tx)
            tx.groups.put(group("bad", 9))
            if writes_first:
                tx.positions.put(RUN, 3, unsettled=0)
                tx.groups.queued(RUN)
            raise LookupError("no")

        def put(name: str, sequence: int) -> Callable[[Transaction], int]:
            def work(tx: Transaction) -> int:
                tx.groups.put(group(name, sequence))
                return count_opened(tx)

            return work

        results = await together(store, put("a", 1), fail, put("b", 2), fail, put("c", 3))
        assert [results[0], results[2], results[4]] == [0, 1, 2]
        assert isinstance(results[1], LookupError)
        assert isinstance(results[3], LookupError)
        ids, run, positions = await store.read(
            lambda tx: ([g.group_id for g in tx.groups.queued(RUN)], tx.runs.get(RUN), tx.positions.all(RUN))
        )
        assert ids == ["a", "b", "c"]
        assert positions == []
        assert run is not None
        assert run.num_opened == 3


async def test_positions_of_a_failed_operation_are_neither_written_nor_seen_by_the_next(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path) as store:

        def settle(tx: Transaction) -> None:
            tx.positions.put(RUN, 3, unsettled=0)
            tx.positions.delete(RUN, 2)

        def fail(tx: Transaction) -> None:
            tx.positions.put(RUN, 2, unsettled=7)
            tx.positions.delete(RUN, 3)
            tx.positions.put(RUN, 4, unsettled=1)
            raise LookupError("no")

        def look(tx: Transaction) -> list[int | None]:
            return [tx.positions.get(RUN, at) for at in (2, 3, 4)]

        await store.write(lambda tx: tx.positions.put(RUN, 2, unsettled=1))
        results = await together(store, settle, fail, look)
        assert isinstance(results[1], LookupError)
        assert results[2] == await store.write(look) == await store.read(look) == [None, 0, None]
        assert await store.read(lambda tx: tx.positions.all(RUN)) == [(3, 0)]


async def test_a_row_that_did_not_exist_is_found_after_it_was_written(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path) as store:

        def look(tx: Transaction) -> GroupRecord | None:
            found = tx.groups.get(RUN, GroupId("a"))
            assert tx.groups.find(RUN, [GroupId("a")]) == ({} if found is None else {"a": found})
            return found

        def fail(tx: Transaction) -> None:
            tx.groups.put(group("a", 1))
            assert look(tx) == group("a", 1)
            raise LookupError("no")

        results = await together(store, look, fail, look, lambda tx: tx.groups.put(group("a", 2)), look)
        assert [results[0], results[2], results[4]] == [None, None, group("a", 2)]
        assert await store.write(look) == group("a", 2)


async def test_a_row_that_the_database_refuses_fails_only_its_own_operation(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path) as store:
        await store.write(lambda tx: tx.runs.put(NEW_RUN))
        results = await together(
            store,
            lambda tx: tx.groups.put(group("a", 1)),
            lambda tx: tx.groups.put(group("beyond", 2**70)),
            lambda tx: tx.groups.put(group("same sequence", 1)),
            lambda tx: tx.groups.put(group("b", 2)),
        )
        assert [type(t).__name__ for t in results] == ["NoneType", "OverflowError", "IntegrityError", "NoneType"]
        assert [g.group_id for g in await store.read(lambda tx: tx.groups.queued(RUN))] == ["a", "b"]


async def test_a_record_that_another_process_changed_is_read_again(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path) as one, open_sqlite_store(tmp_path) as other:
        await one.write(lambda tx: tx.runs.put(NEW_RUN))
        assert await one.write(count_opened) == 0
        assert await other.write(count_opened) == 1
        assert await one.write(count_opened) == 2
