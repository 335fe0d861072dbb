"""What the supervisor of a run and its members exchange through the ledger's service. It is in memory only: the senders repeat it.

An announcement contains tokens of the run, so it is never written to a store.
"""

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import LEASE_S, RunId
from rollbook.contracts.errors import NotFoundError
from rollbook.ledger.http.wire import Announcement


class Relay:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._announced: dict[RunId, tuple[float, Announcement]] = {}
        """With the time at which each announcement ends."""

    def announce(self, run: RunId, announcement: Announcement) -> None:
        self._announced = {**self._living(), run: (self._clock.now() + LEASE_S, announcement)}

    def announcement(self, run: RunId) -> Announcement:
        """Raises `NotFoundError` if there is none."""
        found = self._living().get(run)
        if found is None:
            raise NotFoundError(
                f"run {run} is not announced: it is not running, or was started without cluster.allow_join = true"
            )
        return found[1]

    def announced(self) -> list[RunId]:
        return sorted(self._living())

    def _living(self) -> dict[RunId, tuple[float, Announcement]]:
        now = self._clock.now()
        return {run: entry for run, entry in self._announced.items() if entry[0] > now}
