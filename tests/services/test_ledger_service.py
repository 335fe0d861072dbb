"""The ledger over loopback: a real server, a real client, a real file."""

import asyncio
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import aiohttp
import msgspec
import pytest

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.admission import GateState, MemberRole, Receipt, RunId
from rollbook.contracts.batch import AckReceipt, EncodedBatch, EndOfRun, PassSplit, TrainingBatch
from rollbook.contracts.errors import FencedError, RunError, TransientError
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupState
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.ports import BatchSource, GroupSink
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http import wire
from rollbook.ledger.service import Ledger, open_ledger
from rollbook.ledger.stores.registry import open_store, sqlite_url
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.ledger.tools.audit import audit_run
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, big_group, draws, group_of, outcome_of, settings
from tests.parts.ledger.service import open_memory_ledger, serving


class Service:
    """A running service and its clients."""

    def __init__(self, url: str, ledger: Ledger, stack: AsyncExitStack) -> None:
        self.url = url
        self.ledger = ledger
        self._stack = stack

    async def client(self, run_id: RunId = RUN, *, request_s: float = 10.0) -> LedgerClient:
        log = EventLog("test", echo=sys.stdout)
        return await self._stack.enter_async_context(open_ledger_client(self.url, run_id, request_s=request_s, log=log))


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        config = LedgerConfig(max_body_mb=2, max_queued_groups=4)
        url, ledger = await stack.enter_async_context(serving(tmp_path, config=config))
        await ledger.create_run(RUN, settings())
        yield Service(url, ledger, stack)


async def submit(client: LedgerClient, task: str, publication: int = 0) -> Receipt:
    group = group_of(task, (publication,))
    return (await client.submit(encode_group(group))).receipt


async def test_a_whole_run_over_http(service: Service) -> None:
    dispatcher, trainer = await service.client(), await service.client()
    sink: GroupSink = dispatcher
    source: BatchSource = trainer
    role = await source.take_role(restored_step=0)
    assert (role.epoch, role.last_decided, role.last_confirmed) == (1, 0, None)
    await source.confirm(await source.register(0, "w0"))
    owner = await sink.join("rollout")
    opened = await sink.open(owner, draws(0, 3), limit=8)
    assert (len(opened.grants), opened.taken, opened.gate) == (3, 3, GateState.OPEN)
    for grant in opened.grants:
        group = group_of(grant.task_id, (grant.admission_publication,))
        reply = await sink.submit(encode_group(group, attempt=grant.attempt))
        assert reply.receipt is Receipt.STORED
    await sink.exhausted()
    batch = await source.encoded_batch(1, wait_s=5)
    assert isinstance(batch, EncodedBatch)
    groups = batch.decode().groups
    assert [group.id for group in groups] == ["task0@0", "task1@0"]
    assert encode_group(groups[0]) == encode_group(group_of("task0", (0,)))
    assert await source.acknowledge(1, "w1") is AckReceipt.ACKNOWLEDGED
    await source.confirm(await source.register(1, "w1"))
    last = await source.encoded_batch(2, wait_s=5)
    assert isinstance(last, EncodedBatch)
    assert last.manifest.is_last
    await source.acknowledge(2, "w2")
    await source.checkpointed(2, oldest_kept=0)
    assert await source.encoded_batch(3, wait_s=5) is EndOfRun.END_OF_DATA
    await source.finish(EndOfRun.END_OF_DATA)
    status = await sink.status()
    assert (status.ended, status.durable_step, status.by_state["durable"]) == (True, 2, 3)
    assert (await sink.progress()).settled_below == 3
    assert (await service.ledger.read(lambda tx: audit_run(tx, RUN))).violations == ()


async def test_a_batch_comes_with_the_split_of_its_last_acknowledgement(service: Service) -> None:
    producer, trainer = await service.client(), await service.client()
    await trainer.take_role(restored_step=0)
    await trainer.confirm(await trainer.register(0, "w0"))
    owner = await producer.join("rollout")
    for grant in (await producer.open(owner, draws(0, 2), limit=8)).grants:
        await producer.submit(
            encode_group(group_of(grant.task_id, (grant.admission_publication,)), attempt=grant.attempt)
        )
    batch = await trainer.encoded_batch(1, wait_s=5)
    assert isinstance(batch, EncodedBatch)
    assert batch.split is None
    splits = [PassSplit(max_tokens=16_384), *(PassSplit.of(8192, checkpointing) for checkpointing in (True, 1, 12))]
    for epoch, split in enumerate(splits, start=1):
        await trainer.acknowledge(1, "w1", split=split)
        assert [step.split for step in await trainer.steps()] == splits[:epoch]
        await trainer.take_role(restored_step=0)
        again = await trainer.batch(1, wait_s=5)
        assert isinstance(again, TrainingBatch)
        assert again.split == split


