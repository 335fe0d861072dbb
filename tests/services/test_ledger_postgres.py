"""Replicas over one PostgreSQL database: one truth, wake-ups across processes, and databases that go away and come back."""

import asyncio
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from rollbook.concurrency.clock import ManualClock, SystemClock
from rollbook.contracts.admission import Grant, MemberRole, PartReceipt, Receipt, RunId
from rollbook.contracts.batch import BatchManifest
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.group import DropKind, DropReason, GroupId
from rollbook.contracts.group_codec import encode_group
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.rules import groups
from rollbook.ledger.rules.groups import Submission
from rollbook.ledger.rules.run_transaction import run_transaction
from rollbook.ledger.service import Ledger, open_ledger
from rollbook.ledger.store import Transaction
from rollbook.ledger.stores.postgres import store as postgres_store
from rollbook.ledger.stores.postgres import writer as postgres_writer
from rollbook.ledger.stores.postgres.store import open_postgres_store
from rollbook.ledger.stores.registry import open_reader, open_store
from rollbook.ledger.tools.audit import audit, audit_run, audit_since
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.atropos import dialect_on, scored
from tests.parts.ledger.groups import RUN, draws, group_of, settings, submission_of
from tests.parts.ledger.postgres import PostgresServer, both_url, own_server, shared_server
from tests.parts.ledger.replica import Replica

LOG = EventLog("test", echo=sys.stdout)


@pytest.fixture
def url() -> str:
    return shared_server().fresh_url()


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    server = own_server()
    yield server
    server.kill()


@asynccontextmanager
async def replica(url: str) -> AsyncIterator[Ledger]:
    async with open_store(url) as store, open_ledger(store, LedgerConfig(), clock=SystemClock(), log=LOG) as ledger:
        yield ledger


async def started(ledger: Ledger, *, per_step: int = 2, in_flight: int = 4) -> int:
    """A run with a trainer that has published. Returns its epoch."""
    await ledger.create_run(RUN, settings(per_step=per_step, in_flight=in_flight))
    role = await ledger.take_role(RUN, restored_step=0)
    publication = await ledger.register(RUN, 0, "w0", epoch=role.epoch)
    await ledger.confirm(RUN, publication, epoch=role.epoch)
    return role.epoch


async def submit(ledger: Ledger, name: str) -> Receipt:
    group = group_of(name, (-1,))
    (result,) = await ledger.submit(RUN, submission_of(group))
    assert isinstance(result, PartReceipt)
    return result.receipt


async def until_logged(event: str, *, log_file: Path, clock: ManualClock) -> None:
    while event not in log_file.read_text(encoding="utf-8"):
        await clock.advance(0.5)
        await asyncio.sleep(0.02)


async def test_a_trainer_at_one_replica_is_woken_by_groups_submitted_at_another(url: str) -> None:
    async with replica(url) as one, replica(url) as other:
        epoch = await started(one)
        waiting = asyncio.ensure_future(one.decide(RUN, 1, epoch=epoch, wait_s=60))
        for name in ("a", "b"):
            await submit(other, name)
        manifest = await asyncio.wait_for(waiting, 20)
        assert isinstance(manifest, BatchManifest)
        assert [entry.group_id for entry in manifest.entries] == ["a@0", "b@0"]


async def test_a_write_waits_for_writes_of_its_own_run_at_another_replica_and_not_for_other_runs(url: str) -> None:
    is_writing, may_end, order = threading.Event(), threading.Event(), list[str]()

    def slow(tx: Transaction) -> None:
        is_writing.set()
        may_end.wait(60)
        order.append("slow")

    def until_waiting(num_sessions: int) -> None:
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        with psycopg.connect(url, autocommit=True) as db:
            while (found := db.execute(waiting).fetchone()) is None or found[0] < num_sessions:
                time.sleep(0.01)

    async with open_store(url) as one, open_store(url) as other, open_store(url) as third:
        try:
            running = asyncio.ensure_future(one.write(slow, run_id=RUN))
            await asyncio.to_thread(is_writing.wait, 60)
            await other.write(lambda tx: order.append("another run"), run_id=RunId("another"))
            same = asyncio.ensure_future(other.write(lambda tx: order.append("same run"), run_id=RUN))
            everything = asyncio.ensure_future(third.write(lambda tx: order.append("every run")))
            await asyncio.to_thread(until_waiting, 2)
            assert order == ["another run"]
        finally:
            may_end.set()
        await asyncio.gather(running, same, everything)
    assert order[:2] == ["another run", "slow"]
    assert sorted(order[2:]) == ["every run", "same run"]


