"""The ledger's sense of time: takes back what silent dispatchers and ended leases hold."""

from collections.abc import Callable
from typing import TypeVar

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RollbookError
from rollbook.ledger.records import RunRecord
from rollbook.ledger.rules import gate, groups
from rollbook.ledger.rules.book import RunBook, opened_book
from rollbook.ledger.store import Store, Transaction
from rollbook.telemetry.events import EventLog

T = TypeVar("T")

TICK_S = 0.5
"""How often leases and owners are looked at: fine beside deadlines of many seconds."""


class Timekeeper:
    def __init__(self, *, store: Store, clock: Clock, log: EventLog) -> None:
        self._store = store
        self._clock = clock
        self._log = log

    async def recover(self) -> None:
        """After a start: what a power cut took is written off. What is open gets a moment of grace: nobody could be heard."""
        for run_id in await self._store.write(lambda tx: [run for run in tx.runs() if tx.lost_payloads(run)]):
            num_lost = await self._write(run_id, groups.drop_lost)
            self._log.warning("ledger.payloads_lost", run=run_id, groups=num_lost)
        for run in await self._active_runs():
            await self._write(run.run_id, gate.grace)

    async def run(self) -> None:
        """Take back expired leases and the groups of silent dispatchers.

        Waits:  for the clock.
        Gives:  groups that wait for another attempt, or dropped ones.
        Ends:   on cancellation. A store that fails is told and tried again: the calls of others report it, too.
        """
        while True:
            await self._clock.sleep(TICK_S)
            try:
                for run in await self._active_runs():
                    moved = await self._write(run.run_id, gate.expire)
                    if moved:
                        self._log.warning("ledger.leases_expired", run=run.run_id, groups=moved)
            except RollbookError as error:
                self._log.error("ledger.expiry_failed", error=str(error))

    async def _active_runs(self) -> list[RunRecord]:
        def look(tx: Transaction) -> list[RunRecord]:
            return [run for run in map(tx.run, tx.runs()) if run is not None and run.ended is None]

        return await self._store.read(look)

    async def _write(self, run_id: RunId, rule: Callable[[RunBook], T]) -> T:
        now = self._clock.wall()

        def work(tx: Transaction) -> T:
            with opened_book(tx, run_id, now) as book:
                return rule(book)

        return await self._store.write(work)
