"""Posts of environments: parsed in the thread that stores them, stored independently of each other, and stored once."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import TransientError
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.models import InvalidBodyError, Registration
from rollbook.ledger.atropos.posts import Incoming, Post, forget_unconfirmed
from rollbook.ledger.atropos.rules import SERVING_LEASE_S
from rollbook.ledger.atropos.scored_data import read_group
from rollbook.ledger.atropos.service import AtroposService, open_atropos_service
from rollbook.ledger.atropos.tables import AtroposTables
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.rules.groups import QueueFullError
from rollbook.ledger.store import Store
from rollbook.ledger.stores.sqlite.store import open_memory_store
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.atropos import registration

RUN = RunId("atropos")
HOLD_S = 20.0


def body_of(token: int) -> bytes:
    return json.dumps({"tokens": [[token, 5]], "masks": [[-100, 5]], "scores": [0.5]}).encode()


def reader_of(body: bytes) -> Callable[[], Post]:
    def read() -> Post:
        group = read_group(body)
        return Post(digest=group.digest, groups=(group,), is_list=False)

    return read


def service_on(
    store: Store, clock: ManualClock | None = None, *, trainable: TrainingLimits | None = None, **limits: Any
) -> AtroposService:
    return AtroposService(
        RUN,
        store=store,
        config=AtroposConfig(hold_s=HOLD_S),
        limits=LedgerConfig(**limits),
        trainable=trainable or TrainingLimits(),
        clock=clock or ManualClock(),
        log=EventLog("test"),
    )


@asynccontextmanager
async def opened(clock: ManualClock | None = None, **limits: Any) -> AsyncIterator[tuple[AtroposService, Store]]:
    async with (
        open_memory_store() as store,
        open_atropos_service(service_on(store, clock, **limits)) as service,
    ):
        yield service, store


async def post(service: AtroposService, incoming: Incoming) -> dict[str, Any]:
    async with service.posted(incoming) as answer:
        return answer


async def num_queued(store: Store) -> int:
    return await store.read(lambda tx: len(tx.groups.queued(RUN)))


def test_a_post_is_parsed_once_and_freed_when_it_is_taken() -> None:
    parses: list[int] = []
    read = reader_of(body_of(1))

    def counted() -> Post:
        parses.append(1)
        return read()

    incoming = Incoming(counted)
    assert not parses
    incoming.parse()
    incoming.parse()
    found = incoming.take()
    assert len(parses) == 1
    incoming.give_back(found)
    assert incoming.take() is found
    assert incoming.take() == found, "parsed again: a transaction may have to be repeated"
    assert len(parses) == 2


def test_an_unreadable_post_is_refused_every_time_it_is_taken() -> None:
    incoming = Incoming(reader_of(b"[1, 2"))
    incoming.parse()
    for _ in range(2):
        with pytest.raises(InvalidBodyError):
            incoming.take()


async def test_an_unreadable_post_does_not_affect_the_others_of_its_transaction() -> None:
    def broken() -> Post:
        raise MemoryError("on purpose")

    async with opened() as (service, store):
        reads = [reader_of(body_of(1)), reader_of(b"{"), broken, reader_of(body_of(2))]
        answers = await asyncio.gather(*(post(service, Incoming(read)) for read in reads), return_exceptions=True)
        assert answers[0] == answers[3] == {"status": "received"}
        assert isinstance(answers[1], InvalidBodyError)
        assert isinstance(answers[2], MemoryError)
        assert await num_queued(store) == 2


async def test_a_post_that_waits_for_a_full_queue_is_parsed_once_and_refused_after_the_hold_time() -> None:
    clock = ManualClock()
    async with opened(clock, max_queued_groups=1) as (service, store):
        await post(service, Incoming(reader_of(body_of(1))))
        parses: list[int] = []

        def counted() -> Post:
            parses.append(1)
            return reader_of(body_of(2))()

        waiting = asyncio.create_task(post(service, Incoming(counted)))
        for _ in range(3):
            await store.write(lambda tx: tx.announce(RUN))
            await store.read(lambda tx: None)
        assert not waiting.done()
        while not waiting.done():
            await clock.advance(HOLD_S)
            await store.read(lambda tx: None)
        with pytest.raises(QueueFullError, match="the queue is full"):
            await waiting
        assert len(parses) == 1


async def test_a_client_that_disconnects_when_its_post_is_stored_may_send_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as (service, store):
        loop = asyncio.get_running_loop()
        create_future = loop.create_future

        class CancelsSender(asyncio.Future[Any]):
            def set_result(self, result: Any) -> None:
                super().set_result(result)
                sending.cancel()

        with monkeypatch.context() as patched:

            def future() -> asyncio.Future[Any]:
                return CancelsSender(loop=loop) if asyncio.current_task() is sending else create_future()

            patched.setattr(loop, "create_future", future)
            sending = asyncio.create_task(post(service, Incoming(reader_of(body_of(1)))))
            await asyncio.wait([sending])
        assert sending.cancelled()
        assert await num_queued(store) == 1
        assert await post(service, Incoming(reader_of(body_of(1)))) == {"status": "received"}
        assert await num_queued(store) == 1, "a repetition is answered, not stored"
        await post(service, Incoming(reader_of(body_of(1))))
        assert await num_queued(store) == 2, "sent again after a delivered response, it is another group"


async def with_groups(service: AtroposService, *tokens: int) -> None:
    """Register a trainer that takes one sequence in a batch, and post groups of one sequence."""
    await service.register(Registration.model_validate(registration(1)))
    for token in tokens:
        await post(service, Incoming(reader_of(body_of(token))))


async def step_of(service: AtroposService) -> int | None:
    """Take a batch and send it completely."""
    async with service.batch() as handed:
        return None if handed is None else handed.manifest.step


async def test_a_batch_that_one_front_end_sends_is_not_sent_by_another() -> None:
    clock = ManualClock()
    async with opened(clock) as (one, store), open_atropos_service(service_on(store, clock)) as other:
        await with_groups(one, 1, 2)
        async with one.batch() as handed:
            assert handed is not None
            assert handed.manifest.step == 1
            assert await step_of(other) is None
        assert await step_of(other) == 2
        assert await step_of(one) is None


async def test_a_batch_whose_sending_failed_is_sent_by_another_front_end() -> None:
    clock = ManualClock()
    async with opened(clock) as (one, store), open_atropos_service(service_on(store, clock)) as other:
        await with_groups(one, 1, 2)
        with pytest.raises(ConnectionResetError):
            async with one.batch():
                raise ConnectionResetError
        assert await step_of(other) == 1


async def test_a_front_end_that_stood_still_cannot_end_its_batch_after_another_has_taken_it() -> None:
    clock = ManualClock()
    async with opened(clock) as (one, store), open_atropos_service(service_on(store, clock)) as other:
        await with_groups(one, 1, 2)
        async with one.batch() as handed:
            assert handed is not None
            await one.renew_serving(handed)
            clock.jump(SERVING_LEASE_S + 1)
            assert await step_of(other) == 1
            with pytest.raises(TransientError, match="batch 1 was taken over"):
                await one.renew_serving(handed)
        assert await step_of(one) == 2


async def test_posts_that_were_never_confirmed_are_deleted_after_the_retry_window() -> None:
    clock = ManualClock()
    async with opened(clock) as (service, store):
        with pytest.raises(ConnectionResetError):
            async with service.posted(Incoming(reader_of(body_of(1)))):
                raise ConnectionResetError
        digest = read_group(body_of(1)).digest

        async def is_known() -> bool:
            return await store.read(lambda tx: AtroposTables(tx).unconfirmed(RUN, digest)) is not None

        assert await is_known()
        oldest = clock.wall()
        await service._write(lambda run_tx: forget_unconfirmed(run_tx, oldest))
        assert await is_known()
        await service._write(lambda run_tx: forget_unconfirmed(run_tx, oldest + 1))
        assert not await is_known()


async def test_a_run_of_a_native_trainer_refuses_a_post_outside_of_its_limits() -> None:
    async with open_memory_store() as store:
        limits = TrainingLimits(vocabulary_size=8, needs_logprobs=False)
        async with open_atropos_service(service_on(store, trainable=limits)) as service:
            with pytest.raises(InvalidBodyError, match="token id 99 is outside of the vocabulary of 8"):
                await post(service, Incoming(reader_of(body_of(99))))
            with pytest.raises(InvalidBodyError, match="negative token id"):
                await post(service, Incoming(reader_of(body_of(-1))))
            await post(service, Incoming(reader_of(body_of(7))))
            assert await num_queued(store) == 1