@asynccontextmanager
async def dropping(url: str, name: str) -> AsyncIterator[None]:
    """Inside the block, a replica has written that an external group of the run was dropped, and has not committed it."""
    is_written, may_end = threading.Event(), threading.Event()

    def work(tx: Transaction) -> None:
        with run_transaction(tx, RUN, 1.0) as run_tx:
            dropped = submission_of(group_of(name, (-1,)), drop=DropReason(DropKind.FILTERED))
            groups.submit(run_tx, dropped, max_queued=9)
        tx.history.of_group(RUN, GroupId(f"{name}@0"))  # writes what is buffered
        is_written.set()
        may_end.wait(60)

    async with open_store(url) as store:
        writing = asyncio.ensure_future(store.write(work, run_id=RUN))
        await asyncio.to_thread(is_written.wait, 60)
        try:
            yield
        finally:
            may_end.set()
            await writing


async def test_a_change_that_is_committed_after_later_ones_of_another_run_is_reported(url: str) -> None:
    other = RunId("other")
    async with replica(url) as ledger:
        await started(ledger)
        await submit(ledger, "first")
        await ledger.create_run(other, settings())
        async with dropping(url, "a"):
            await ledger.submit(other, submission_of(group_of("x", (-1,))))
            start = (await ledger.changes(RUN, after=None)).next
        found = await ledger.changes(RUN, after=start)
        assert [group.group_id for group in found.groups] == ["a@0"]
        async with dropping(url, "b"):
            await ledger.submit(other, submission_of(group_of("y", (-1,))))
            between = await ledger.changes(RUN, after=found.next)
            assert (between.groups, between.is_complete) == ((), True)
        assert [group.group_id for group in (await ledger.changes(RUN, after=between.next)).groups] == ["b@0"]


async def test_an_audit_counts_a_group_that_another_replica_committed_late(url: str) -> None:
    other = RunId("other")
    async with replica(url) as ledger:
        await started(ledger)
        await submit(ledger, "first")
        await ledger.create_run(other, settings())
        async with dropping(url, "late"):
            await ledger.submit(other, submission_of(group_of("x", (-1,))))
            report, mark = await ledger.read(lambda tx: audit_since(tx, RUN, None))
            assert report.ok
        report, _ = await ledger.read(lambda tx: audit_since(tx, RUN, mark))
        assert report.violations == ()


async def test_a_client_moves_to_the_next_replica_when_one_is_killed_and_no_request_is_lost(
    url: str, tmp_path: Path
) -> None:
    log = EventLog("client", tmp_path / "client.jsonl")
    with closing(Replica(url)) as first, closing(Replica(url)) as second:
        first.start()
        second.start()
        async with open_ledger_client(f"{first.url},{second.url}", RUN, request_s=60, log=log) as client:
            await client.create_run(settings(per_step=2, in_flight=8))
            await client.take_role(restored_step=0)
            await client.confirm(await client.register(0, "w0"))
            owner = await client.join("dispatcher")
            granted = (await client.open(owner, draws(0, 8), limit=8)).grants
            submissions = [asyncio.create_task(submit_at(client, grant)) for grant in granted]
            first.close()
            assert {await submission for submission in submissions} <= {Receipt.STORED, Receipt.ALREADY_STORED}
            assert (await client.status()).counts.queued == len(granted) > 0
    log.close()
    events = (tmp_path / "client.jsonl").read_text(encoding="utf-8")
    assert events.count("ledger.failed_over") == 1


async def submit_at(client: LedgerClient, grant: Grant) -> Receipt:
    group = group_of(grant.task_id, (int(grant.admission_publication),))
    return (await client.submit(encode_group(group, attempt=grant.attempt))).receipt


async def test_replicas_that_decide_at_the_same_time_decide_the_same_batch(url: str) -> None:
    async with replica(url) as one, replica(url) as other:
        epoch = await started(one)
        await asyncio.gather(
            *(submit(ledger, f"{at}{n}") for n in range(6) for at, ledger in (("x", one), ("y", other)))
        )
        for step in range(1, 7):
            first, second = await asyncio.gather(*(r.decide(RUN, step, epoch=epoch, wait_s=0) for r in (one, other)))
            assert isinstance(first, BatchManifest)
            assert first == second
        report = await other.read(lambda tx: audit_run(tx, RUN))
        assert (report.violations, report.law["batched"]) == ((), 12)


