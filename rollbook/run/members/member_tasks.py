"""What the supervisor does for the members of its run: lists them, announces the run, and collects their telemetry."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from rollbook.contracts.admission import Member, MemberRole
from rollbook.contracts.errors import RollbookError
from rollbook.ledger.client.client import LedgerClient
from rollbook.run.config.run import load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.ledger_clients import open_run_ledger
from rollbook.run.members.announcer import announce
from rollbook.run.members.telemetry_collector import collect_telemetry
from rollbook.telemetry.events import EventLog

WATCH_S = 2.0


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
