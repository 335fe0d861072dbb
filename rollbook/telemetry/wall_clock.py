"""The clock of events, spans and metrics: that of the run's ledger, so that times of several machines can be compared.

A process on another machine measures the offset of its clock with each heartbeat. Each measurement bounds the offset: the ledger
reported its time after the request was sent and before the response arrived.
"""

import time
from collections import deque

SAMPLES = 8
"""The newest measurements. The one with the shortest round trip is used: it has the smallest error."""


class WallClock:
    def __init__(self) -> None:
        self.offset_s = 0.0
        """Added to the times of this machine."""
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)

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


CLOCK = WallClock()
"""The clock of this process."""
