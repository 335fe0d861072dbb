"""Ten thousand idle connections: the ledger keeps serving, with little memory for each."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest

from rollbook.ledger.config import LedgerServerConfig
from rollbook.ledger.serve import allow_many_connections, serve_ledger
from rollbook.ledger.stores.registry import sqlite_url
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN
from tests.parts.ledger.http import Caller, submission

ROOT = Path(__file__).parents[2]
MAX_BYTES_EACH = 40_000
"""Memory of the ledger per idle connection."""


def start(directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    ready = directory / "ready"
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.test_ledger_idle_connections", str(directory)], cwd=ROOT
    )
    until = time.monotonic() + 60
    while not ready.exists():
        assert child.poll() is None, f"the ledger exited with {child.returncode}"
        assert time.monotonic() < until
        time.sleep(0.02)
    return child, ready.read_text(encoding="utf-8").strip()


async def idle(url: str, count: int, pid: int) -> None:
    host, port = url.removeprefix("http://").split(":")
    async with aiohttp.ClientSession() as session:
        caller = Caller(session, url)
        assert (await caller.call("GET", "//health")).status == 200
        before = psutil.Process(pid).memory_info().rss
        writers = []
        for start_at in range(0, count, 500):
            opened = await asyncio.gather(
                *(asyncio.open_connection(host, int(port)) for _ in range(min(500, count - start_at)))
            )
            writers += [writer for _, writer in opened]
        assert len(psutil.Process(pid).net_connections("tcp")) >= count
        created = await caller.call(
            "PUT",
            "",
            {"settings": {"rule": {"groups_per_step": 2, "max_in_flight": 2, "max_head_offpolicy_versions": 1}}},
        )
        assert created.status == 200
        for at in range(20):
            assert (await caller.call("POST", "/submit", submission(f"t{at}"))).status == 200
        assert (await caller.call("GET", "/audit")).json["ok"]
        grown = psutil.Process(pid).memory_info().rss - before
        assert grown < MAX_BYTES_EACH * count
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [500, 10_000])
def test_idle_connections_cost_little_and_hold_up_nobody(tmp_path: Path, count: int) -> None:
    if allow_many_connections() < count + 500:
        pytest.skip(f"this system allows {allow_many_connections()} open files, {count + 500} are needed")
    child, url = start(tmp_path)
    try:
        asyncio.run(idle(url, count, child.pid))
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == 0
    assert not (tmp_path / "ready").exists()


def test_a_second_signal_ends_the_ledger_at_once(tmp_path: Path) -> None:
    child, url = start(tmp_path)

    async def hold() -> None:
        # A body that never arrives keeps the first signal's drain busy.
        async with aiohttp.ClientSession() as session:
            caller = Caller(session, url)
            rule = {"groups_per_step": 2, "max_in_flight": 2, "max_head_offpolicy_versions": 1}
            await caller.call("PUT", "", {"settings": {"rule": rule}})
            host, port = url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                f"POST /v1/runs/{RUN}/submit HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"
                "Content-Length: 1000\r\n\r\n".encode()
            )
            await writer.drain()
            await asyncio.sleep(0.1)
            child.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            child.send_signal(signal.SIGTERM)
            writer.transport.abort()

    asyncio.run(hold())
    assert child.wait(timeout=60) == 128 + signal.SIGTERM


async def _serve(directory: Path) -> None:
    config = LedgerServerConfig(
        store=sqlite_url(directory / "ledger"), port=0, ready_file=directory / "ready", drain_s=30.0
    )
    await serve_ledger(config, log=EventLog("ledger", echo=sys.stdout))


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
