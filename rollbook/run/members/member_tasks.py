"""What the supervisor does for the members of its run: lists them, announces the run, and collects their telemetry."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

from rollbook.contracts.admission import Member, MemberRole
from rollbook.contracts.errors import RollbookError
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.http.verbs import ShipTelemetry
from rollbook.run.config.run import LoadedConfig, load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.ledger_clients import external_token, open_run_ledger
from rollbook.run.members.announced_run import announce
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.shipping import ReceivedFiles

WATCH_S = 2.0
COLLECT_EVERY_S = 1.0
REQUEST_S = 3.0
"""A replica that does not respond must not delay the others."""


async def serve_members(
    directory: RunDirectory,
    addresses: Mapping[str, str],
    *,
    log: EventLog,
    on_change: Callable[[list[Member]], None],
) -> None:
    """Ends: on cancellation. `on_change` is called with the processes that joined the run, for `top` and the dashboard."""
    loaded = load_resolved_config(directory)
    async with (
        open_run_ledger(loaded, directory, addresses["ledger"], log=log) as ledger,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(watch_members(ledger, on_change), name="run.list_members")
        group.create_task(announce(loaded, directory, addresses, log=log), name="run.announce")
        if loaded.config.ledger.url is not None:
            urls = addresses["ledger"].split(",")
            group.create_task(collect_telemetry(loaded, directory.path, urls, log=log), name="run.collect_telemetry")


async def watch_members(ledger: LedgerClient, on_change: Callable[[list[Member]], None]) -> None:
    """Report the processes that joined the run, now and after each change.

    Takes:  the list of the ledger, every `WATCH_S`.
    Ends:   on cancellation. While the ledger does not respond, the last list stays.
    """
    known: list[Member] | None = None
    while True:
        with suppress(RollbookError):
            found = [member for member in await ledger.members() if member.role is not MemberRole.SUPERVISOR]
            # Each heartbeat changes the time of the last one.
            if [replace(member, last_seen=0.0) for member in found] != known:
                known = [replace(member, last_seen=0.0) for member in found]
                on_change(found)
        await asyncio.sleep(WATCH_S)


class _Source:
    """One replica of the service, and the last batch that was stored from it."""

    def __init__(self, ledger: LedgerClient) -> None:
        self._ledger = ledger
        self._relay = ""
        self._after = 0

    async def collect(self) -> list[ShipTelemetry]:
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
    """Stores telemetry of processes on other machines in the run directory, where the ledger is a service that does not see it.

    These processes send batches to the service, which keeps them in memory. The supervisor collects them from every replica.
    """

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

    def _store(self, batch: ShipTelemetry) -> None:
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
