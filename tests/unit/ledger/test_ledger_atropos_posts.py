"""Posts of environments: parsed in the thread that stores them, stored independently of each other, and stored once."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import TransientError
from rollbook.contracts.group import GroupId
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.contracts.group_codec import decode_payload
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


async def test_a_post_after_a_reset_whose_response_is_lost_is_stored_once() -> None:
    async with opened() as (service, store):
        await post(service, Incoming(reader_of(body_of(1))))
        await service.reset()
        with pytest.raises(ConnectionResetError):
            async with service.posted(Incoming(reader_of(body_of(1)))):
                raise ConnectionResetError
        await post(service, Incoming(reader_of(body_of(1))))
        assert await num_queued(store) == 1


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


VOCABULARY_SIZE = 8
ODD_NUMBERS = st.sampled_from([0.0, -0.5, 1.0, 1e-9, -1e30, 1e39, float("nan"), float("inf"), float("-inf")])
ODD_IDS = st.sampled_from([0, 7, 8, 99, -1, -100, 2**31, 2**32 + 3, 2**63, -(2**63)])


@st.composite
def odd_posts(draw: st.DrawFn) -> dict[str, Any]:
    """A group that nearly fits the run: each field is mostly right, and sometimes not."""
    rows = draw(st.lists(st.lists(st.integers(0, VOCABULARY_SIZE - 1) | ODD_IDS, max_size=4), max_size=3))
    marks = [[draw(st.sampled_from([token, -100, token, 1])) for token in row] for row in rows]
    group: dict[str, Any] = {
        "tokens": rows,
        "masks": marks[: draw(st.sampled_from([3, 3, 3, 1]))],
        "scores": draw(st.lists(st.floats(-1, 1) | ODD_NUMBERS, min_size=max(0, len(rows) - 1), max_size=len(rows))),
    }
    if draw(st.booleans()):
        logprobs = [[draw(st.floats(-9, 0) | ODD_NUMBERS) for _ in row] for row in rows]
        group["inference_logprobs"] = [row[: draw(st.sampled_from([4, 4, 1]))] for row in logprobs]
    return group


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(groups=st.lists(odd_posts(), min_size=10, max_size=20), needs_logprobs=st.booleans())
async def test_whatever_is_posted_to_a_run_of_a_native_trainer_is_refused_or_can_be_trained(
    groups: list[dict[str, Any]], needs_logprobs: bool
) -> None:
    limits = TrainingLimits(vocabulary_size=VOCABULARY_SIZE, needs_logprobs=needs_logprobs)
    usable = {"tokens": [[1, 7]], "masks": [[-100, 7]], "scores": [0.5], "inference_logprobs": [[0.0, -0.5]]}
    async with open_memory_store() as store, open_atropos_service(service_on(store, trainable=limits)) as service:
        for group in (usable, *groups):
            before = await num_queued(store)
            try:
                await post(service, Incoming(reader_of(json.dumps(group).encode())))
            except InvalidBodyError:
                assert group is not usable
                assert await num_queued(store) == before
        payloads = await store.read(
            lambda tx: [tx.payloads.get(RUN, queued.group_id) for queued in tx.groups.queued(RUN)]
        )
        for payload in payloads:
            assert payload is not None
            samples = decode_payload(payload, GroupId("post@0")).samples
            assert all(math.isfinite(sample.reward) for sample in samples if sample.reward is not None)
            rows = [row for sample in samples for row in sample.sequences]
            assert all(0 <= token < VOCABULARY_SIZE for row in rows for token in row.token_ids.tolist())
            trained = [row.logprobs[row.loss_mask] for row in rows]
            assert sum(len(logprobs) for logprobs in trained) > 0
            known = [value for logprobs in trained for value in logprobs.tolist() if not math.isnan(value)]
            assert all(math.isfinite(value) and value < 1e-3 for value in known)
            assert not needs_logprobs or len(known) == sum(len(logprobs) for logprobs in trained)