async def test_open_waits_until_the_gate_opens(service: Service) -> None:
    dispatcher, trainer = await service.client(), await service.client()
    owner = await dispatcher.join("rollout")
    waiting = asyncio.ensure_future(dispatcher.open(owner, draws(0, 2), limit=2, wait_s=30))
    await asyncio.sleep(0.05)  # the request arrives before the gate opens
    await trainer.take_role(restored_step=0)
    await trainer.confirm(await trainer.register(0, "w0"))
    assert len((await waiting).grants) == 2


async def test_a_batch_waits_until_there_are_enough_groups(service: Service) -> None:
    producer, trainer = await service.client(), await service.client()
    await trainer.take_role(restored_step=0)
    await trainer.confirm(await trainer.register(0, "w0"))
    assert await trainer.batch(1, wait_s=0) is None
    waiting = asyncio.ensure_future(trainer.batch(1, wait_s=30))
    await submit(producer, "a")
    await submit(producer, "b")
    assert isinstance(await waiting, TrainingBatch)


async def test_a_waiting_trainer_is_fenced_when_it_is_replaced(service: Service) -> None:
    old, new = await service.client(), await service.client()
    await old.take_role(restored_step=0)
    waiting = asyncio.ensure_future(old.batch(1, wait_s=30))
    await asyncio.sleep(0.05)
    await new.take_role(restored_step=0)
    with pytest.raises(FencedError, match="epoch 1 was replaced by epoch 2"):
        await waiting


async def test_a_superseded_dispatcher_is_fenced(service: Service) -> None:
    old, new = await service.client(), await service.client()
    owner = await old.join("rollout")
    await new.join("rollout")
    with pytest.raises(FencedError, match="superseded"):
        await old.heartbeat(owner)


async def test_a_client_without_the_trainer_role_cannot_request_a_batch(service: Service) -> None:
    with pytest.raises(RunError, match="take_role first"):
        await (await service.client()).batch(1, wait_s=0)


async def test_the_error_for_an_unknown_run_names_it(service: Service) -> None:
    with pytest.raises(RunError, match=r"404.*no run 'nowhere'"):
        await (await service.client(RunId("nowhere"))).status()


async def test_a_run_is_created_over_http_and_fixed_settings_cannot_change(service: Service) -> None:
    client = await service.client(RunId("second"))
    await client.create_run(settings(per_step=2))
    await client.create_run(settings(per_step=2, in_flight=3))
    with pytest.raises(RunError, match="groups per step was 2 and would be 3"):
        await client.create_run(settings(per_step=3))


async def test_a_full_queue_is_reported_with_a_retry_time(service: Service) -> None:
    # Less than the time after which the client may try again.
    client = await service.client(request_s=0.9)
    for task in ("a", "b", "c", "d"):
        assert await submit(client, task, -1) is Receipt.STORED
    with pytest.raises(TransientError, match=r"429.*the queue is full \(4 groups") as refused:
        await submit(client, "e", -1)
    assert refused.value.retry_after_s == 1.0


async def test_a_submission_is_retried_until_the_queue_has_room(service: Service) -> None:
    producer, trainer = await service.client(request_s=30), await service.client()
    for task in ("a", "b", "c", "d"):
        await submit(producer, task, -1)
    waiting = asyncio.ensure_future(submit(producer, "e", -1))
    await trainer.take_role(restored_step=0)
    await trainer.batch(1, wait_s=0)
    assert await waiting is Receipt.STORED


async def test_a_group_that_is_too_large_is_rejected(service: Service) -> None:
    client = await service.client()
    group = big_group("big", samples=64, tokens=4_000, publication=-1)
    with pytest.raises(RunError, match="413"):
        await client.submit(encode_group(group))


