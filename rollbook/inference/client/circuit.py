"""The circuit of a replica: after several failures in a row it gets no requests for a while, then one probe.

closed --failures--> open --time--> half open --success--> closed;  half open --failure--> open, for longer
"""

from enum import StrEnum

FAILURES_TO_OPEN = 3
"""One lost connection may be chance; three in a row indicate a dead process."""
FIRST_OPEN_S = 0.5
MAX_OPEN_S = 15.0
"""A replica that returns after minutes is used again within this time."""


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class ReplicaCircuit:
    def __init__(self) -> None:
        self._failures = 0
        self._open_s = FIRST_OPEN_S
        self._open_until: float | None = None
        self._probing_until: float | None = None

    def state(self, now: float) -> CircuitState:
        if self._open_until is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now < self._open_until else CircuitState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """A half-open circuit allows one request at a time."""
        state = self.state(now)
        if state is CircuitState.HALF_OPEN:
            return self._probing_until is None or now >= self._probing_until
        return state is CircuitState.CLOSED

    def start_request(self, now: float) -> None:
        if self.state(now) is CircuitState.HALF_OPEN:
            # A probe that never ends must not block the replica forever.
            self._probing_until = now + MAX_OPEN_S

    def record_success(self) -> None:
        self._failures, self._open_s = 0, FIRST_OPEN_S
        self._open_until = self._probing_until = None

    def record_failure(self, now: float) -> None:
        self._failures += 1
        if self._open_until is not None and now >= self._open_until:
            self._open_s = min(MAX_OPEN_S, self._open_s * 2)
            self._open_until, self._probing_until = now + self._open_s, None
        elif self._open_until is None and self._failures >= FAILURES_TO_OPEN:
            self._open_until = now + self._open_s
