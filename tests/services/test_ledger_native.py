"""A ledger service on its own: startup, tokens, producers, events, metrics, audit, and the blocking client."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web

from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.admission import LedgerStatus, PartReceipt, Receipt, RunId, SampleCounts
from rollbook.contracts.batch import AckReceipt, TrainingBatch
from rollbook.contracts.errors import FencedError, RunError, TransientError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupState
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.trajectory import RolloutSample
from rollbook.ledger.client.blocking import SyncLedgerClient, audit_at, explain_at, open_sync_ledger_client
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.config import LedgerConfig, LedgerServerConfig
from rollbook.ledger.http.app import LedgerService
from rollbook.ledger.serve import allow_many_connections, serve_ledger
from rollbook.ledger.stores.registry import sqlite_url
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, big_group, draws, group_of, outcome_of, part_of, settings
from tests.parts.ledger.http import Caller, submission

LOG = EventLog("test", echo=sys.stdout)


@asynccontextmanager
async def running(directory: Path, **changes: object) -> AsyncIterator[str]:
    """Runs `serve_ledger` until the block ends."""
    ready = directory / "ready"
    config = LedgerServerConfig.model_validate(
        {"store": sqlite_url(directory / "ledger"), "port": 0, "ready_file": ready, "drain_s": 1.0, **changes}
    )
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_ledger(config, log=LOG, stop=stop), name="ledger")
        while not ready.exists():  # noqa: ASYNC110 - the file is the only signal
            await asyncio.sleep(0.01)
        try:
            yield ready.read_text(encoding="utf-8").strip()
        finally:
            stop.set()
    assert not ready.exists()


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with running(tmp_path) as found:
        yield found


@asynccontextmanager
async def client_of(url: str, run_id: RunId = RUN, *, is_compressed: bool = False) -> AsyncIterator[LedgerClient]:
    async with open_ledger_client(url, run_id, request_s=20.0, log=LOG, is_compressed=is_compressed) as client:
        yield client


async def started(client: LedgerClient, *, per_step: int = 2) -> None:
    await client.create_run(settings(per_step=per_step))
    await client.take_role(restored_step=0)
    await client.confirm(await client.register(0, "w0"))


async def send(client: LedgerClient, task: str, producer: str | None = None) -> Receipt:
    group = group_of(task, (-1,))
    return (await client.submit(encode_group(group, producer=producer))).receipt


async def test_a_request_during_startup_waits_for_the_store(tmp_path: Path) -> None:
    sock = listening_socket("127.0.0.1", 0)
    config = LedgerServerConfig(store=sqlite_url(tmp_path), port=0, drain_s=1.0)
    stop = asyncio.Event()
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        early = group.create_task(Caller(session, url_of(sock)).call("GET", "//health"))
        await asyncio.sleep(0.05)
        assert not early.done()
        group.create_task(serve_ledger(config, log=LOG, stop=stop, sock=sock))
        assert (await early).status == 200
        stop.set()
    sock.close()


async def test_a_ledger_without_tokens_does_not_start_off_loopback(tmp_path: Path) -> None:
    config = LedgerServerConfig(store=sqlite_url(tmp_path), host="0.0.0.0", port=0)
    with pytest.raises(RunError, match="set a token for each role"):
        await serve_ledger(config, log=LOG, stop=asyncio.Event())


async def test_the_routes_of_a_dialect_require_a_token(tmp_path: Path) -> None:
    def dialect(service: LedgerService) -> None:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(text="hello")

        service.app.router.add_get("/other", answer)

    tokens = {role: f"{role}-token-of-some-length" for role in ("producer", "trainer", "viewer")}
    sock, stop = listening_socket("127.0.0.1", 0), asyncio.Event()
    config = LedgerServerConfig.model_validate(
        {"store": sqlite_url(tmp_path), "drain_s": 1.0, **{f"{role}_tokens": [token] for role, token in tokens.items()}}
    )
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        group.create_task(serve_ledger(config, log=LOG, stop=stop, sock=sock, dialects=[dialect]))
        caller = Caller(session, url_of(sock))
        assert (await caller.call("GET", "//health")).status == 200
        found = {
            role: (await caller.call("GET", "//other", headers={"Authorization": f"Bearer {token}"})).status
            for role, token in tokens.items()
        }
        assert found == {"producer": 200, "trainer": 200, "viewer": 403}
        assert (await caller.call("GET", "//other")).status == 401
        assert (await caller.call("GET", "//nowhere")).status == 401
        stop.set()
    sock.close()


async def test_the_error_for_a_used_port_names_it(tmp_path: Path) -> None:
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve_ledger(LedgerServerConfig(store=sqlite_url(tmp_path), port=port), log=LOG, stop=asyncio.Event())


def test_the_limit_of_open_files_is_raised() -> None:
    assert allow_many_connections() >= 1024


async def test_runs_of_one_ledger_have_separate_epochs(url: str) -> None:
    async with (
        client_of(url, RunId("one")) as one,
        client_of(url, RunId("two")) as two,
        client_of(url, RunId("one")) as new,
    ):
        await started(one)
        await started(two)
        await new.take_role(restored_step=0)
        for client in (one, two):
            await send(client, "a")
            await send(client, "b")
        with pytest.raises(FencedError):
            await one.batch(1, wait_s=0)
        assert isinstance(await two.batch(1, wait_s=5), TrainingBatch)
        assert isinstance(await new.batch(1, wait_s=5), TrainingBatch)
        assert (await two.status()).epoch == 1


async def test_registered_producers_share_batches_by_weight(url: str) -> None:
    async with client_of(url) as client:
        await started(client, per_step=4)
        await client.register_producer("fast", weight=3)
        await client.register_producer("slow/one", weight=1)
        for at in range(4):
            await send(client, f"f{at}", "fast")
            await send(client, f"s{at}", "slow/one")
        batch = await client.batch(1, wait_s=5)
        assert isinstance(batch, TrainingBatch)
        assert sorted(group.id for group in batch.groups) == ["f0@0", "f1@0", "f2@0", "s0@0"]
        assert {p.name: p.num_batched for p in await client.producers()} == {"fast": 3, "slow/one": 1}
        with pytest.raises(RunError, match="not registered"):
            await send(client, "x", "unknown")


async def test_a_queue_with_too_many_bytes_is_reported_with_a_retry_time(tmp_path: Path) -> None:
    ledger = LedgerConfig(max_queued_mb=0.001)
    async with running(tmp_path, ledger=ledger) as url, aiohttp.ClientSession() as session:
        async with client_of(url) as client:
            await client.create_run(settings())
        caller = Caller(session, url)
        responses = [(await caller.call("POST", "/submit", submission(f"t{at}"))) for at in range(4)]
        assert responses[0].json["results"][0]["receipt"] == "stored"
        error = responses[-1].json["results"][0]["error"]
        assert (error["status"], error["retry_after_s"] > 0) == (429, True)
        # The repetition of a stored group is recognised, however full the queue is.
        again = await caller.call("POST", "/submit", submission("t0"))
        assert again.json["results"][0]["receipt"] == "already_stored"


async def test_compressed_requests_and_responses_have_the_same_content(url: str) -> None:
    async with client_of(url, is_compressed=True) as compressed, client_of(url) as plain:
        await started(compressed)
        for task in ("a", "b"):
            group = big_group(task, publication=-1)
            assert (await compressed.submit(encode_group(group))).receipt is Receipt.STORED
        batch = await compressed.batch(1, wait_s=5)
        assert isinstance(batch, TrainingBatch)
        assert (
            batch.groups[0].samples[0].sequences[0].token_ids == big_group("a").samples[0].sequences[0].token_ids
        ).all()
        assert (await plain.audit()).ok


async def events_of(session: aiohttp.ClientSession, url: str) -> AsyncIterator[tuple[str, bytes]]:
    async with session.get(f"{url}/v1/runs/{RUN}/events") as response:
        assert response.content_type == "text/event-stream"
        name = ""
        async for line in response.content:
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                yield name, line[6:]


async def test_events_report_changes_and_the_end_of_the_ledger(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        async with running(tmp_path) as url, client_of(url) as client:
            await started(client)
            events = events_of(session, url)
            name, data = await anext(events)
            assert (name, msgspec.json.decode(data, type=LedgerStatus).opened) == ("status", 0)
            for at in range(5):
                await send(client, f"t{at}")
            opened = 0
            while opened < 5:
                name, data = await anext(events)
                opened = msgspec.json.decode(data, type=LedgerStatus).opened
        assert [name async for name, _ in events][-1:] == ["end"]


async def test_the_metrics_of_every_run_are_exposed_to_prometheus(url: str) -> None:
    async with client_of(url) as client, aiohttp.ClientSession() as session:
        await started(client)
        await send(client, "a")
        answer = await Caller(session, url).call("GET", "//metrics")
        text = answer.body.decode()
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert f'rollbook_ledger_groups{{run="{RUN}",state="queued"}} 1' in text
        assert re.search(r'rollbook_ledger_requests_total\{route="submit",status="200"\} 1\n', text)
        assert "rollbook_ledger_loop_lag_seconds_count" in text
        for line in text.splitlines():
            assert re.fullmatch(r'# (HELP|TYPE) .*|[a-z_]+(\{([a-z]+="[^"]*",?)+\})? [-+0-9.e]+(Inf)?', line), line


async def test_a_group_is_explained_in_sentences(url: str) -> None:
    async with client_of(url) as client:
        await started(client)
        owner = await client.join("rollout")
        grants = (await client.open(owner, draws(0, 4), limit=4)).grants
        assert len(grants) == 4
        for grant in grants[:2]:
            group = group_of(grant.task_id, (0,))
            await client.submit(encode_group(group))
        await client.release(grants[2].group_id, attempt=1, cause="worker died")
        await client.close(grants[3].group_id, DropReason(DropKind.FILTERED, "all equal"))
        assert isinstance(await client.batch(1, wait_s=5), TrainingBatch)
        await client.acknowledge(1, "w1")
        trained = (await client.explain(GroupId("task0@0"))).sentences
        assert (
            trained[0]
            == "Group task0@0 is draw 0 of task task0, at position 0 of the cursor; the gate admitted it as number 0."
        )
        assert any("sampled by version 0 (publication 0)" in sentence for sentence in trained)
        assert trained[-1] == (
            "Batch 1 contains it because it was the oldest admitted group that was ready and its lag of 0 was within the "
            "staleness bound of 1; step 1 was trained, and no checkpoint covers it yet."
        )
        assert (await client.explain(grants[2].group_id)).sentences[-1] == "It waits for another attempt."
        dropped = await client.explain(grants[3].group_id)
        assert dropped.group.state == "dropped"
        assert dropped.sentences[-1].startswith("It was dropped as filtered: a filter of the rollout")
        with pytest.raises(RunError, match=r"404.*never opened, or its submission was refused"):
            await client.explain(GroupId("unknown@0"))


async def test_parts_of_a_group_over_http(url: str) -> None:
    async with client_of(url) as client:
        await client.create_run(settings(policy=BatchPolicy.PARTS, per_step=1, group_size=4, quorum=2))
        await client.take_role(restored_step=0)
        await client.confirm(await client.register(0, "w0"))
        (grant, *_) = (await client.open(await client.join("rollout"), draws(0, 1), limit=1)).grants
        assert grant.part is not None
        first = part_of(grant.task_id, grant.part, [(0,)] * 3, quorum=2)
        reply = await client.submit(encode_group(first))
        assert (reply.receipt, reply.next_part and reply.next_part.group_id) == (Receipt.STORED, "task0@0/2")
        assert reply.next_part is not None
        last = part_of(grant.task_id, reply.next_part, [(0,)], quorum=2)
        # Both parts in one request: each has its own receipt, with the part that the group lacks then.
        again, done = await asyncio.gather(
            client.submit(encode_group(first)),
            client.submit(encode_group(last)),
        )
        assert (again.receipt, done) == (Receipt.ALREADY_STORED, PartReceipt(receipt=Receipt.STORED))
        batch = await client.batch(1, wait_s=5)
        assert isinstance(batch, TrainingBatch)
        assert [(group.id, group.part, group.baseline) for group in batch.groups] == [
            ("task0@0", 1, (0.0, 1.0)),
            ("task0@0/2", 2, (0.0, 1.0)),
        ]
        assert batch.manifest.cut == -1
        explained = await client.explain(GroupId("task0@0/2"))
        assert (explained.group.part, explained.group.num_samples) == (2, 1)
        report = await client.audit()
        assert report.ok
        assert report.samples == SampleCounts(expected=4, open=0, stored=4)
        assert [group.group_id for group in await client.groups(limit=1)] == ["task0@0", "task0@0/2"]


async def test_audit_and_groups_over_http(url: str) -> None:
    async with client_of(url) as client:
        await started(client)
        for at in range(3):
            await send(client, f"t{at}")
        await client.batch(1, wait_s=5)
        report = await client.audit()
        assert (report.ok, report.opened, report.law["batched"], report.law["queued"]) == (True, 3, 2, 1)
        assert [group.group_id for group in await client.groups(GroupState.QUEUED)] == ["t2@0"]
        assert len(await client.groups(limit=2, start=1)) == 2


async def test_an_audit_counts_what_a_setting_leaves_out_of_training_by_reason(url: str) -> None:
    whole = group_of("t", samples=2)
    [row] = whole.samples[0].sequences
    untrained = replace(row, loss_mask=np.zeros_like(row.loss_mask))
    lineage = [
        {"sequence": 0, "role": "main", "parent": None, "agent": None},
        {"sequence": 1, "role": "side", "parent": 0, "agent": None, "left_out": "side requests"},
    ]
    first = RolloutSample(sequences=(row, untrained), reward=0.0, facts={"lineage": lineage})
    # Facts are the producer's own: a list that means something else counts as nothing.
    second = RolloutSample(sequences=(row, untrained), reward=1.0, facts={"lineage": ["x", {"sequence": "1"}]})
    async with client_of(url) as client:
        await started(client)
        await client.submit(encode_group(replace(whole, samples=(first, second))))
        for _ in range(2):
            report = await client.audit()
            assert (report.ok, report.left_out) == (True, {"side requests": 1}), report.violations


async def test_audit_and_explain_by_url(url: str) -> None:
    async with client_of(url) as client, client_of(url, RunId("other")) as other:
        await client.create_run(settings())
        await other.create_run(settings())
        await send(client, "a")
    assert [(report.run_id, report.ok) for report in await asyncio.to_thread(audit_at, url)] == [
        (RUN, True),
        ("other", True),
    ]
    [one] = await asyncio.to_thread(audit_at, f"{url}/v1/runs/{RUN}")
    assert (one.run_id, one.opened) == (RUN, 1)
    life = await asyncio.to_thread(explain_at, f"{url}/v1/runs/{RUN}", GroupId("a@0"))
    assert "opened by submit and queued at once (attempt 1 submitted)" in " ".join(life.sentences)
    with pytest.raises(RunError, match=r"has these runs: .*, other; name one: http://.*/v1/runs/RUN"):
        await asyncio.to_thread(explain_at, url, GroupId("a@0"))
    assert life.sentences[-1] == "It waits in the queue for batch 1 or a later one."
    with pytest.raises(TransientError, match="no response to GET /v1/runs"):
        await asyncio.to_thread(audit_at, "http://127.0.0.1:1")


def drive(client: SyncLedgerClient) -> None:
    client.create_run(settings())
    assert client.take_role(restored_step=0).epoch == 1
    client.confirm(client.register(0, "w0"))
    owner = client.join("script")
    for grant in client.open(owner, draws(0, 2), limit=2).grants:
        group = group_of(grant.task_id, (0,))
        assert client.submit(group, outcome_of(group)) is Receipt.STORED
    client.heartbeat(owner)
    batch = client.batch(1, wait_s=5)
    assert isinstance(batch, TrainingBatch)
    assert client.acknowledge(1, "w1") is AckReceipt.ACKNOWLEDGED
    client.checkpointed(1, oldest_kept=0)
    assert client.status().durable_step == 1
    assert client.audit().ok
    with pytest.raises(RunError, match="cannot be acknowledged"):
        client.acknowledge(7, "w7")


async def test_a_whole_run_with_the_blocking_client(url: str) -> None:
    def script() -> None:
        with open_sync_ledger_client(url, RUN) as client:
            drive(client)

    await asyncio.to_thread(script)


async def test_a_client_that_does_not_read_its_batch_does_not_delay_others(url: str) -> None:
    """The trainer does not read its batch. Other requests are answered."""
    async with client_of(url) as client, aiohttp.ClientSession() as session:
        await started(client, per_step=16)
        for at in range(16):
            group = big_group(f"t{at:02}", publication=-1)
            await client.submit(encode_group(group))
        await client.batch(1, wait_s=5)
        host, port = url.removeprefix("http://").split(":")
        body = msgspec.msgpack.encode({"step": 1, "epoch": 1, "wait_s": 0.0})
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = f"POST /v1/runs/{RUN}/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        for _ in range(20):
            assert (await Caller(session, url).call("GET", "/status")).status == 200
        writer.transport.abort()
