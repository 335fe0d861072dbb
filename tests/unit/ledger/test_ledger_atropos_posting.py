"""Posts on their way into the store: looked at by whoever stores them, each by itself."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.admission import RunId
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.models import Refusal
from rollbook.ledger.atropos.posts import Incoming, Post
from rollbook.ledger.atropos.scored_data import read_group
from rollbook.ledger.atropos.service import AtroposService
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.stores.memory import MemoryStore
from rollbook.telemetry.events import EventLog

RUN = RunId("atropos")


def body_of(token: int) -> bytes:
    return json.dumps({"tokens": [[token, 5]], "masks": [[-100, 5]], "scores": [0.5]}).encode()


def reader_of(body: bytes) -> Callable[[], Post]:
    def read() -> Post:
        group = read_group(body)
        return Post(digest=group.digest, groups=(group,), is_list=False)

    return read


def desk_on(store: MemoryStore, **limits: Any) -> AtroposService:
    config = AtroposConfig(hold_s=0.05)
    return AtroposService(
        RUN, store=store, config=config, limits=LedgerConfig(**limits), clock=SystemClock(), log=EventLog("test")
    )


async def post(desk: AtroposService, incoming: Incoming) -> dict[str, Any]:
    async with desk.posted(incoming) as answer:
        return answer


def num_queued(store: MemoryStore) -> int:
    return store.read_now(lambda tx: len(tx.groups.queued(RUN)))


def test_a_post_is_read_when_it_is_taken_and_not_kept_afterwards() -> None:
    reads: list[int] = []
    read = reader_of(body_of(1))

    def counted() -> Post:
        reads.append(1)
        return read()

    incoming = Incoming(counted)
    assert not reads
    incoming.look()
    incoming.look()
    found = incoming.take()
    assert len(reads) == 1
    incoming.give_back(found)
    assert incoming.take() is found
    assert incoming.take() == found, "read anew: whoever stores it may have to begin again"
    assert len(reads) == 2


def test_what_cannot_be_read_is_refused_as_often_as_it_is_taken() -> None:
    incoming = Incoming(reader_of(b"[1, 2"))
    incoming.look()
    for _ in range(2):
        with pytest.raises(Refusal):
            incoming.take()


async def test_one_that_cannot_be_read_harms_none_of_those_that_are_stored_with_it() -> None:
    def broken() -> Post:
        raise MemoryError("of all things")

    store = MemoryStore()
    desk = desk_on(store)
    reads = [reader_of(body_of(1)), reader_of(b"{"), broken, reader_of(body_of(2))]
    answers = await asyncio.gather(*(post(desk, Incoming(read)) for read in reads), return_exceptions=True)
    assert answers[0] == answers[3] == {"status": "received"}
    assert isinstance(answers[1], Refusal)
    assert isinstance(answers[2], MemoryError)
    assert num_queued(store) == 2


async def test_a_post_that_finds_no_room_is_read_once_however_often_it_is_tried() -> None:
    store = MemoryStore()
    desk = desk_on(store, max_queued_groups=1)
    await post(desk, Incoming(reader_of(body_of(1))))
    reads: list[int] = []

    def counted() -> Post:
        reads.append(1)
        return reader_of(body_of(2))()

    waiting = asyncio.create_task(post(desk, Incoming(counted)))
    for _ in range(3):
        await asyncio.sleep(0.005)
        desk._bell.ring(RUN)
    with pytest.raises(Exception, match="groups are queued"):
        await waiting
    assert len(reads) == 1


async def test_a_client_that_goes_in_the_moment_its_post_is_stored_may_send_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    desk = desk_on(store)
    loop = asyncio.get_running_loop()

    class Cancelling(asyncio.Future[Any]):
        def set_result(self, result: Any) -> None:
            super().set_result(result)
            sending.cancel()

    with monkeypatch.context() as patched:
        patched.setattr(loop, "create_future", lambda: Cancelling(loop=loop))
        sending = asyncio.create_task(post(desk, Incoming(reader_of(body_of(1)))))
        await asyncio.wait([sending])
    assert sending.cancelled()
    assert num_queued(store) == 1
    assert await post(desk, Incoming(reader_of(body_of(1)))) == {"status": "received"}
    assert num_queued(store) == 1, "a repetition is answered, not stored"
    await post(desk, Incoming(reader_of(body_of(1))))
    assert num_queued(store) == 2, "and sent once more on purpose, it is another group"
