"""How long an event loop makes others wait: every server measures its own."""

from rollbook.concurrency.clock import Clock
from rollbook.telemetry.prometheus import Histogram

TICK_S = 0.05
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class LoopLag:
    """Sleeps briefly, again and again, and notes how much too late it woke: that long, everybody waited."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds = Histogram(BOUNDS_S)
        self.worst_s = 0.0

    async def run(self) -> None:
        """Waits: for the clock. Gives: `seconds`, `worst_s`. Ends: on cancellation."""
        while True:
            asleep_since = self._clock.now()
            await self._clock.sleep(TICK_S)
            late = max(0.0, self._clock.now() - asleep_since - TICK_S)
            self.seconds.add(late)
            self.worst_s = max(self.worst_s, late)