async def test_dispatchers_at_two_replicas_never_share_a_place_in_the_gate(url: str) -> None:
    async with replica(url) as one, replica(url) as other:
        await started(one, in_flight=3)
        owners = [await ledger.join(RUN, name) for ledger, name in ((one, "a"), (other, "b"))]
        replies = await asyncio.gather(
            *(
                ledger.open(RUN, owner, draws(at, 4), limit=4)
                for ledger, owner, at in ((one, owners[0], 0), (other, owners[1], 4))
            )
        )
        assert sum(len(reply.grants) for reply in replies) == 3


async def test_a_group_sent_to_two_replicas_at_once_is_stored_once(url: str) -> None:
    async with replica(url) as one, replica(url) as other:
        await started(one)
        receipts = await asyncio.gather(*(submit(ledger, "same") for ledger in (one, other) * 4))
        assert sorted(receipts) == [Receipt.ALREADY_STORED] * 7 + [Receipt.STORED]


async def test_atropos_environments_may_speak_to_any_replica(url: str) -> None:
    """Its trainer stays with one: only that replica knows at once that a batch was written to its end."""
    async with (
        open_postgres_store(url) as first,
        open_postgres_store(url) as second,
        dialect_on(first) as one,
        dialect_on(second) as other,
    ):
        await one.start(4)
        env = await other.env(minimum=0.5)
        assert (await one.env(), env) == (1, 0)
        for name, client in enumerate((one, other, one, other)):
            assert (await client.post("/scored_data", scored(name, env_id=name % 2)))["status"] == "received"
        assert await one.get("/status") == await other.get("/status") == {"current_step": 0, "queue_size": 4}
        served = [await one.batch() for _ in range(3)]
        assert [sorted(names) for names in served if names is not None] == [["0", "1"], ["2", "3"]]
        assert await one.audited() in ({"trained": 4}, {"durable": 4}, {"durable": 2, "trained": 2})


async def test_callers_wait_while_the_database_restarts(server: PostgresServer) -> None:
    url = server.fresh_url()
    async with replica(url) as one, replica(url) as other:
        epoch = await started(one, per_step=30)
        waiting = asyncio.ensure_future(other.decide(RUN, 1, epoch=epoch, wait_s=60))

        async def produce(lane: int) -> None:
            for number in range(10):
                await submit((one, other)[lane % 2], f"{lane}-{number}")
                await asyncio.sleep(0.02)

        producing = [asyncio.ensure_future(produce(lane)) for lane in range(3)]
        for down in (server.kill, server.stop):
            await asyncio.sleep(0.05)
            down()
            server.start()
        await asyncio.gather(*producing)
        assert isinstance(await asyncio.wait_for(waiting, 30), BatchManifest)
        assert (await one.status(RUN)).opened == 30
    with open_reader(url) as reader:
        assert audit(reader, RUN).violations == ()


def standby_of(server: PostgresServer) -> PostgresServer:
    standby = own_server()
    standby.stop()
    standby.follow(server)
    return standby


async def test_no_acknowledged_group_is_lost_in_a_fail_over_to_a_synchronous_standby(server: PostgresServer) -> None:
    standby = standby_of(server)
    url = both_url(server, standby)
    async with replica(url) as ledger:
        await started(ledger, per_step=30)
        acknowledged: set[str] = set()

        async def produce(lane: int) -> None:
            for number in range(10):
                await submit(ledger, f"{lane}-{number}")
                acknowledged.add(f"{lane}-{number}")

        producing = [asyncio.ensure_future(produce(lane)) for lane in range(3)]
        while len(acknowledged) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.to_thread(server.kill)
        before = len(acknowledged)
        await asyncio.to_thread(standby.promote)
        await asyncio.gather(*producing)
        assert before < len(acknowledged) == 30
        # The servers change their roles and fail over again.
        await asyncio.to_thread(server.follow, standby)
        await submit(ledger, "with a standby again")
        await asyncio.to_thread(standby.kill)
        await asyncio.to_thread(server.promote)
        assert (await ledger.status(RUN)).opened == 31
    with open_reader(url) as reader:
        assert audit(reader, RUN).violations == ()
        for name in (*acknowledged, "with a standby again"):
            assert reader.read_now(partial(_payload, group_of(name, (-1,)).id)), name


