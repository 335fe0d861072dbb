"""A circuit breaker: after several failures in a row a replica is left alone for a while, then tried once.

closed --failures--> open --time--> half open --success--> closed;  half open --failure--> open, for longer
"""

from enum import StrEnum

FAILURES_TO_OPEN = 3
"""One lost connection is chance; three in a row are a dead process."""
FIRST_OPEN_S = 0.5
MOST_OPEN_S = 15.0
"""A replica that comes back after minutes is noticed within this."""


class Circuit(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    def __init__(self) -> None:
        self._failures = 0
        self._open_s = FIRST_OPEN_S
        self._open_until: float | None = None
        self._probing_until: float | None = None

    def state(self, now: float) -> Circuit:
        if self._open_until is None:
            return Circuit.CLOSED
        return Circuit.OPEN if now < self._open_until else Circuit.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Half open, one at a time: until it is known how the first one went, others go elsewhere."""
        state = self.state(now)
        if state is Circuit.HALF_OPEN:
            return self._probing_until is None or now >= self._probing_until
        return state is Circuit.CLOSED

    def began(self, now: float) -> None:
        if self.state(now) is Circuit.HALF_OPEN:
            # A probe that never ends must not close the way for good.
            self._probing_until = now + MOST_OPEN_S

    def succeeded(self) -> None:
        self._failures, self._open_s = 0, FIRST_OPEN_S
        self._open_until = self._probing_until = None

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._open_until is not None and now >= self._open_until:
            self._open_s = min(MOST_OPEN_S, self._open_s * 2)
            self._open_until, self._probing_until = now + self._open_s, None
        elif self._open_until is None and self._failures >= FAILURES_TO_OPEN:
            self._open_until = now + self._open_s
