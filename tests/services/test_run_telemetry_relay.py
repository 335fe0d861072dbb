"""Telemetry of other machines through a ledger service without a run directory: stored once, bounded, losses counted."""

import asyncio
import io
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError, TransientError
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.http import relay
from rollbook.ledger.http.relay import Relay, RelayFullError
from rollbook.ledger.http.verbs import CollectTelemetry, ShipTelemetry
from rollbook.run.members.member_tasks import TelemetryCollector
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.shipping import Shipper
from tests.parts.ledger.groups import RUN, settings
from tests.parts.ledger.service import serving

LOG_FILE = "logs/policy-a.jsonl"


@asynccontextmanager
async def replica(directory: Path, *, request_s: float = 30.0) -> AsyncIterator[LedgerClient]:
    """A ledger service without a run directory."""
    async with serving(directory) as (url, _), open_ledger_client(url, RUN, request_s=request_s) as ledger:
        await ledger.create_run(settings())
        yield ledger


class Machine:
    """Another machine: a process writes its log there and sends it."""

    def __init__(self, root: Path) -> None:
        self._directory = root / "machine"
        (self._directory / "logs").mkdir(parents=True)
        self.shed = 0
        self.ledger: LedgerClient | None = None
        self.shipper = Shipper(self._directory, self._send, on_shed=self._count)

    def write(self, text: str) -> None:
        with (self._directory / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(text)

    async def _send(self, file: str, data: bytes, *, stream: str, start: int) -> None:
        assert self.ledger is not None
        await self.ledger.ship_telemetry(file, data, stream=stream, start=start)

    def _count(self, _: str, num_bytes: int) -> None:
        self.shed += num_bytes


class Head:
    """The supervisor's machine, with the run directory."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "run"
        (self.directory / "logs").mkdir(parents=True)
        self._events = io.StringIO()

    def collector(self, *ledgers: LedgerClient) -> TelemetryCollector:
        return TelemetryCollector(self.directory, ledgers, log=EventLog("supervisor", echo=self._events))

    @property
    def stored(self) -> str:
        return (self.directory / LOG_FILE).read_text(encoding="utf-8")

    @property
    def lost(self) -> list[int]:
        lines = self._events.getvalue().splitlines()
        return [int(re.findall(r"bytes=(\d+)", line)[0]) for line in lines if "run.telemetry_lost" in line]


async def test_what_a_machine_writes_is_stored_in_the_run_directory_once_and_in_order(tmp_path: Path) -> None:
    machine, head = Machine(tmp_path), Head(tmp_path)
    async with replica(tmp_path / "ledger") as machine.ledger:
        collector = head.collector(machine.ledger)
        for line in ("first\n", "second\n", "third\n"):
            machine.write(line)
            await machine.shipper.ship()
        assert await collector.collect() == 3
        assert await collector.collect() == 0
        machine.write("fourth\n")
        await machine.shipper.ship()
        running = asyncio.create_task(collector.run())
        while "fourth" not in head.stored:  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.01)
        running.cancel()
        assert head.stored == "first\nsecond\nthird\nfourth\n"
        assert head.lost == []


async def test_telemetry_that_a_restart_of_the_service_lost_is_counted(tmp_path: Path) -> None:
    machine, head = Machine(tmp_path), Head(tmp_path)
    async with replica(tmp_path / "one") as one, replica(tmp_path / "two") as two:
        collector = head.collector(one, two)
        machine.ledger = one
        machine.write("a" * 9 + "\n")
        await machine.shipper.ship()
        await collector.collect()
        async with replica(tmp_path / "lost") as machine.ledger:  # never collected
            machine.write("b" * 19 + "\n")
            await machine.shipper.ship()
        machine.ledger = two
        machine.write("c" * 29 + "\n")
        await machine.shipper.ship()
        await collector.collect()
    assert head.stored == "a" * 9 + "\n" + "c" * 29 + "\n"
    assert head.lost == [20]


async def test_a_sender_that_moves_to_another_replica_keeps_its_order(tmp_path: Path) -> None:
    machine, head = Machine(tmp_path), Head(tmp_path)
    async with replica(tmp_path / "one") as one, replica(tmp_path / "two") as two:
        for number, machine.ledger in enumerate((two, one, two)):
            machine.write(f"line {number}\n")
            await machine.shipper.ship()
        await head.collector(one, two).collect()
    assert head.stored == "line 0\nline 1\nline 2\n"
    assert head.lost == []


async def test_a_full_relay_refuses_and_the_sender_sheds_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "MAX_RUN_BYTES", 1000)
    monkeypatch.setattr("rollbook.telemetry.shipping.MAX_BACKLOG_BYTES", 2000)
    monkeypatch.setattr("rollbook.telemetry.shipping.KEPT_BYTES", 500)
    machine, head = Machine(tmp_path), Head(tmp_path)
    async with replica(tmp_path / "ledger", request_s=3.0) as machine.ledger:
        machine.write("a" * 599 + "\n")
        await machine.shipper.ship()
        machine.write(("b" * 99 + "\n") * 10)
        with pytest.raises(TransientError, match="wait for its supervisor"):
            await machine.shipper.ship()
        machine.write(("c" * 99 + "\n") * 15)
        with pytest.raises(TransientError):
            await machine.shipper.ship()
        collector = head.collector(machine.ledger)
        await collector.collect()
        await collector.collect()
        await machine.shipper.ship()
        await collector.collect()
    assert machine.shed == 1000 + 1100
    assert head.stored == "a" * 599 + "\n" + ("c" * 99 + "\n") * 4
    assert head.lost == []


async def test_only_telemetry_files_of_known_runs_are_kept(tmp_path: Path) -> None:
    async with replica(tmp_path / "ledger") as ledger:
        with pytest.raises(RunError, match="not the name of a telemetry file"):
            await ledger.ship_telemetry("../token", b"x", stream="s", start=0)


def test_the_telemetry_of_a_run_that_stopped_makes_room_for_others() -> None:
    clock = ManualClock()
    kept = Relay(clock)
    batch = ShipTelemetry(file=LOG_FILE, data=bytes(1 << 20), stream="s", start=0)
    for number in range(10):
        for _ in range(6):
            kept.keep(RunId(f"run-{number}"), batch)
    for _ in range(3):
        kept.keep(RunId("new"), batch)
    with pytest.raises(RelayFullError):
        kept.keep(RunId("new"), batch)
    clock.jump(relay.ABANDONED_S / 2)
    kept.collect(RunId("run-0"), CollectTelemetry())
    clock.jump(relay.ABANDONED_S / 2)
    kept.keep(RunId("new"), batch)
    assert len(kept.collect(RunId("run-0"), CollectTelemetry()).batches) == 1  # one fits a reply
    assert kept.collect(RunId("run-1"), CollectTelemetry()).batches == ()