async def test_a_commit_waits_until_the_standby_has_what_a_killed_primary_shows_again(server: PostgresServer) -> None:
    """The response of the first commit is lost with the primary, before the standby has it."""
    standby = standby_of(server)
    url = both_url(server, standby)
    async with open_postgres_store(url) as store:
        await store.write(lambda tx: tx.runs.count_drop(RUN, "stale"))
        standby.kill()
        writing = asyncio.ensure_future(store.write(lambda tx: tx.runs.count_drop(RUN, "stale")))
        await asyncio.to_thread(_until_a_commit_waits, server)
        await asyncio.to_thread(server.kill)
        server.start()
        reading = asyncio.ensure_future(store.read(lambda tx: tx.runs.drops(RUN)))
        await asyncio.to_thread(_until_a_commit_waits, server)
        assert (writing.done(), reading.done()) == (False, False)
        standby.start()
        await writing
        assert await reading == {"stale": 2}


async def test_a_commit_that_waits_for_the_standby_is_reported_while_it_waits(
    server: PostgresServer, tmp_path: Path
) -> None:
    standby = standby_of(server)
    clock, log = ManualClock(), EventLog("test", tmp_path / "log", echo=sys.stdout)
    logged = partial(until_logged, log_file=tmp_path / "log", clock=clock)
    async with (
        open_store(both_url(server, standby)) as store,
        open_ledger(store, LedgerConfig(), clock=clock, log=log) as ledger,
    ):
        await started(ledger)
        await ledger.open(RUN, await ledger.join(RUN, "rollout"), draws(0, 2), limit=2)
        standby.kill()
        waiting = asyncio.ensure_future(submit(ledger, "a"))
        await asyncio.to_thread(_until_a_commit_waits, server)
        await logged("ledger.store_stalled")
        assert not waiting.done()
        standby.start()
        assert await waiting is Receipt.STORED
        await logged("ledger.leases_extended")
        assert (await ledger.status(RUN)).counts.waiting == 0
    log.close()


def _payload(group: GroupId, tx: Transaction) -> bytes | None:
    return tx.payloads.get(RUN, group)


def _until_a_commit_waits(server: PostgresServer) -> None:
    with psycopg.connect(server.url, autocommit=True) as db:
        while db.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'").fetchone() is None:
            time.sleep(0.02)


