"""Stores telemetry of processes on other machines in the run directory, where the ledger is a service that does not see it.

These processes send batches to the service, which keeps them in memory. The supervisor collects them from every replica.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rollbook.contracts.errors import RollbookError
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.http.wire import TelemetryBatch
from rollbook.run.config.run import LoadedConfig
from rollbook.run.ledger_clients import external_token
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.shipping import ReceivedFiles

COLLECT_EVERY_S = 1.0
REQUEST_S = 3.0
"""A replica that does not respond must not delay the others."""


class _Source:
    """One replica of the service, and the last batch that was stored from it."""

    def __init__(self, ledger: LedgerClient) -> None:
        self._ledger = ledger
        self._relay = ""
        self._after = 0

    async def collect(self) -> list[TelemetryBatch]:
        """The next batches. The service deletes those of the call before."""
        try:
            reply = await self._ledger.collect_telemetry(relay=self._relay, after=self._after)
        except RollbookError:
            return []
        self._relay = reply.relay
        if reply.batches:
            self._after = reply.batches[-1].number
        return [entry.batch for entry in reply.batches]


class TelemetryCollector:
    def __init__(self, directory: Path, ledgers: Sequence[LedgerClient], *, log: EventLog) -> None:
        """`ledgers`: clients of the replicas of the service, one each."""
        self._files = ReceivedFiles(directory)
        self._sources = [_Source(ledger) for ledger in ledgers]
        self._log = log

    async def run(self) -> None:
        """Ends: on cancellation."""
        while True:
            while await self.collect():
                pass
            await asyncio.sleep(COLLECT_EVERY_S)

    async def collect(self) -> int:
        """Store the next batches of every replica. Returns their number."""
        replies = await asyncio.gather(*(source.collect() for source in self._sources))
        # A sender that moved to another replica continues its stream there.
        found = sorted((batch for reply in replies for batch in reply), key=lambda b: (b.stream, b.file, b.start))
        for batch in found:
            self._store(batch)
        return len(found)

    def _store(self, batch: TelemetryBatch) -> None:
        try:
            num_lost = self._files.append(batch.file, batch.data, stream=batch.stream, start=batch.start)
        except (OSError, ValueError) as error:
            self._log.warning("run.telemetry_lost", file=batch.file, bytes=len(batch.data), cause=str(error))
            return
        if num_lost:
            self._log.warning("run.telemetry_lost", file=batch.file, bytes=num_lost, cause="the ledger was restarted")


async def collect_telemetry(loaded: LoadedConfig, directory: Path, urls: Sequence[str], *, log: EventLog) -> None:
    """Collect from all replicas of the service at `ledger.url`. Ends: on cancellation."""
    name, token = loaded.config.run.name, external_token(loaded)
    async with AsyncExitStack() as stack:
        opened = [open_ledger_client(url, name, request_s=REQUEST_S, log=log, token=token) for url in urls]
        ledgers = [await stack.enter_async_context(client) for client in opened]
        await TelemetryCollector(directory, ledgers, log=log).run()
