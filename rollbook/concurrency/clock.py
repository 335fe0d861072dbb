"""Clocks are passed in, so that tests control the time."""

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds: for durations, not comparable between processes."""

    def wall(self) -> float:
        """Seconds since 1970: comparable between processes, up to a change of the system's clock after one of them started."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """`wall` reads the system's clock once and then advances steadily: leases must not end, or last for a day, when somebody sets
    the clock of the machine.
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
