"""Where the original loses or wedges, this does not: restarts, lost answers, broken connections, dead environments, full queues."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollbook.commands.servers.run_api import MAX_QUICK_EXITS, QUICK_S
from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.admission import RunId
from rollbook.contracts.group import DropKind, DropReason
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.config import Durability, LedgerConfig
from rollbook.ledger.rules.run_transaction import run_transaction
from rollbook.ledger.store import Store, Transaction
from rollbook.ledger.stores.sqlite.store import open_memory_store, open_readonly, open_sqlite_store
from rollbook.ledger.tools.audit import audit
from tests.parts.ledger.atropos import RUN, Client, dialect, dialect_on, name_of, registration, scored
from tests.parts.ledger.run_api import running_api


async def test_registration_environments_buffers_queue_and_step_survive_a_restart(tmp_path: Path) -> None:
    async with dialect(tmp_path) as client:
        await client.start(4)
        env = await client.env(group_size=4)
        await client.post("/scored_data", scored(1, 4, env_id=env))
        assert await client.batch() == ["1"]
        await client.post("/scored_data", scored(2, 3, env_id=env))
        await client.post("/scored_data", scored(3, 4, env_id=env))
    async with dialect(tmp_path) as client:
        assert await client.get("/info") == {"batch_size": 4, "max_token_len": 99}
        assert await client.get("/status") == {"current_step": 1, "queue_size": 1}
        assert await client.post("/scored_data", scored(4, 1, env_id=env)) == {"status": "buffered", "buffer_size": 0}
        assert [await client.batch(), await client.batch()] == [["3"], ["2", "4"]]
        assert (await client.env("env")) == 1
        assert await client.audited() == {"trained": 2, "batched": 2}


def send_raw(client: Client, request: bytes) -> socket.socket:
    host, port = client.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    sock.sendall(request)
    return sock


def post_request(body: Any) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


class SlowStore:
    """Commits a write at once, but returns its result only while `may_return` is set. Satisfies `store.Store`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.read = store.read
        self.listen = store.listen
        self.journal = store.journal
        self.is_shared = store.is_shared
        self.may_return = asyncio.Event()
        self.may_return.set()

    async def write(self, work: Any, *, run_id: Any = None, before: Any = None) -> Any:
        result = await self._store.write(work, run_id=run_id, before=before)
        await self.may_return.wait()
        return result

    async def has_queued(self, num_groups: int = 1) -> None:
        changed = asyncio.Event()
        self.listen(lambda _: changed.set())
        while await self.read(lambda tx: len(tx.groups.queued(RUN))) < num_groups:
            await changed.wait()
            changed.clear()


@pytest.fixture
async def slow_store() -> AsyncIterator[SlowStore]:
    async with open_memory_store() as store:
        yield SlowStore(store)


async def test_a_retried_post_whose_answer_was_lost_is_stored_once(slow_store: SlowStore) -> None:
    async with dialect_on(slow_store) as client:
        await client.start(2)
        slow_store.may_return.clear()
        lost = send_raw(client, post_request(scored(1)))
        await slow_store.has_queued()
        lost.close()
        await asyncio.sleep(0.1)
        slow_store.may_return.set()
        await asyncio.sleep(0.1)
        assert await client.post("/scored_data", scored(1)) == {"status": "received"}
        assert await client.batch() == ["1"]
        assert await client.batch() is None
        # Sent again on purpose, it is another group.
        await client.post("/scored_data", scored(1))
        await client.post("/scored_data", scored(1))
        assert [await client.batch(), await client.batch(), await client.batch()] == [["1"], ["1"], None]


async def test_a_post_that_was_stored_before_a_crash_and_comes_again_is_stored_once(slow_store: SlowStore) -> None:
    async with dialect_on(slow_store) as client:
        await client.start(2)
        slow_store.may_return.clear()
        sending = asyncio.create_task(client.status_of("POST", "/scored_data", json=scored(1)))
        await slow_store.has_queued()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await asyncio.sleep(0.05)
        slow_store.may_return.set()
    async with dialect_on(slow_store) as client:
        assert await client.post("/scored_data", scored(1)) == {"status": "received"}
        assert [await client.batch(), await client.batch()] == [["1"], None]


async def test_identical_groups_sent_at_the_same_time_are_all_stored(tmp_path: Path) -> None:
    async with dialect(tmp_path) as client:
        await client.start(2)
        await asyncio.gather(*(client.post("/scored_data", scored(1)) for _ in range(12)))
        await asyncio.gather(*(client.post("/scored_data", scored(1)) for _ in range(12)))
        assert (await client.get("/status"))["queue_size"] == 24


