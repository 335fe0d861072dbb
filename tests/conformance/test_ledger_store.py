"""Conformance tests of stores. A new store is complete when it is added to the parameters here and passes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rollbook.contracts.admission import MemberId, MemberRole, OwnerId, RunId
from rollbook.contracts.batch import AckReceipt, BatchEntry, BatchManifest, EndOfRun
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.policy import PublicationId
from rollbook.contracts.task import TaskId
from rollbook.ledger.config import Durability
from rollbook.ledger.records import (
    BatchRecord,
    GroupRecord,
    MemberRecord,
    MemberState,
    MoveRecord,
    Origin,
    OwnerRecord,
    OwnerState,
    ProducerRecord,
    PublicationRecord,
    RunRecord,
    StepRecord,
)
from rollbook.ledger.store import Store, Transaction
from rollbook.ledger.stores.postgres.store import open_postgres_store
from rollbook.ledger.stores.sqlite.store import open_memory_store, open_sqlite_store
from tests.parts.ledger.groups import RUN, settings
from tests.parts.ledger.postgres import shared_server

OTHER = RunId("run-2")
Opener = Callable[[Path], AbstractAsyncContextManager[Store]]


@asynccontextmanager
async def memory(_: Path) -> AsyncIterator[Store]:
    async with open_memory_store() as store:
        yield store


@asynccontextmanager
async def sqlite_power_loss(directory: Path) -> AsyncIterator[Store]:
    async with open_sqlite_store(directory) as store:
        yield store


@asynccontextmanager
async def sqlite_process_crash(directory: Path) -> AsyncIterator[Store]:
    async with open_sqlite_store(directory, durability=Durability.PROCESS_CRASH) as store:
        yield store


@asynccontextmanager
async def postgres(_: Path) -> AsyncIterator[Store]:
    async with open_postgres_store(shared_server().fresh_url()) as store:
        yield store


@pytest.fixture(params=[memory, sqlite_power_loss, sqlite_process_crash, postgres])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opener: Opener = request.param
    async with opener(tmp_path) as opened:
        yield opened


def group(name: str, sequence: int, state: GroupState = GroupState.DISPATCHED, **fields: object) -> GroupRecord:
    record = GroupRecord(
        run_id=RUN,
        group_id=GroupId(name),
        task_id=TaskId("task"),
        draw=0,
        position=sequence,
        origin=Origin.DRAWN,
        state=state,
        sequence=sequence,
        opened_at=1.5,
    )
    return record.changed(**fields)


def ids(groups: list[GroupRecord]) -> list[str]:
    return [record.group_id for record in groups]


async def put(store: Store, *groups: GroupRecord) -> None:
    def work(tx: Transaction) -> None:
        for record in groups:
            tx.groups.put(record)

    await store.write(work)


async def test_a_run_is_read_as_it_was_written(store: Store) -> None:
    first = RunRecord(run_id=RUN, settings=settings(max_steps=7), created_at=1.0)
    changed = first.changed(
        exhausted=True, ended=EndOfRun.STOPPED, version=3, publication=PublicationId(4), num_queued=2
    )
    await store.write(lambda tx: tx.runs.put(first))
    await store.write(lambda tx: tx.runs.put(first.changed(run_id=OTHER, created_at=2.0)))
    assert await store.read(lambda tx: tx.runs.get(RUN)) == first
    await store.write(lambda tx: tx.runs.put(changed))
    assert await store.read(lambda tx: tx.runs.get(RUN)) == changed
    assert await store.read(lambda tx: tx.runs.ids()) == [RUN, OTHER]
    assert await store.read(lambda tx: tx.runs.get(RunId("none"))) is None


async def test_a_group_is_read_as_it_was_written(store: Store) -> None:
    full = group(
        "ü@0",
        5,
        GroupState.QUEUED,
        position=None,
        origin=Origin.EXTERNAL,
        attempt=2,
        failures=1,
        admission_version=3,
        admission_publication=PublicationId(4),
        arrival=9,
        publications=(-1, 3, 4),
        oldest_version=2,
        outcome=b"{}",
        payload_digest="d",
        payload_bytes=10,
        has_payload=True,
        release_step=6,
        drop_reason="stale: x",
    )
    await put(store, group("a@0", 0), full)
    assert await store.read(lambda tx: tx.groups.get(RUN, GroupId("ü@0"))) == full
    assert await store.read(lambda tx: tx.groups.get(RUN, GroupId("a@0"))) == group("a@0", 0)
    assert await store.read(lambda tx: tx.groups.get(OTHER, GroupId("a@0"))) is None


async def test_open_groups_are_found_by_what_they_wait_for(store: Store) -> None:
    owner = OwnerId("w#0")
    await put(
        store,
        group("leased", 3, owner=owner, lease_until=50.0),
        group("waiting", 2),
        group("later", 4),
        group("queued", 1, GroupState.QUEUED, arrival=8, oldest_version=5),
        group("older", 6, GroupState.QUEUED, arrival=7, oldest_version=2),
        group("unknown", 7, GroupState.QUEUED, arrival=6),
        group("settled", 0, GroupState.TRAINED, arrival=1, oldest_version=0),
    )

    def look(tx: Transaction) -> None:
        assert ids(tx.groups.leased_by(RUN, owner)) == ["leased"]
        assert ids(tx.groups.leases_ending_by(RUN, 49.0)) == []
        assert ids(tx.groups.leases_ending_by(RUN, 50.0)) == ["leased"]
        assert ids(tx.groups.waiting(RUN, 1)) == ["waiting"]
        assert ids(tx.groups.waiting(RUN, 9)) == ["waiting", "later"]
        assert tx.groups.oldest_dispatched(RUN) == 2
        assert ids(tx.groups.dispatched(RUN)) == ["waiting", "leased", "later"]
        assert ids(tx.groups.queued(RUN)) == ["queued", "older", "unknown"]
        assert ids(tx.groups.queued_by_sequence(RUN, 2, origin=Origin.DRAWN)) == ["queued", "older"]
        assert tx.groups.queued_by_sequence(RUN, 2, origin=Origin.EXTERNAL) == []
        assert ids(tx.groups.queued_by_arrival(RUN, 2, origin=Origin.DRAWN)) == ["unknown", "older"]
        assert ids(tx.groups.queued_below(RUN, 5)) == ["older"]
        assert tx.groups.oldest_dispatched(OTHER) is None
        assert tx.groups.queued(OTHER) == []

    await store.read(look)


async def test_groups_are_listed_by_sequence_and_by_id(store: Store) -> None:
    await put(store, group("b", 0), group("c", 1, GroupState.QUEUED), group("a", 2))

    def look(tx: Transaction) -> None:
        assert ids(tx.groups.page(RUN, limit=10)) == ["b", "c", "a"]
        assert ids(tx.groups.page(RUN, limit=1, start=1)) == ["c"]
        assert ids(tx.groups.page(RUN, limit=10, state=GroupState.DISPATCHED)) == ["b", "a"]
        for state in GroupState:
            listed = {GroupState.DISPATCHED: ["a"], GroupState.QUEUED: ["c"]}
            assert ids(tx.groups.page(RUN, limit=1, start=1, state=state)) == listed.get(state, [])
        assert ids(list(tx.groups.each(RUN))) == ["a", "b", "c"]

    await store.read(look)


async def test_a_group_is_no_longer_found_in_its_former_state(store: Store) -> None:
    await put(store, group("a", 0, owner=OwnerId("w"), lease_until=1.0))
    await put(store, group("a", 0, GroupState.QUEUED, arrival=0, oldest_version=0))
    await put(store, group("a", 0, GroupState.BATCHED, arrival=0, oldest_version=0, step=1))

    def look(tx: Transaction) -> None:
        assert tx.groups.leased_by(RUN, OwnerId("w")) == []
        assert tx.groups.leases_ending_by(RUN, 2.0) == []
        assert tx.groups.queued(RUN) == []
        assert tx.groups.queued_below(RUN, 9) == []

    await store.read(look)


async def test_payloads_are_bytes_and_can_be_deleted(store: Store) -> None:
    body = bytes(range(256)) * 1000
    await store.write(lambda tx: tx.payloads.put(RUN, GroupId("a"), body))
    assert await store.read(lambda tx: tx.payloads.get(RUN, GroupId("a"))) == body
    await store.write(lambda tx: tx.payloads.delete(RUN, GroupId("a")))
    assert await store.read(lambda tx: tx.payloads.get(RUN, GroupId("a"))) is None


async def test_several_groups_are_found_including_those_of_the_same_transaction(store: Store) -> None:
    for number in range(20):
        await store.write(lambda tx, n=number: tx.groups.put(group(f"g{n}", n)))  # type: ignore[misc]

    def work(tx: Transaction) -> list[int]:
        tx.groups.put(group("new", 50))
        asked = [GroupId(name) for name in ("g3", "nobody", "new", *(f"g{n}" for n in range(20)))]
        found = tx.groups.find(RUN, asked)
        assert all(found[name].group_id == name for name in found)
        return sorted(record.sequence for record in found.values())

    assert await store.write(work) == [*range(20), 50]
    assert await store.read(lambda tx: tx.groups.find(RUN, [])) == {}


async def test_several_payloads_are_returned_in_the_requested_order(store: Store) -> None:
    names = [GroupId(f"g{number}") for number in range(20)]
    for name in names:
        await store.write(lambda tx, name=name: tx.payloads.put(RUN, name, name.encode() * 9))  # type: ignore[misc]
    asked = [names[7], GroupId("nobody"), *reversed(names), names[7]]
    found = await store.read(lambda tx: [body and bytes(body) for body in tx.payloads.get_many(RUN, asked)])
    assert found == [name.encode() * 9 if name in names else None for name in asked]
    assert await store.read(lambda tx: tx.payloads.get_many(RUN, [])) == []


async def test_deletable_payloads_are_found_by_step(store: Store) -> None:
    await put(
        store,
        group("old", 0, GroupState.DURABLE, has_payload=True, release_step=1),
        group("new", 1, GroupState.DURABLE, has_payload=True, release_step=2),
        group("gone", 2, GroupState.DURABLE, has_payload=False, release_step=1),
        group("filtered", 3, GroupState.DROPPED, has_payload=True, release_step=1),
        group("queued", 4, GroupState.QUEUED, has_payload=True, arrival=0),
    )
    assert ids(await store.read(lambda tx: tx.groups.releasable(RUN, 1, 10, dropped_only=False))) == ["old", "filtered"]
    assert ids(await store.read(lambda tx: tx.groups.releasable(RUN, 2, 10, dropped_only=True))) == ["filtered"]


async def test_members_are_found_by_id_and_listed_while_they_are_alive(store: Store) -> None:
    first = MemberRecord(
        run_id=RUN,
        member_id=MemberId("policy#0"),
        name="policy",
        role=MemberRole.POLICY,
        node="n1",
        address="http://n1:1",
        nonce="x",
        state=MemberState.ALIVE,
        lease_s=15.0,
        joined_at=1.0,
        last_seen=2.0,
        in_service=True,
        publication=3,
        load=0.5,
    )
    second = first.changed(member_id=MemberId("policy#1"), joined_at=2.0, publication=None)
    await store.write(lambda tx: tx.members.put(second))
    await store.write(lambda tx: tx.members.put(first))
    assert await store.read(lambda tx: tx.members.alive(RUN)) == [first, second]
    assert await store.read(lambda tx: tx.runs.with_leases()) == [RUN]
    left = first.changed(state=MemberState.LEFT)
    await store.write(lambda tx: tx.members.put(left))
    assert await store.read(lambda tx: tx.members.alive(RUN)) == [second]
    assert await store.read(lambda tx: tx.members.get(RUN, first.member_id)) == left
    assert await store.read(lambda tx: tx.members.get(OTHER, first.member_id)) is None


async def test_owners_are_found_by_name_and_by_state(store: Store) -> None:
    owner = OwnerRecord(run_id=RUN, owner_id=OwnerId("w#0"), name="w", nonce="n", state=OwnerState.ALIVE, last_seen=1.0)
    answered = owner.changed(owner_id=OwnerId("w#1"), request_id="r", reply=b"\x00\x01")
    await store.write(lambda tx: tx.owners.put(owner))
    await store.write(lambda tx: tx.owners.put(answered))
    await store.write(lambda tx: tx.owners.put(owner.changed(state=OwnerState.SILENT)))

    def look(tx: Transaction) -> None:
        assert tx.owners.get(RUN, OwnerId("w#1")) == answered
        assert tx.owners.get(OTHER, OwnerId("w#1")) is None
        assert {o.owner_id for o in tx.owners.named(RUN, "w")} == {"w#0", "w#1"}
        assert tx.owners.alive(RUN) == [answered]

    await store.read(look)


async def test_positions_are_stored_and_deleted(store: Store) -> None:
    def write(tx: Transaction) -> None:
        tx.positions.put(RUN, 4, unsettled=1)
        tx.positions.put(RUN, 2, unsettled=1)
        tx.positions.put(RUN, 4, unsettled=0)
        tx.positions.put(RUN, 3, unsettled=0)
        tx.positions.delete(RUN, 3)

    await store.write(write)
    assert await store.read(lambda tx: tx.positions.all(RUN)) == [(2, 1), (4, 0)]
    assert await store.read(lambda tx: [tx.positions.get(RUN, at) for at in (2, 3, 4)]) == [1, None, 0]


async def test_history_keeps_its_order(store: Store) -> None:
    def move(name: str, note: str, was: GroupState | None = GroupState.DISPATCHED) -> MoveRecord:
        return MoveRecord(
            run_id=RUN,
            group_id=GroupId(name),
            at=1.0,
            from_state=was,
            to_state=GroupState.DISPATCHED,
            note=note,
            by="w#0",
        )

    moves = [move("b", "1", None), move("a", "2", None), move("b", "3"), move("a", "4")]

    def write(tx: Transaction) -> None:
        for one in moves:
            tx.history.add(one)

    await store.write(write)
    assert await store.read(lambda tx: tx.history.of_group(RUN, GroupId("b"))) == [moves[0], moves[2]]
    assert [m.note for m in await store.read(lambda tx: list(tx.history.each(RUN)))] == ["2", "4", "1", "3"]


async def test_moves_of_all_runs_are_numbered_together_and_read_in_pages(store: Store) -> None:
    def add(tx: Transaction, run_id: RunId, group_id: str) -> None:
        tx.history.add(
            MoveRecord(
                run_id=run_id,
                group_id=GroupId(group_id),
                at=1.0,
                from_state=None,
                to_state=GroupState.DISPATCHED,
                note="",
                by="test",
            )
        )

    assert await store.read(lambda tx: tx.history.last_number()) == 0
    for run_id, group_id in ((RUN, "a@0"), (OTHER, "x@0"), (RUN, "b@0")):
        await store.write(lambda tx, run_id=run_id, group_id=group_id: add(tx, run_id, group_id))  # type: ignore[misc]
    first = await store.read(lambda tx: tx.history.after(0, 2))
    assert [(run_id, group_id) for _, run_id, group_id in first] == [(RUN, "a@0"), (OTHER, "x@0")]
    rest = await store.read(lambda tx: tx.history.after(first[-1][0], 2))
    assert [(run_id, group_id) for _, run_id, group_id in rest] == [(RUN, "b@0")]
    assert await store.read(lambda tx: tx.history.last_number()) == rest[-1][0]


async def test_batches_are_read_in_order(store: Store) -> None:
    entries = tuple(
        BatchEntry(group_id=GroupId(name), sequence=at, payload_digest=name, oldest_version=None if at else 3)
        for at, name in enumerate(("z", "a", "m"))
    )
    manifest = BatchManifest(step=2, entries=entries, digest="d", is_last=True)
    record = BatchRecord(run_id=RUN, manifest=manifest, epoch=1, decided_at=5.0)
    first = record.changed(manifest=replace(manifest, step=1, entries=(), is_last=False))
    await store.write(lambda tx: tx.batches.put(record))
    await store.write(lambda tx: tx.batches.put(first))
    assert await store.read(lambda tx: tx.batches.get(RUN, 2)) == record
    assert await store.read(lambda tx: tx.batches.get(RUN, 3)) is None
    assert await store.read(lambda tx: list(tx.batches.each(RUN))) == [first, record]


async def test_a_batch_is_never_overwritten(store: Store) -> None:
    record = BatchRecord(run_id=RUN, manifest=BatchManifest(step=1, entries=(), digest="d"), epoch=1, decided_at=5.0)
    await store.write(lambda tx: tx.batches.put(record))
    with pytest.raises(Exception, match="batch"):
        await store.write(lambda tx: tx.batches.put(record))


async def test_steps_and_publications_are_kept_for_each_epoch(store: Store) -> None:
    step = StepRecord(run_id=RUN, step=1, epoch=1, digest="d", receipt=AckReceipt.ACKNOWLEDGED, at=1.0)
    again = step.changed(epoch=2, receipt=AckReceipt.DIVERGED)
    publication = PublicationRecord(
        run_id=RUN, id=PublicationId(0), epoch=1, step=3, digest="d", effective_step=3, registered_at=1.0
    )
    lost = publication.changed(id=PublicationId(1), effective_step=1, confirmed_at=2.0)

    def write(tx: Transaction) -> None:
        tx.steps.put(again)
        tx.steps.put(step)
        tx.steps.put(step.changed(step=2))
        tx.publications.put(publication)
        tx.publications.put(lost)

    await store.write(write)
    assert await store.read(lambda tx: tx.steps.of_step(RUN, 1)) == [step, again]
    assert [s.step for s in await store.read(lambda tx: tx.steps.page(RUN, limit=9))] == [1, 1, 2]
    assert await store.read(lambda tx: tx.publications.get(RUN, PublicationId(1))) == lost
    assert await store.read(lambda tx: tx.publications.page(RUN, limit=9)) == [publication, lost]
    assert await store.read(lambda tx: tx.publications.effective_from(RUN, 2)) == [publication]


async def test_drops_are_counted_by_kind(store: Store) -> None:
    for kind in ("stale", "filtered", "stale"):
        await store.write(lambda tx, kind=kind: tx.runs.count_drop(RUN, kind))  # type: ignore[misc]
    assert await store.read(lambda tx: tx.runs.drops(RUN)) == {"stale": 2, "filtered": 1}
    assert await store.read(lambda tx: tx.runs.drops(OTHER)) == {}


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

    heard: list[RunId] = []
    store.listen(heard.append)
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
    assert heard == []


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
    heard: list[RunId] = []
    store.listen(heard.append)
    await store.write(lambda tx: tx.announce(RUN))
    assert heard == [RUN]


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


async def test_groups_after_a_sequence_are_read_in_pages(store: Store) -> None:
    await put(
        store,
        group("c", 2, GroupState.DROPPED, outcome=b"{}"),
        group("a", 0, GroupState.DURABLE),
        group("b", 1),
        group("foreign", 0, run_id=OTHER),
    )

    def look(tx: Transaction) -> None:
        assert ids(tx.groups.page(RUN, limit=2)) == ["a", "b"]
        assert ids(tx.groups.page(RUN, start=2, limit=2)) == ["c"]
        assert tx.groups.page(RUN, start=3, limit=2) == []

    await store.read(look)


async def test_producers_are_listed_by_name(store: Store) -> None:
    first = ProducerRecord(run_id=RUN, name="b", weight=1.0, min_share=0.0, registered_at=1.0)
    await store.write(lambda tx: tx.producers.put(first))
    await store.write(lambda tx: tx.producers.put(first.changed(name="a", run_id=RUN)))
    await store.write(lambda tx: tx.producers.put(first.changed(credit=0.5, num_batched=3)))
    assert await store.read(lambda tx: tx.producers.all(RUN)) == [
        first.changed(name="a"),
        first.changed(credit=0.5, num_batched=3),
    ]
    assert await store.read(lambda tx: tx.producers.all(OTHER)) == []


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
