"""Conformance tests of stores: the records of runs, members, owners, moves, batches, steps and producers."""

from dataclasses import replace

import pytest

from rollbook.contracts.admission import ActionKind, MemberId, MemberRole, OwnerId, RunId
from rollbook.contracts.batch import AckReceipt, BatchEntry, BatchManifest, EndOfRun, PassSplit
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.policy import PublicationId
from rollbook.ledger.records import (
    ActionRecord,
    BatchRecord,
    MemberRecord,
    MemberState,
    MoveRecord,
    OwnerRecord,
    OwnerState,
    ProducerRecord,
    PublicationRecord,
    RunRecord,
    StepRecord,
)
from rollbook.ledger.store import Store, Transaction
from tests.parts.ledger.groups import RUN, settings
from tests.parts.ledger.records import OTHER


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


async def test_actions_are_found_by_number_nonce_and_target(store: Store) -> None:
    first = ActionRecord(
        run_id=RUN,
        number=0,
        kind=ActionKind.QUARANTINE,
        author="Ada",
        at=1.5,
        target="task",
        sample=None,
        note="",
        nonce="a",
    )
    second = first.changed(number=1, kind=ActionKind.ANNOTATE, target="task@0", sample=2, note="odd", nonce="b")
    third = first.changed(number=2, kind=ActionKind.QUARANTINE, target="other", nonce="c")
    for action in (first, second, third, third.changed(number=3, kind=ActionKind.READMIT, nonce="d")):
        await store.write(lambda tx, action=action: tx.actions.add(action))  # type: ignore[misc]

    def look(tx: Transaction) -> None:
        assert tx.actions.page(RUN, start=1, limit=2) == [second, third]
        assert tx.actions.by_nonce(RUN, "b") == second
        assert tx.actions.by_nonce(OTHER, "b") is None
        assert tx.actions.of_target(RUN, "task@0") == [second]
        assert tx.actions.quarantined(RUN) == {"task"}
        assert tx.actions.quarantined(OTHER) == frozenset()

    await store.read(look)


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
            at=float(note),
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
    damage: list[str] = []
    found = await store.read(lambda tx: tx.history.checked(RUN, damage.append, [GroupId("a"), GroupId("b")]))
    assert found == {
        name: [(m.at, m.from_state, m.to_state) for m in some]
        for name, some in (("a", (moves[1], moves[3])), ("b", (moves[0], moves[2])))
    }
    assert damage == []
    assert await store.read(lambda tx: sorted(tx.history.without_row(RUN))) == ["a", "b"]
    assert await store.read(lambda tx: tx.history.without_row(RUN, [GroupId("b"), GroupId("c")])) == ["b"]


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

    assert await store.read(lambda tx: tx.history.last_number(RUN)) == 0
    for run_id, group_id in ((RUN, "a@0"), (OTHER, "x@0"), (RUN, "b@0")):
        await store.write(lambda tx, run_id=run_id, group_id=group_id: add(tx, run_id, group_id))  # type: ignore[misc]
    first = await store.read(lambda tx: tx.history.after(0, 2))
    assert [(run_id, group_id) for _, run_id, group_id in first] == [(RUN, "a@0"), (OTHER, "x@0")]
    rest = await store.read(lambda tx: tx.history.after(first[-1][0], 2))
    assert [(run_id, group_id) for _, run_id, group_id in rest] == [(RUN, "b@0")]
    assert await store.read(lambda tx: tx.history.last_number(RUN)) == rest[-1][0]
    assert await store.read(lambda tx: tx.history.last_number(OTHER)) == first[-1][0]


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
    split = PassSplit.of(8192, 12)
    again = step.changed(epoch=2, receipt=AckReceipt.DIVERGED, split=split)
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