async def test_a_database_that_stays_away_is_told_as_try_again(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_postgres_store(server.fresh_url()) as store:
        monkeypatch.setattr(postgres_writer, "RECONNECT_S", 0.3)
        server.stop()
        with pytest.raises(TransientError, match="cannot be reached"):
            await store.write(lambda tx: tx.payloads.put(RUN, GroupId("a"), b"body"))
        server.start()
        await store.write(lambda tx: tx.payloads.put(RUN, GroupId("a"), b"body"))
        assert await store.read(lambda tx: tx.payloads.get(RUN, GroupId("a"))) == b"body"


async def test_no_lease_ends_because_the_database_did_not_respond(
    server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (postgres_writer, postgres_store):
        monkeypatch.setattr(module, "RECONNECT_S", 0.2)
    clock, log = ManualClock(), EventLog("test", tmp_path / "log", echo=sys.stdout)
    logged = partial(until_logged, log_file=tmp_path / "log", clock=clock)
    async with (
        open_store(server.fresh_url()) as store,
        open_ledger(store, LedgerConfig(), clock=clock, log=log) as ledger,
    ):
        await started(ledger)
        await ledger.open(RUN, await ledger.join(RUN, "rollout"), draws(0, 2), limit=2)
        reply = await ledger.join_member(
            RUN, name="a", role=MemberRole.SUPERVISOR, node="n", address="", lease_s=15, nonce="n"
        )
        assert reply.member is not None
        server.stop()
        await logged("ledger.expiry_failed")
        clock.jump(3600)
        server.start()
        await logged("ledger.leases_extended")
        await ledger.heartbeat_member(RUN, reply.member, publication=None, load=0.0)
        assert (await ledger.status(RUN)).counts.waiting == 0
        await logged("ledger.member_expired")
    log.close()


class CuttingProxy:
    """Passes everything on until it is armed; then it lets the next COMMIT reach the database, or not, and cuts the line."""

    def __init__(self, port: int, *, lets_it_through: bool) -> None:
        self._port = port
        self._lets_it_through = lets_it_through
        self.is_armed = False
        self.num_cut = 0
        self.lets_in = threading.Event()
        """Clients wait while it is not set."""
        self.lets_in.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self.lets_in.wait()
                database = socket.create_connection(("127.0.0.1", self._port))
                for source, target, is_request in ((client, database, True), (database, client, False)):
                    threading.Thread(target=self._pass_on, args=(source, target, is_request), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_request and self.is_armed and b"COMMIT" in data:
                    self.is_armed = False
                    self.num_cut += 1
                    source.shutdown(socket.SHUT_RDWR)
                    if self._lets_it_through:
                        target.sendall(data)
                        time.sleep(0.2)
                    break
                target.sendall(data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self) -> None:
        self._listening.close()


@contextmanager
def cutting_proxy(port: int, *, lets_it_through: bool) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(port, lets_it_through=lets_it_through)
    yield proxy
    proxy.close()


@pytest.mark.parametrize("lets_it_through", [True, False])
async def test_a_commit_whose_answer_was_lost_is_done_once_and_answered_truly(url: str, lets_it_through: bool) -> None:
    port = shared_server().port
    with cutting_proxy(port, lets_it_through=lets_it_through) as proxy:
        async with open_postgres_store(url.replace(str(port), str(proxy.port), 1)) as store:
            await store.write(lambda tx: tx.runs.count_drop(RUN, "stale"))
            proxy.is_armed = True
            await store.write(lambda tx: tx.runs.count_drop(RUN, "stale"))
            assert proxy.num_cut == 1
            assert await store.read(lambda tx: tx.runs.drops(RUN)) == {"stale": 2}


async def test_a_commit_that_a_crash_took_is_not_mistaken_for_one_that_came_after(server: PostgresServer) -> None:
    """After a crash PostgreSQL hands out the transaction ids of commits that never reached the disk once more."""
    url = server.fresh_url()
    with cutting_proxy(server.port, lets_it_through=False) as proxy:
        async with open_postgres_store(url.replace(str(server.port), str(proxy.port), 1)) as store:
            proxy.lets_in.clear()
            proxy.is_armed = True
            writing = asyncio.ensure_future(store.write(lambda tx: tx.runs.count_drop(RUN, "stale")))
            while not proxy.num_cut:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            server.kill()
            server.start()
            with psycopg.connect(url, autocommit=True) as db:
                for number in range(200):
                    db.execute(
                        "INSERT INTO drops (run_id, kind, num, missing) VALUES ('other', %s, 1, 0)", (f"kind{number}",)
                    )
            proxy.lets_in.set()
            await writing
            assert await store.read(lambda tx: tx.runs.drops(RUN)) == {"stale": 1}


async def test_a_replica_that_stands_still_does_not_stop_the_others(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(postgres_writer.SETTINGS, "idle_in_transaction_session_timeout", "200ms")
    naps = iter([1.0])

    def work(tx: Transaction) -> str:
        tx.runs.count_drop(RUN, "stale")
        time.sleep(next(naps, 0.0))
        return "done"

    async with open_postgres_store(url) as one, open_postgres_store(url) as other:
        still = asyncio.ensure_future(one.write(work))
        await asyncio.sleep(0.05)
        await other.write(lambda tx: tx.runs.count_drop(RUN, "reset"))
        assert not still.done()
        assert await still == "done"
        assert await other.read(lambda tx: tx.runs.drops(RUN)) == {"stale": 1, "reset": 1}


def past_the_checks(name: str, **facts: Any) -> Submission:
    """A submission whose facts were changed after the checks."""
    good = submission_of(group_of(name, (-1,)))
    return msgspec.structs.replace(good, facts=msgspec.structs.replace(good.facts, **facts))


async def test_a_value_that_the_database_cannot_keep_is_refused_and_harms_nobody(url: str) -> None:
    async with replica(url) as ledger:
        await started(ledger)
        no_text, too_large, good = await asyncio.gather(
            ledger.submit(RUN, past_the_checks("a", task_id="a\0b")),
            ledger.submit(RUN, past_the_checks("huge", draw=2**63)),
            submit(ledger, "ab"),
            return_exceptions=True,
        )
        for bad in (no_text, too_large):
            assert isinstance(bad, RunError)
        assert "cannot be stored" in str(no_text)
        assert good is Receipt.STORED


async def test_looking_around_costs_no_flush(url: str) -> None:
    async with replica(url) as ledger:
        epoch = await started(ledger)

        def last_commit() -> str:
            with psycopg.connect(url) as db:
                row = db.execute("SELECT number FROM replica_commits").fetchone()
                assert row is not None
                return str(row[0])

        before = last_commit()
        for _ in range(5):
            assert await ledger.decide(RUN, 1, epoch=epoch, wait_s=0) is None
        assert last_commit() == before
        await submit(ledger, "a")
        assert last_commit() != before
