"""Payload segments: validity, damage, deletion, and loss in a power failure."""

import errno
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.group import DropKind, GroupId, GroupState
from rollbook.ledger.config import Durability, LedgerConfig
from rollbook.ledger.service import open_ledger
from rollbook.ledger.store import StoreFaultError, Transaction
from rollbook.ledger.stores.sqlite import segments
from rollbook.ledger.stores.sqlite import writer as sqlite_writer
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.ledger.stores.sqlite.segments import (
    EVERYTHING,
    SegmentPlace,
    SegmentWriter,
    read_payload,
    segment_path,
    segments_in,
)
from rollbook.ledger.stores.sqlite.store import SqliteStore, open_readonly, open_sqlite_store, reclaim
from rollbook.ledger.tools.audit import audit_run
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, group_of, settings, submission_of

A, B = GroupId("a"), GroupId("b")


def put(group_id: GroupId, body: bytes) -> Callable[[Transaction], None]:
    return lambda tx: tx.payloads.put(RUN, group_id, body)


def get(*ids: GroupId) -> Callable[[Transaction], list[bytes | None]]:
    return lambda tx: [tx.payloads.get(RUN, group_id) for group_id in ids]


def damage(path: Path, at: int = 0) -> None:
    with path.open("rb+") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


async def test_payloads_of_every_size_are_read_unchanged(tmp_path: Path) -> None:
    bodies = {GroupId(f"g{n}"): random.randbytes(n) for n in (0, 1, 100, 70_000, 1_000_000)}
    async with open_sqlite_store(tmp_path) as store:
        for group_id, body in bodies.items():
            await store.write(put(group_id, body))
        assert await store.read(get(*bodies)) == list(bodies.values())
    with open_readonly(tmp_path) as file:
        assert file.read_now(get(*bodies)) == list(bodies.values())


async def test_a_failed_operation_leaves_no_payload_and_its_bytes_are_overwritten(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path) as store:
        await store.write(put(A, b"kept"))

        def fail(tx: Transaction) -> None:
            put(B, b"x" * 1000)(tx)
            tx.payloads.get(RUN, B)  # a look brings it to the segment
            raise LookupError("no")

        with pytest.raises(LookupError):
            await store.write(fail)
        assert await store.read(get(A, B)) == [b"kept", None]
        await store.write(put(B, b"second"))
        assert await store.read(get(A, B)) == [b"kept", b"second"]
    assert segment_path(tmp_path, 0).stat().st_size == 1004
    async with open_sqlite_store(tmp_path) as store:
        assert await store.read(get(A, B)) == [b"kept", b"second"]


async def test_a_damaged_payload_is_a_fault_and_never_served(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path) as store:
        await store.write(put(A, b"body of a"))
        await store.write(put(B, b"body of b"))
    damage(segment_path(tmp_path, 0), at=3)
    async with open_sqlite_store(tmp_path) as store:
        assert await store.read(get(B)) == [b"body of b"]
        with pytest.raises(StoreFaultError, match=r"00000000\.seg: the payload at 0 of 9 bytes is damaged; restore"):
            await store.read(get(A))


async def test_a_damaged_payload_among_several_read_together_is_named(tmp_path: Path) -> None:
    names = [GroupId(f"g{number}") for number in range(5)]
    async with open_sqlite_store(tmp_path) as store:
        for name in names:
            await store.write(put(name, b"body of " + name.encode()))
    damage(segment_path(tmp_path, 0), at=25)
    async with open_sqlite_store(tmp_path) as store:
        found = await store.read(lambda tx: tx.payloads.get_many(RUN, [names[4], names[0], names[1], names[3]]))
        assert [bytes(body or b"") for body in found] == [b"body of g4", b"body of g0", b"body of g1", b"body of g3"]
        with pytest.raises(StoreFaultError, match=r"the payload at 20 of 10 bytes is damaged; restore"):
            await store.read(lambda tx: tx.payloads.get_many(RUN, names))
        segment_path(tmp_path, 0).unlink()
        with pytest.raises(StoreFaultError, match="is missing"):
            await store.read(lambda tx: tx.payloads.get_many(RUN, names))


async def test_a_missing_segment_is_a_fault_that_names_it(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path) as store:
        await store.write(put(A, b"body"))
        segment_path(tmp_path, 0).unlink()
        with pytest.raises(StoreFaultError, match="is missing"):
            await store.read(get(A))


