"""Waking whoever waits for a run to move. No polling: a commit rings, the waiters look again."""

import asyncio

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import RunId


class Bell:
    """One for all runs. Take a ticket *before* looking, so that a ring between looking and waiting is not missed."""

    def __init__(self) -> None:
        self._tickets: dict[RunId, asyncio.Event] = {}

    def ticket(self, run_id: RunId) -> asyncio.Event:
        return self._tickets.setdefault(run_id, asyncio.Event())

    def ring(self, run_id: RunId) -> None:
        """Wake everybody who holds a ticket; the next ticket is a new one."""
        rung = self._tickets.pop(run_id, None)
        if rung is not None:
            rung.set()

    def ring_all(self) -> None:
        for run_id in list(self._tickets):
            self.ring(run_id)

    async def wait(self, ticket: asyncio.Event, *, at_most_s: float, clock: Clock) -> None:
        """Return when the bell rings or the time is over."""
        async with asyncio.TaskGroup() as group:
            heard = group.create_task(ticket.wait(), name="ledger.bell")
            late = group.create_task(clock.sleep(at_most_s), name="ledger.bell_timeout")
            await asyncio.wait((heard, late), return_when=asyncio.FIRST_COMPLETED)
            heard.cancel()
            late.cancel()
