"""Several Atropos servers on one store: real `run-api` processes, and trainers that request batches from all of them."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from rollbook.commands.servers.ledger import compact_store
from rollbook.commands.servers.run_api import EXIT_CANNOT_SERVE
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError
from rollbook.ledger.atropos.rules import SERVING_LEASE_S
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.serve import open_ledger_service
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.stores.registry import open_reader, sqlite_url
from rollbook.ledger.tools.audit import audit
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.atropos import name_of, registration, scored
from tests.parts.ledger.postgres import shared_server
from tests.parts.ledger.run_api import RunApi, running_api
from tests.parts.run.small import rollbook

GROUPS = 60
GROUPS_PER_BATCH = 2


@pytest.fixture
def url() -> str:
    return shared_server().fresh_url()


@pytest.fixture
def servers(url: str) -> Iterator[list[RunApi]]:
    """The first server creates the tables; then the second one starts."""
    with ExitStack() as stack:
        apis = []
        for _ in range(2):
            apis.append(stack.enter_context(running_api(url)))
            apis[-1].wait_until_listening()
        yield apis


async def get_batch(session: aiohttp.ClientSession, api: RunApi) -> list[str] | None:
    async with session.get(f"{api.url}/batch") as answer:
        assert answer.status == 200, await answer.text()
        batch = (await answer.json())["batch"]
        return None if batch is None else [name_of(group) for group in batch]


async def post(session: aiohttp.ClientSession, api: RunApi, path: str, body: Any) -> None:
    async with session.post(api.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()


def require_audit(url: str) -> None:
    with open_reader(url) as reader:
        assert audit(reader, RunId("atropos")).violations == ()


async def test_servers_of_one_postgresql_store_never_hand_out_a_batch_twice(servers: list[RunApi], url: str) -> None:
    delivered: list[list[str]] = []

    async def train(session: aiohttp.ClientSession, api: RunApi) -> None:
        while sum(map(len, delivered)) < GROUPS:
            if (batch := await get_batch(session, api)) is not None:
                delivered.append(batch)

    async def produce(session: aiohttp.ClientSession, api: RunApi, first: int) -> None:
        for number in range(first, GROUPS, len(servers)):
            await post(session, api, "/scored_data", scored(number))

    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        await post(session, servers[0], "/register", registration(2 * GROUPS_PER_BATCH))
        await asyncio.gather(
            *(train(session, api) for api in servers for _ in range(2)),
            *(produce(session, api, first) for first, api in enumerate(servers)),
        )
        assert [await get_batch(session, api) for api in servers] == [None, None]
    assert sorted(int(name) for batch in delivered for name in batch) == list(range(GROUPS))
    assert {len(batch) for batch in delivered} == {GROUPS_PER_BATCH}
    require_audit(url)


@pytest.mark.slow
async def test_a_server_that_was_stopped_while_it_sent_a_batch_does_not_complete_it_after_another_has_sent_it(
    servers: list[RunApi], url: str
) -> None:
    first, second = servers
    # Larger than the buffers of the connection: the first server waits for its reader.
    images = ["x" * 900_000]
    async with asyncio.timeout(180), aiohttp.ClientSession(read_bufsize=2**16) as session:
        await post(session, first, "/register", registration(64))
        for number in range(32):
            await post(session, first, "/scored_data", scored(number, 2, images=images))
        async with session.get(f"{first.url}/batch", headers={"Accept-Encoding": "identity"}) as answer:
            received = await answer.content.read(1000)
            server: psutil.Process = first.server()
            server.send_signal(signal.SIGSTOP)
            try:
                assert await get_batch(session, second) is None, "the first server has the batch"
                await asyncio.sleep(SERVING_LEASE_S)
                assert await get_batch(session, second) == [str(number) for number in range(32)]
            finally:
                server.send_signal(signal.SIGCONT)
            try:
                received += await answer.content.read()
            except aiohttp.ClientError:
                received = b""
        with pytest.raises(json.JSONDecodeError):
            json.loads(received)
        assert [await get_batch(session, api) for api in servers] == [None, None]
    require_audit(url)


def test_run_api_prints_its_address_and_its_store_without_the_password(capfd: pytest.CaptureFixture[str]) -> None:
    with running_api("mysql://me:secret@host/groups") as api:
        assert api.wait() == EXIT_CANNOT_SERVE
    printed = capfd.readouterr().err
    assert f"run-api: {api.url}  store mysql://me:***@host/groups  run atropos\n" in printed
    assert "a store of scheme 'mysql' is unknown" in printed
    assert "secret" not in printed


@pytest.mark.slow
def test_a_second_server_of_a_sqlite_store_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    store = sqlite_url(tmp_path / "ledger")
    with running_api(store) as first:
        first.wait_until_ready()
        with running_api(store) as second:
            assert second.wait() == EXIT_CANNOT_SERVE
        compacted = rollbook("ledger", "compact", "--store", store)
        assert compacted.returncode != 0
        assert f"is in use by another service (pid {first.server().pid})" in compacted.stderr
        assert "Traceback" not in compacted.stderr
        # A killed server holds no lock.
        first.kill_server()
        first.wait_until_ready()
    with running_api(store) as third:
        third.wait_until_ready()


def test_ledger_serve_prints_its_store_without_the_password() -> None:
    refused = rollbook("ledger", "serve", "--store", "mysql://me:secret@host/groups", "--port", "0")
    assert "opening mysql://me:***@host/groups" in refused.stderr
    assert "secret" not in refused.stderr


def test_a_store_that_does_not_exist_is_not_created_by_a_compaction(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no ledger"):
        compact_store(sqlite_url(tmp_path / "mistyped"), run=None, up_to_step=None)
    assert list(tmp_path.iterdir()) == []


async def test_a_second_service_of_a_sqlite_store_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    store, log = sqlite_url(tmp_path / "ledger"), EventLog("test")
    for _ in range(2):
        async with open_ledger_service(store, LedgerConfig(), log=log):
            with pytest.raises(StoreFaultError, match=f"is in use by another service .pid {os.getpid()}."):
                async with open_ledger_service(store, LedgerConfig(), log=log):
                    raise AssertionError("a second service was opened")
            with pytest.raises(StoreFaultError, match="is in use by another service"):
                await asyncio.to_thread(compact_store, store, run=None, up_to_step=None)
            with open_reader(store) as reader:  # needs no lock
                assert reader.read_now(lambda tx: list(tx.runs.ids())) == []