async def test_large_groups_of_concurrent_producers_are_stored_unchanged(tmp_path: Path) -> None:
    groups = {f"g{n}@0": big_group(f"g{n}", publication=-1) for n in range(32)}
    log = EventLog("test", echo=sys.stdout)
    async with serving(tmp_path) as (url, ledger):
        await ledger.create_run(RUN, settings(per_step=32))
        async with open_ledger_client(url, RUN, request_s=30, log=log) as client:
            replies = await asyncio.gather(
                *(client.submit(encode_group(g)) for g in [*groups.values(), *groups.values()])
            )
            assert sorted(reply.receipt for reply in replies) == [Receipt.ALREADY_STORED] * 32 + [Receipt.STORED] * 32
            await client.take_role(restored_step=0)
            batch = await client.batch(1, wait_s=5)
        assert isinstance(batch, TrainingBatch)
        assert {g.id for g in batch.groups} == set(groups)
        assert all(encode_group(g) == encode_group(groups[g.id]) for g in batch.groups)


async def post(url: str, body: bytes) -> tuple[int, dict[str, str]]:
    headers = {"Content-Type": wire.CONTENT_TYPE}
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as response:
        return response.status, await response.json()


async def test_the_error_for_an_invalid_body_names_the_field(service: Service) -> None:
    url = f"{service.url}/v1/runs/{RUN}/join"
    status, error = await post(url, b"\xc1 no message")
    assert (status, error["kind"]) == (400, "DecodeError")
    status, error = await post(url, msgspec.msgpack.encode({"owner_name": 7, "nonce": "n"}))
    assert status == 422
    assert "$.owner_name" in error["message"]
    status, error = await post(url, msgspec.msgpack.encode({"owner_name": "a", "nonce": "n", "typo": 1}))
    assert status == 422
    assert "typo" in error["message"]


async def test_a_damaged_payload_is_rejected(service: Service) -> None:
    encoded = encode_group(group_of("a", (-1,)))
    damaged = msgspec.structs.replace(encoded, payload=encoded.payload[:-1] + b"\x7f")
    client = await service.client()
    with pytest.raises(RunError, match="damaged"):
        await client.submit(damaged)
    assert (await service.ledger.status(RUN)).opened == 0


async def test_health_and_status_can_be_read_as_json(service: Service) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{service.url}/health") as response:
            assert await response.json() == {"status": "ok", "runs": 1}
        async with session.get(f"{service.url}/v1/runs/{RUN}/status") as response:
            status = await response.json()
    assert (status["run_id"], status["gate"], status["opened"]) == (RUN, "no_policy", 0)


async def test_filtered_and_closed_groups_keep_their_reason(service: Service) -> None:
    dispatcher, trainer = await service.client(), await service.client()
    await trainer.take_role(restored_step=0)
    await trainer.confirm(await trainer.register(0, "w0"))
    owner = await dispatcher.join("rollout")
    await dispatcher.open(owner, draws(0, 3), limit=3)
    group = group_of("task0")
    filtered = DropReason(DropKind.FILTERED, "constant reward: 1.0")
    await dispatcher.submit(encode_group(group, drop=filtered))
    await dispatcher.close(GroupId("task1@0"), DropReason(DropKind.INVALID, "8 of 8"), outcome=outcome_of(group))
    await dispatcher.release(GroupId("task2@0"), attempt=1, cause="worker died")
    dropped = await service.ledger.groups(RUN, GroupState.DROPPED)
    assert [g.drop_reason for g in dropped] == ["filtered: constant reward: 1.0", "invalid: 8 of 8"]
    assert dropped[0].outcome is not None
    stored = await service.ledger.read(lambda tx: tx.payloads.get(RUN, GroupId("task0@0")))
    assert stored == encode_group(group).payload
    assert (await service.ledger.status(RUN)).counts.waiting == 1


async def test_long_polls_are_answered_when_the_service_stops(tmp_path: Path) -> None:
    log = EventLog("test", echo=sys.stdout)
    async with AsyncExitStack() as stack:
        async with serving(tmp_path) as (url, ledger):
            await ledger.create_run(RUN, settings())
            client = await stack.enter_async_context(open_ledger_client(url, RUN, request_s=1, log=log))
            await client.take_role(restored_step=0)
            waiting = asyncio.ensure_future(client.batch(1, wait_s=60))
            await asyncio.sleep(0.05)
        assert await waiting is None


