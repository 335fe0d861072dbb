"""Expires the leases of silent members, of silent dispatchers and of overdue attempts. Their groups get another attempt."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RollbookError, RunError
from rollbook.ledger.rules import gate, groups, members
from rollbook.ledger.rules.run_transaction import RunTransaction, run_transaction
from rollbook.ledger.store import Store, Transaction
from rollbook.telemetry.events import EventLog

T = TypeVar("T")

TICK_S = 1.0
"""Interval between checks; small compared with deadlines of many seconds."""
STALL_S = 5.0
"""A check that takes longer shows that the store did not respond. Members send a heartbeat every 5 s and have a lease of 15 s."""


class LeaseExpiry:
    def __init__(self, *, store: Store, clock: Clock, log: EventLog) -> None:
        self._store = store
        self._clock = clock
        self._log = log
        self._unchecked: set[RunId] = set()
        """Runs whose leases could not be checked, so that heartbeats may be missing too. Their leases are extended first."""

    async def recover(self) -> None:
        """After a start: drop groups whose payload was lost, and extend leases, since no heartbeat could arrive meanwhile."""
        async with self._stall_reported():
            for run_id in await self._store.write(lambda tx: [run for run in tx.runs.ids() if tx.payloads.lost(run)]):
                num_lost = await self._write(run_id, groups.drop_lost, self._clock.wall())
                self._log.warning("ledger.payloads_lost", run=run_id, groups=num_lost)
            for run_id in await self._store.read(lambda tx: tx.runs.with_leases()):
                await self._extend_leases(run_id)

    async def run(self) -> None:
        """Expire leases at every tick until cancelled. A failing store is logged and tried again.

        While the store does not respond (a database that restarts or fails over), heartbeats cannot be stored. Leases are extended
        afterwards. A run that cannot be read, because of a damaged row, does not affect the others.
        """
        has_stalled = False
        while True:
            await self._clock.sleep(TICK_S)
            now = self._clock.wall()
            try:
                async with self._stall_reported() as report:
                    await self._expire(now, must_extend=has_stalled)
                has_stalled = report.done()
            except RollbookError as error:
                has_stalled = True
                self._log.error("ledger.expiry_failed", error=str(error))

    async def _expire(self, now: float, *, must_extend: bool) -> None:
        runs = await self._store.read(lambda tx: tx.runs.with_leases())
        if must_extend:
            self._unchecked.update(runs)
        for run_id in runs:
            try:
                await self._expire_run(run_id, now)
            except RunError as error:
                self._unchecked.add(run_id)
                self._log.error("ledger.expiry_failed", run=run_id, error=str(error))

    async def _expire_run(self, run_id: RunId, now: float) -> None:
        if run_id in self._unchecked:
            await self._extend_leases(run_id)
            self._unchecked.remove(run_id)
            self._log.warning("ledger.leases_extended", run=run_id, cause="the store did not respond")
        for member in await self._write(run_id, members.expire, now):
            self._log.warning("ledger.member_expired", run=run_id, member=member.member_id, name=member.name)
        moved = await self._write(run_id, gate.expire, now)
        if moved:
            self._log.warning("ledger.leases_expired", run=run_id, groups=moved)

    @asynccontextmanager
    async def _stall_reported(self) -> AsyncIterator[asyncio.Task[None]]:
        """Log a block that has not ended after `STALL_S`, while it still waits. The task is done if it did.

        Its writes wait behind those of all requests, so it also shows that requests wait.
        """
        reporting = asyncio.create_task(self._report_stall(), name="ledger.stall_report")
        try:
            yield reporting
        finally:
            reporting.cancel()

    async def _report_stall(self) -> None:
        await self._clock.sleep(STALL_S)
        self._log.warning(
            "ledger.store_stalled",
            after_s=STALL_S,
            cause="the store has not responded; requests wait. PostgreSQL: does it run, and is its synchronous standby connected?",
        )

    async def _extend_leases(self, run_id: RunId) -> None:
        await self._write(run_id, gate.extend_leases, self._clock.wall())
        await self._write(run_id, members.extend_leases, self._clock.wall())

    async def _write(self, run_id: RunId, rule: Callable[[RunTransaction], T], now: float) -> T:
        def work(tx: Transaction) -> T:
            with run_transaction(tx, run_id, now) as run_tx:
                return rule(run_tx)

        return await self._store.write(work, run_id=run_id)