async def test_a_batch_whose_body_was_not_read_to_its_end_is_served_again(tmp_path: Path) -> None:
    async with dialect(tmp_path) as client:
        await client.start(64)
        for name in range(32):
            await client.post("/scored_data", scored(name, 4, images=["x" * 900_000]))
        broken = send_raw(client, b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await asyncio.to_thread(broken.recv, 1000)
        broken.close()
        await asyncio.sleep(0.1)
        assert await client.batch() == [str(name) for name in range(16)]
        assert await client.batch() == [str(name) for name in range(16, 32)]
        assert (await client.get("/status"))["current_step"] == 2


async def test_two_who_ask_at_the_same_time_get_two_batches(tmp_path: Path) -> None:
    async with dialect(tmp_path) as client:
        await client.start(2)
        for name in range(4):
            await client.post("/scored_data", scored(name))
        batches = await asyncio.gather(*(client.batch() for _ in range(4)))
        assert sorted(name for batch in batches for name in batch or ()) == ["0", "1", "2", "3"]


async def test_a_trainer_that_comes_back_to_an_older_step_is_served_again_from_there(tmp_path: Path) -> None:
    async with dialect(tmp_path) as client:
        await client.register(2, starting_step=10)
        for name in range(4):
            await client.post("/scored_data", scored(name))
        assert [await client.batch() for _ in range(3)] == [["0"], ["1"], ["2"]]
    async with dialect(tmp_path) as client:
        await client.register(2, starting_step=11)
        assert (await client.get("/status"))["current_step"] == 11
        assert [await client.batch() for _ in range(4)] == [["1"], ["2"], ["3"], None]
        assert (await client.get("/status"))["current_step"] == 14
        await client.audited()


async def test_old_batches_go_and_a_step_that_is_gone_is_refused(tmp_path: Path) -> None:
    async with dialect(tmp_path, config=AtroposConfig(keep_batches=2)) as client:
        await client.start(2)
        for name in range(8):
            await client.post("/scored_data", scored(name))
            assert await client.batch() == [str(name)]
        assert await client.batch() is None
        assert await client.audited() == {"durable": 6, "trained": 2}
        status, answer = await client.status_of("POST", "/register", json=registration(2, starting_step=1))
        assert (status, "no longer stored" in answer["detail"]) == (409, True)
        await client.register(2, starting_step=6)
        assert [await client.batch() for _ in range(3)] == [["6"], ["7"], None]


async def test_a_dead_environment_stops_holding_back_batches() -> None:
    clock = ManualClock()
    async with (
        open_memory_store() as store,
        dialect_on(store, config=AtroposConfig(env_silence_s=60), clock=clock) as client,
    ):
        await client.start(4)
        lively, dead = await client.env("lively", group_size=2), await client.env("dead", group_size=2, minimum=0.5)
        for name in range(4):
            await client.post("/scored_data", scored(name, env_id=lively))
        assert await client.batch() is None
        clock.jump(61)
        assert await client.batch() == ["0", "1"]
        await client.get("/status-env", {"env_id": dead})
        assert await client.batch() is None
        await client.post("/scored_data", scored(9, env_id=dead))
        assert await client.batch() == ["9", "2"]


async def test_a_full_queue_holds_a_post_and_takes_it_when_there_is_room(tmp_path: Path) -> None:
    async with dialect(tmp_path, limits=LedgerConfig(max_queued_groups=2)) as client:
        await client.start(2)
        for name in range(2):
            await client.post("/scored_data", scored(name))
        held = asyncio.create_task(client.post("/scored_data", scored(2)))
        await asyncio.sleep(0.1)
        assert not held.done()
        assert await client.batch() == ["0"]
        assert await held == {"status": "received"}


async def test_a_queue_that_stays_full_answers_503_and_never_drops(tmp_path: Path) -> None:
    limits = LedgerConfig(max_queued_groups=1)
    async with dialect(tmp_path, limits=limits, config=AtroposConfig(hold_s=0.1)) as client:
        await client.start(2)
        await client.post("/scored_data", scored(0))
        status, answer = await client.status_of("POST", "/scored_data", json=scored(1))
        assert (status, "the queue is full" in answer["detail"]) == (503, True)
        assert await client.batch() == ["0"]
        await client.post("/scored_data", scored(1))
        assert await client.batch() == ["1"]


@pytest.mark.parametrize("num_kills", [2, pytest.param(40, marks=pytest.mark.slow)])
async def test_nothing_is_lost_or_served_twice_when_the_server_is_killed_among_requests(
    tmp_path: Path, num_kills: int
) -> None:
    """The whole command: the socket stays open when the server ends, so no connection is refused."""
    acknowledged: list[str] = []
    delivered: list[str] = []
    with running_api(f"sqlite:///{tmp_path}") as api:
        async with asyncio.timeout(120 + 10 * num_kills), aiohttp.ClientSession() as session:

            async def call(method: str, path: str, body: Any = None) -> Any:
                for _ in range(50):
                    try:
                        async with session.request(method, api.url + path, json=body) as answer:
                            assert answer.status == 200, await answer.text()
                            return await answer.json(content_type=None)
                    except OSError:
                        await asyncio.sleep(0.05)
                    except Exception as error:
                        if "disconnected" not in str(error).lower():
                            raise
                raise AssertionError("no answer")

            await asyncio.to_thread(api.wait_until_listening)
            await call("POST", "/register", registration(2))
            is_over = asyncio.Event()

            async def produce(lane: int) -> None:
                for number in count():
                    await call("POST", "/scored_data", scored(lane * 100_000 + number))
                    acknowledged.append(str(lane * 100_000 + number))
                    if is_over.is_set():
                        return
                    await asyncio.sleep(0.01)

            async def kill() -> None:
                for number in range(1, num_kills + 1):
                    goal = len(acknowledged) + 20
                    await moved(lambda goal=goal: len(acknowledged) >= goal)
                    if number % (MAX_QUICK_EXITS - 1) == 0:
                        await asyncio.sleep(QUICK_S)  # else the command gives up
                    await asyncio.to_thread(api.kill_server)
                is_over.set()

            await asyncio.gather(kill(), *(produce(lane) for lane in range(4)))
            while (batch := (await call("GET", "/batch"))["batch"]) is not None:
                delivered += [name_of(group) for group in batch]
                if len(delivered) == 20:
                    await asyncio.sleep(0.2)
                    api.kill_server()
    assert sorted(delivered) == sorted(acknowledged)
    assert len(set(delivered)) == len(delivered) > 20 * num_kills
    with open_readonly(tmp_path) as file:
        assert audit(file, RunId("atropos")).violations == ()


async def moved(is_true: Any) -> None:
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110  # what is waited for happens in another process or in a store
            await asyncio.sleep(0.01)


async def test_a_group_lost_in_a_power_failure_is_stored_again_when_its_post_is_repeated(tmp_path: Path) -> None:
    limits = LedgerConfig(durability=Durability.PROCESS_CRASH)
    async with open_sqlite_store(tmp_path, durability=Durability.PROCESS_CRASH) as file:
        slow = SlowStore(file)
        async with dialect_on(slow, limits=limits) as client:
            await client.start(2)
            await client.post("/scored_data", scored(1))
            slow.may_return.clear()
            unanswered = asyncio.create_task(client.status_of("POST", "/scored_data", json=scored(2)))
            await slow.has_queued(2)
            unanswered.cancel()
            await asyncio.gather(unanswered, return_exceptions=True)
            slow.may_return.set()
        # As after a power failure: the rows are on the disk, the last payload is not, and no mark covers it.
        await file.write(lambda tx: tx.session.write("DELETE FROM segments"))  # type: ignore[attr-defined]
        segments = file._writer._segments
        assert segments is not None
        segments._marks.clear()
        segments._recorded.clear()
        current = segments._current
        assert current is not None
        segments._current = None
        current.close()
        os.truncate(current.path, current.end - 10)
    async with dialect(tmp_path, limits=limits) as client:
        assert await client.get("/status") == {"current_step": 0, "queue_size": 1}
        assert await client.post("/scored_data", scored(2)) == {"status": "received"}
        assert [await client.batch(), await client.batch(), await client.batch()] == [["1"], ["2"], None]
        await client.audited()


async def test_a_batch_is_formed_without_a_group_that_the_ledger_has_dropped(tmp_path: Path) -> None:
    async with dialect(tmp_path) as client:
        await client.start(2)
        for name in range(3):
            await client.post("/scored_data", scored(name))

    def drop(tx: Transaction) -> None:
        with run_transaction(tx, RUN, 1.0) as run_tx:
            run_tx.drop(tx.groups.queued(RUN)[0], DropReason(DropKind.LOST), by="test")

    async with open_sqlite_store(tmp_path) as store:
        await store.write(drop)
    async with dialect(tmp_path) as client:
        assert [await client.batch(), await client.batch(), await client.batch()] == [["1"], ["2"], None]
        assert await client.get("/status") == {"current_step": 2, "queue_size": 0}
