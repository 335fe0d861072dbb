"""Wakes calls that wait for a run to change, without polling."""

import asyncio
from weakref import WeakValueDictionary

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import RunId


class RunNotifier:
    """Call `next_change` *before* reading the state, so that a change between reading and waiting is not missed."""

    def __init__(self) -> None:
        # An event lives while a call waits for it. Requests for runs that do not exist leave nothing behind.
        self._changes: WeakValueDictionary[RunId, asyncio.Event] = WeakValueDictionary()

    def next_change(self, run_id: RunId) -> asyncio.Event:
        """An event that is set when the run changes."""
        change = self._changes.get(run_id)
        if change is None:
            change = self._changes[run_id] = asyncio.Event()
        return change

    def notify(self, run_id: RunId) -> None:
        change = self._changes.pop(run_id, None)
        if change is not None:
            change.set()

    def notify_all(self) -> None:
        for run_id in list(self._changes):
            self.notify(run_id)

    async def wait(self, change: asyncio.Event, *, at_most_s: float, clock: Clock) -> None:
        """Return when the event is set or the time is over."""
        async with asyncio.TaskGroup() as group:
            changed = group.create_task(change.wait(), name="ledger.notifier")
            timeout = group.create_task(clock.sleep(at_most_s), name="ledger.notifier_timeout")
            await asyncio.wait((changed, timeout), return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            timeout.cancel()