async def test_a_full_segment_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(SegmentWriter.__init__, "__kwdefaults__", {"segment_bytes": 1000})
    names = [GroupId(f"g{n}") for n in range(10)]
    async with open_sqlite_store(tmp_path) as store:
        for name in names:
            await store.write(put(name, name.encode() * 200))
        assert await store.read(get(*names)) == [name.encode() * 200 for name in names]
        assert len(segments_in(tmp_path)) > 2


async def test_only_the_segments_that_a_transaction_depends_on_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SegmentWriter.__init__, "__kwdefaults__", {"segment_bytes": 1000})
    names = [GroupId(f"g{n}") for n in range(4)]

    def marked() -> set[int]:
        with closing(sqlite3.connect(f"file:{tmp_path / FILE_NAME}?mode=ro", uri=True)) as db:
            return {segment for (segment,) in db.execute("SELECT segment FROM segments WHERE synced_bytes > 0")}

    async with open_sqlite_store(tmp_path, durability=Durability.PROCESS_CRASH) as store:
        for name in names:
            await store.write(put(name, bytes(1000)))
        assert marked() == set()
        await store.write(lambda tx: tx.sync_to_disk(RUN, [names[1], GroupId("unknown")]))
        assert marked() == {1}
        await store.write(lambda tx: tx.sync_to_disk(RUN, [names[3]]))
        assert marked() == {1, 3}, "the one that is being written, too"
        await store.write(lambda tx: tx.sync_to_disk())
        assert marked() == {0, 1, 2, 3}
        assert await store.read(get(*names)) == [bytes(1000)] * 4


async def test_an_empty_segment_is_deleted_after_a_while_and_one_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "GRACE_S", 0.0)
    for name in (A, B):
        async with open_sqlite_store(tmp_path) as store:
            await store.write(put(name, b"body"))
    assert segments_in(tmp_path) == [0, 1]
    async with open_sqlite_store(tmp_path) as store:
        await store.write(lambda tx: tx.payloads.delete(RUN, A))
        assert segments_in(tmp_path) == [1]
        assert await store.read(get(A, B)) == [None, b"body"]


async def test_a_segment_that_was_emptied_before_it_was_synced_is_deleted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "GRACE_S", 0.0)
    monkeypatch.setattr(SegmentWriter.__init__, "__kwdefaults__", {"segment_bytes": 1})
    async with open_sqlite_store(tmp_path, durability=Durability.PROCESS_CRASH) as store:
        await store.write(put(A, b"body"))
        await store.write(put(B, b"body"))
        await store.write(lambda tx: tx.payloads.delete(RUN, A))
        assert segments_in(tmp_path) == [0, 1], "the first one is full, and is synced later"
        await store.write(lambda tx: tx.sync_to_disk())
        await store.write(lambda tx: tx.payloads.delete(RUN, A))
        assert segments_in(tmp_path) == [1]


async def test_segment_numbers_are_never_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_writer, "GRACE_S", 0.0)
    async with open_sqlite_store(tmp_path) as store:
        await store.write(put(A, b"body"))
    async with open_sqlite_store(tmp_path) as store:
        await store.write(lambda tx: tx.payloads.delete(RUN, A))
    assert segments_in(tmp_path) == []
    async with open_sqlite_store(tmp_path) as store:
        await store.write(put(A, b"body"))
    assert segments_in(tmp_path) == [1]


async def test_an_unreferenced_file_is_removed_at_the_next_start_unless_it_is_being_written(tmp_path: Path) -> None:
    async with open_sqlite_store(tmp_path) as store:
        await store.write(put(A, b"body"))
        (segment_path(tmp_path, 7)).write_bytes(b"of a commit that never was")
        async with open_sqlite_store(tmp_path) as other:
            assert segments_in(tmp_path) == [0]
            await other.write(put(B, b"other"))
            # The first one still writes its own, and both see everything.
            assert await store.read(get(A, B)) == [b"body", b"other"]


async def test_compacting_removes_holes_and_joins_small_segments(tmp_path: Path) -> None:
    names = [GroupId(f"g{n}") for n in range(6)]
    for name in names:
        async with open_sqlite_store(tmp_path) as store:
            await store.write(put(name, name.encode() * 10_000))
            await store.write(put(GroupId(f"gone {name}"), b"x" * 50_000))
    async with open_sqlite_store(tmp_path) as store:
        for name in names:
            await store.write(lambda tx, name=name: tx.payloads.delete(RUN, GroupId(f"gone {name}")))  # type: ignore[misc]
    before, after = reclaim(tmp_path)
    assert before - after >= 300_000
    assert len(segments_in(tmp_path)) == 1
    async with open_sqlite_store(tmp_path) as store:
        assert await store.read(get(*names)) == [name.encode() * 10_000 for name in names]


