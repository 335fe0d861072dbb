"""Time comes from outside: code asks a `Clock`, so that tests turn the hands themselves."""

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds that only move forward; good for durations, meaningless across processes."""

    def wall(self) -> float:
        """Seconds since 1970; comparable across processes, and it may jump."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """Moves when told to. `advance` wakes sleepers in order, and lets them run in between."""

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
        """Move the hands without waking anybody: for code that only reads the time."""
        self._now += seconds

    async def advance(self, seconds: float) -> None:
        until = self._now + seconds
        await _let_others_run()
        while self._sleepers and self._sleepers[0][0] <= until:
            at, _, woken = heapq.heappop(self._sleepers)
            self._now = max(self._now, at)  # after a jump a sleeper may be overdue; time never moves back for it
            if not woken.done():
                woken.set_result(None)
            await _let_others_run()
        self._now = until


async def _let_others_run() -> None:
    # A woken task may need several turns of the loop before it sleeps again; twenty is far more than any chain here has.
    for _ in range(20):
        await asyncio.sleep(0)
