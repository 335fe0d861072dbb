"""Clocks are passed in, so that tests control the time. `WALL_CLOCK` is the clock of events, spans and metrics."""

import asyncio
import heapq
import itertools
import time
from collections import deque
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds: for durations, not comparable between processes."""

    def wall(self) -> float:
        """Seconds since 1970: comparable between processes, up to a change of the system's clock after one of them started."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """`wall` reads the system's clock once and then advances steadily: leases must not end, or last for a day, when the clock of
    the machine is set.
    """

    def __init__(self) -> None:
        self._started = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return self._started + time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """Moves only by `advance` and `jump`. `advance` wakes sleepers in order and lets them run in between."""

    def __init__(self, start: float = 1_000.0) -> None:
        self._now = start
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + max(0.0, seconds), next(self._order), woken))
        await woken

    def jump(self, seconds: float) -> None:
        """Move the time without waking sleepers: for code that only reads it."""
        self._now += seconds

    async def advance(self, seconds: float) -> None:
        until = self._now + seconds
        await _run_other_tasks()
        while self._sleepers and self._sleepers[0][0] <= until:
            at, _, woken = heapq.heappop(self._sleepers)
            self._now = max(self._now, at)  # after a jump a sleeper may be overdue
            if not woken.done():
                woken.set_result(None)
            await _run_other_tasks()
        self._now = until


async def _run_other_tasks() -> None:
    # A woken task may need several iterations of the loop before it sleeps again; no chain here needs twenty.
    for _ in range(20):
        await asyncio.sleep(0)


OFFSET_SAMPLES = 8
"""The newest measurements. The one with the shortest round trip is used: it has the smallest error."""


class WallClock:
    """The clock of the run's ledger, so that times of several machines can be compared.

    A process on another machine measures the offset of its clock with each heartbeat. Each measurement bounds the offset: the
    ledger reported its time after the request was sent and before the response arrived.
    """

    def __init__(self) -> None:
        self.offset_s = 0.0
        """Added to the times of this machine."""
        self._samples: deque[tuple[float, float]] = deque(maxlen=OFFSET_SAMPLES)

    def now(self) -> float:
        return self.corrected(time.time())

    def corrected(self, at: float) -> float:
        """A time of this machine's clock, on the ledger's clock."""
        return at + self.offset_s

    def measure(self, *, sent: float, received: float, reported: float) -> bool:
        """Add a measurement: the times of request and response here, and the time that the ledger reported. True if the offset
        changed."""
        self._samples.append((received - sent, reported - (sent + received) / 2))
        round_trip, offset = min(self._samples)
        # An offset within the error of its measurement is none.
        found = offset if abs(offset) > round_trip / 2 else 0.0
        # A better measurement of the same offset changes nothing: times in a file should not jump.
        if abs(found - self.offset_s) <= round_trip / 2:
            return False
        self.offset_s = found
        return True


WALL_CLOCK = WallClock()
"""The clock of this process."""
