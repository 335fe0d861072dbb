"""Conformance tests of stores: groups and their payloads."""

import pytest

from rollbook.contracts.admission import OwnerId
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.policy import PublicationId
from rollbook.ledger.records import (
    Origin,
)
from rollbook.ledger.store import Store, Transaction
from tests.parts.ledger.groups import RUN
from tests.parts.ledger.records import OTHER, group, ids, put


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
        assert [ids(some) for some in tx.groups.checked(RUN, pytest.fail)] == [["b", "c", "a"]]
        some_ids = [GroupId("c"), GroupId("x")]
        assert [ids(some) for some in tx.groups.checked(RUN, pytest.fail, some_ids)] == [["c"]]

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
        requested = [GroupId(name) for name in ("g3", "absent", "new", *(f"g{n}" for n in range(20)))]
        found = tx.groups.find(RUN, requested)
        assert all(found[name].group_id == name for name in found)
        return sorted(record.sequence for record in found.values())

    assert await store.write(work) == [*range(20), 50]
    assert await store.read(lambda tx: tx.groups.find(RUN, [])) == {}


async def test_several_payloads_are_returned_in_the_requested_order(store: Store) -> None:
    names = [GroupId(f"g{number}") for number in range(20)]
    for name in names:
        await store.write(lambda tx, name=name: tx.payloads.put(RUN, name, name.encode() * 9))  # type: ignore[misc]
    requested = [names[7], GroupId("absent"), *reversed(names), names[7]]
    found = await store.read(lambda tx: [body and bytes(body) for body in tx.payloads.get_many(RUN, requested)])
    assert found == [name.encode() * 9 if name in names else None for name in requested]
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


async def test_the_payload_of_a_first_part_is_kept_while_samples_of_its_group_are_missing(store: Store) -> None:
    await put(
        store,
        group("a", 0, GroupState.DURABLE, has_payload=True, release_step=1),
        group("a/2", 0, GroupState.DROPPED, part=2, has_payload=True, release_step=1),
        group("a/3", 0, GroupState.DISPATCHED, part=3),
        group("b", 1, GroupState.DROPPED, has_payload=True, release_step=1),
        group("b/2", 1, GroupState.QUEUED, part=2, has_payload=True, arrival=0),
    )
    found = await store.read(lambda tx: tx.groups.releasable(RUN, 1, 10, dropped_only=False))
    assert sorted(ids(found)) == ["a/2", "b"]
    await put(store, group("a/3", 0, GroupState.DROPPED, part=3))
    assert sorted(ids(await store.read(lambda tx: tx.groups.releasable(RUN, 1, 10, dropped_only=False)))) == [
        "a",
        "a/2",
        "b",
    ]


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


async def test_a_page_ends_with_the_last_part_of_a_group(store: Store) -> None:
    await put(store, group("a", 0), group("b", 1), group("b#2", 1, part=2), group("b#3", 1, part=3), group("c", 2))

    def look(tx: Transaction) -> None:
        for limit, expected in ((1, ["a"]), (2, ["a", "b", "b#2", "b#3"]), (3, ["a", "b", "b#2", "b#3"])):
            assert ids(tx.groups.page(RUN, limit=limit)) == expected
            assert [found for (found,) in tx.groups.values(RUN, ["group_id"], limit=limit)] == expected
        assert [found for (found,) in tx.groups.values(RUN, ["group_id"], start=2, limit=9)] == ["c"]

    await store.read(look)
