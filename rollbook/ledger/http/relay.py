"""What the supervisor of a run and its members exchange through the ledger's service: the announcement of the run, and telemetry
of processes on other machines where the service does not see the run directory.

It is in memory only: announcements contain tokens, and telemetry is not worth a transaction. A restart of the service loses it. The
supervisor repeats its announcement, and counts telemetry that was lost.
"""

import uuid
from collections import deque

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import LEASE_S, RunId
from rollbook.contracts.errors import NotFoundError, TransientError
from rollbook.ledger.http.verbs import CollectTelemetry, RelayedTelemetry, ShipTelemetry, TelemetryReply
from rollbook.ledger.http.wire import Announcement
from rollbook.telemetry.shipping import check_file_name

MAX_RUN_BYTES = 8 << 20
"""Telemetry of one run that its supervisor has not collected."""
MAX_BYTES = 64 << 20
"""Telemetry of all runs."""
REPLY_BYTES = 1 << 20
ABANDONED_S = 600.0
"""A run that did not collect its telemetry for this long has stopped."""
RETRY_AFTER_S = 2.0
BATCH_OVERHEAD_BYTES = 256


class RelayFullError(TransientError):
    """The supervisor has not collected earlier telemetry. The sender keeps its own; what is too much there is shed and counted."""


class _Spool:
    """Telemetry of one run on its way to the supervisor."""

    def __init__(self, now: float) -> None:
        self.batches: deque[RelayedTelemetry] = deque()
        self.num_bytes = 0
        self.last_number = 0
        self.collected_at = now

    def add(self, batch: ShipTelemetry) -> None:
        self.last_number += 1
        self.batches.append(RelayedTelemetry(number=self.last_number, batch=batch))
        self.num_bytes += _size(batch)

    def delete_to(self, number: int) -> None:
        while self.batches and self.batches[0].number <= number:
            self.num_bytes -= _size(self.batches.popleft().batch)

    def oldest(self) -> tuple[RelayedTelemetry, ...]:
        """The oldest batches that fit in one reply, and at least one if there is any."""
        found: list[RelayedTelemetry] = []
        num_bytes = 0
        for entry in self.batches:
            num_bytes += _size(entry.batch)
            if found and num_bytes > REPLY_BYTES:
                break
            found.append(entry)
        return tuple(found)


class Relay:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._id = uuid.uuid4().hex
        self._announced: dict[RunId, tuple[float, Announcement]] = {}
        """With the time at which each announcement ends."""
        self._spools: dict[RunId, _Spool] = {}

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

    def keep(self, run: RunId, batch: ShipTelemetry) -> None:
        """Keep telemetry until the supervisor collects it. Raises `RelayFullError`, and `ValueError` for an invalid file name."""
        check_file_name(batch.file)
        now = self._clock.now()
        self._spools = {name: s for name, s in self._spools.items() if now - s.collected_at < ABANDONED_S}
        spool = self._spools.setdefault(run, _Spool(now))
        size, total = _size(batch), sum(other.num_bytes for other in self._spools.values())
        if spool.num_bytes + size > MAX_RUN_BYTES or total + size > MAX_BYTES:
            raise RelayFullError(
                f"run {run}: {spool.num_bytes / 2**20:.1f} MiB of telemetry wait for its supervisor; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        spool.add(batch)

    def collect(self, run: RunId, request: CollectTelemetry) -> TelemetryReply:
        """The oldest batches. Those that the request confirms are deleted first."""
        spool = self._spools.get(run)
        if spool is None:
            return TelemetryReply(relay=self._id, batches=())
        spool.collected_at = self._clock.now()
        if request.relay == self._id:
            spool.delete_to(request.after)
        return TelemetryReply(relay=self._id, batches=spool.oldest())

    def _living(self) -> dict[RunId, tuple[float, Announcement]]:
        now = self._clock.now()
        return {run: entry for run, entry in self._announced.items() if entry[0] > now}


def _size(batch: ShipTelemetry) -> int:
    return len(batch.data) + BATCH_OVERHEAD_BYTES