async def test_a_full_disk_is_a_fault_and_the_next_commit_continues_after_acknowledged_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_sqlite_store(tmp_path) as store:
        await store.write(put(A, b"body"))

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", full)
            with pytest.raises(StoreFaultError, match="No space left on device; if the disk is full, free some space"):
                await store.write(put(B, b"body"))
        await store.write(put(B, b"second"))
        assert await store.read(get(A, B)) == [b"body", b"second"]


def test_a_partial_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SegmentWriter(tmp_path, first=0, is_always_synced=True)
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda handle, bodies, at: real(handle, [bodies[0][:2]], at))
    places = [writer.append(b"first"), writer.append(b"second")]
    writer.flush()
    assert [read_payload(tmp_path, place) for place in places] == [b"first", b"second"]
    writer.close()


def test_small_payloads_are_written_together_and_large_ones_at_once(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, first=0, is_always_synced=True)
    small = writer.append(b"small")
    assert segment_path(tmp_path, 0).stat().st_size == 0
    large = writer.append(bytes(segments.WRITE_BYTES))
    assert segment_path(tmp_path, 0).stat().st_size == large.place + large.size
    assert read_payload(tmp_path, small) == b"small"
    writer.keep({})
    taken_back = writer.append(bytes([1]) * segments.WRITE_BYTES)
    writer.roll_back()
    instead = writer.append(b"instead")
    assert instead.place == taken_back.place
    writer.close()
    assert read_payload(tmp_path, instead) == b"instead"


def test_marks_cover_exactly_the_synced_bytes(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, first=3, is_always_synced=False)
    writer.append(b"12345")
    assert writer.marks() == {}
    writer.sync()
    assert writer.marks() == {3: 5}
    writer.keep({3: 5})
    assert writer.marks() == {}
    writer.append(b"678")
    writer.roll_back()
    assert writer.append(b"x") == SegmentPlace(3, 5, 1, segments.digest_of(b"x"))
    assert writer.close() == {3: EVERYTHING}


# ---------------------------------------------------------------------- after a power cut


async def crashed_with_groups(directory: Path, names: list[str]) -> None:
    """A ledger that answered for groups and was gone before anything was synced."""
    async with open_sqlite_store(directory, durability=Durability.PROCESS_CRASH) as store:
        log = EventLog("ledger")
        async with open_ledger(store, LedgerConfig(), clock=ManualClock(), log=log) as ledger:
            await ledger.create_run(RUN, settings())
            for name in names:
                group = group_of(name, (-1,))
                await ledger.submit(RUN, submission_of(group))
        die(store)


def die(store: SqliteStore) -> None:
    """Closing syncs and marks; a process that dies does neither."""
    writer = store._writer._segments
    assert writer is not None
    assert writer._current is not None
    writer._current.close()
    writer._current = None
    writer._marks.clear()


async def test_a_group_whose_payload_was_lost_in_a_power_failure_is_dropped_with_the_reason(tmp_path: Path) -> None:
    await crashed_with_groups(tmp_path, ["a", "b", "c"])
    path = segment_path(tmp_path, 0)
    os.truncate(path, path.stat().st_size - 10)
    clock, log = ManualClock(), EventLog("ledger")
    async with open_sqlite_store(tmp_path) as store, open_ledger(store, LedgerConfig(), clock=clock, log=log) as ledger:
        groups = await ledger.groups(RUN)
        assert [group.state for group in groups] == [GroupState.QUEUED, GroupState.QUEUED, GroupState.DROPPED]
        assert groups[2].drop_reason == f"{DropKind.LOST}: its payload was lost in a power failure"
        assert (await ledger.read(lambda tx: audit_run(tx, RUN))).violations == ()
    # A loss is reported once, and the file is not checked again.
    async with open_sqlite_store(tmp_path) as store:
        assert await store.write(lambda tx: tx.payloads.lost(RUN)) == []


async def test_after_a_process_crash_nothing_is_lost_and_the_next_start_does_not_verify_again(tmp_path: Path) -> None:
    await crashed_with_groups(tmp_path, ["a", "b"])
    async with open_sqlite_store(tmp_path) as store:
        assert await store.write(lambda tx: tx.payloads.lost(RUN)) == []
    damage(segment_path(tmp_path, 0))
    async with open_sqlite_store(tmp_path) as store:
        # Later damage is a fault of the disk: reading fails, and nothing is counted as lost.
        assert await store.write(lambda tx: tx.payloads.lost(RUN)) == []
        with pytest.raises(StoreFaultError, match="is damaged"):
            await store.read(get(group_of("a", (-1,)).id))