async def test_telemetry_of_another_machine_is_appended_to_the_run_directory_once(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    log = EventLog("test", echo=sys.stdout)
    async with AsyncExitStack() as stack:
        url, ledger = await stack.enter_async_context(serving(tmp_path / "a", run_directory=tmp_path / "run"))
        await ledger.create_run(RUN, settings())
        client = await stack.enter_async_context(open_ledger_client(url, RUN, log=log))
        for _ in range(2):
            await client.ship_telemetry("logs/b.jsonl", b"one\n", stream="s", start=0)
        await client.ship_telemetry("logs/b.jsonl", b"two\n", stream="s", start=4)
        assert (tmp_path / "run" / "logs" / "b.jsonl").read_text() == "one\ntwo\n"
        with pytest.raises(RunError, match="not the name of a telemetry file"):
            await client.ship_telemetry("../token", b"x", stream="s", start=0)


async def test_leases_of_a_silent_dispatcher_expire() -> None:
    clock = ManualClock()
    async with open_memory_ledger(clock=clock) as ledger:
        await ledger.create_run(RUN, settings(ttl_s=10))
        role = await ledger.take_role(RUN, restored_step=0)
        publication = await ledger.register(RUN, 0, "w0", epoch=role.epoch)
        await ledger.confirm(RUN, publication, epoch=role.epoch)
        owner = await ledger.join(RUN, "rollout")
        await ledger.open(RUN, owner, draws(0, 2), limit=2)
        while (await ledger.status(RUN)).counts.waiting != 2:
            await clock.advance(0.5)
            await asyncio.sleep(0.01)
        history = await ledger.read(lambda tx: tx.history.of_group(RUN, GroupId("task0@0")))
        assert history[-1].note == "dispatcher rollout#0 timed out"


async def test_leases_are_extended_after_every_stall_of_the_store_that_was_reported(tmp_path: Path) -> None:
    clock, log = ManualClock(), EventLog("test", tmp_path / "log", echo=sys.stdout)
    is_over = threading.Event()
    async with (
        open_store(sqlite_url(tmp_path / "store")) as store,
        open_ledger(store, LedgerConfig(), clock=clock, log=log) as ledger,
    ):
        await ledger.create_run(RUN, settings(ttl_s=10))
        await ledger.open(RUN, await ledger.join(RUN, "rollout"), draws(0, 2), limit=2)
        stalled = asyncio.ensure_future(store.write(lambda _: is_over.wait(60)))
        for event in ("ledger.store_stalled", "ledger.leases_extended"):
            async with asyncio.timeout(60):
                while event not in (tmp_path / "log").read_text(encoding="utf-8"):
                    await clock.advance(0.5)  # at the report, exactly as long as a stall has passed
                    await asyncio.sleep(0.02)
            is_over.set()
            await stalled
            for _ in range(5):  # the waiting check ends before the clock moves on
                await store.write(lambda _: None)
    log.close()


async def test_a_damaged_row_of_one_run_does_not_keep_leases_of_another_from_ending(tmp_path: Path) -> None:
    clock = ManualClock()
    async with serving(tmp_path, clock=clock) as (_, ledger):
        for name in ("damaged", "intact"):
            await ledger.create_run(RunId(name), settings())
            await ledger.join_member(
                RunId(name), name="m", role=MemberRole.POLICY, node="n", address="", lease_s=5, nonce=name
            )
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as db, db:
            db.execute("UPDATE members SET role = 'odd' WHERE run_id = 'damaged'")
        async with asyncio.timeout(30):
            while await ledger.members(RunId("intact")):
                await clock.advance(0.5)


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", id="a web page"),
        pytest.param(b"220 mail.example ESMTP\r\n", id="not HTTP"),
    ],
)
async def test_a_service_that_is_not_a_ledger_is_reported_and_not_taken_for_a_cancellation(response: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with open_ledger_client(url, RUN, request_s=1) as client:
            with pytest.raises(RunError, match=f"{url}: .*check the address"):
                await client.status()
            with pytest.raises(RunError, match=f"{url}: .*check the address"):
                await submit(client, "task0")
