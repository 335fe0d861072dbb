"""`StalenessController`: the dispatcher's hand of the gate. Pure.

The ledger decides, in one transaction, who may begin (its capacity is the formula of `contracts/freshness.py`). This side decides
how many to ask for: never more than it could play, and keeps the running totals that the metrics show.
"""

from rollbook.contracts.admission import GateState, LedgerStatus, OpenReply
from rollbook.contracts.freshness import FreshnessRule

MOST_PROPOSED = 256
"""Draws in one request at most: its size stays small, and the next request follows at once."""


class StalenessController:
    def __init__(self, rule: FreshnessRule, *, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}; a dispatcher must be able to play at least one group")
        self._rule = rule
        # The ledger grants no more than C to all dispatchers together, so more slots than that would never be used.
        self._slots = min(slots, rule.max_in_flight)
        self._limit = self._slots
        self._capacity = 0
        self.running = 0
        self.accepted = 0
        self.rejected = 0
        self.gate = GateState.NO_POLICY

    @property
    def limit(self) -> int:
        """Groups this dispatcher plays at the same time, at most."""
        return self._limit

    def set_limit(self, limit: int) -> None:
        """Play fewer than could be: beyond some number they only wait for the engine. What runs already runs on."""
        self._limit = max(1, min(self._slots, limit))

    @property
    def free(self) -> int:
        return max(0, self._limit - self.running)

    @property
    def to_propose(self) -> int:
        """How many groups to ask for now: all that could be played, for the gate may open wide at any moment."""
        return min(self.free, MOST_PROPOSED)

    @property
    def capacity(self) -> int:
        """New groups the gate would let begin, as last heard."""
        return self._capacity

    def opened(self, reply: OpenReply) -> None:
        self.running += len(reply.grants)
        self._capacity = reply.capacity
        self.gate = reply.gate

    def heard(self, status: LedgerStatus) -> None:
        """Bring the picture up to date from the rows of the ledger: with the very formula the gate uses."""
        self.gate = status.gate
        self._capacity = 0 if status.version is None else self._rule.capacity(status.counts, version=status.version)

    def finished(self, *, is_accepted: bool) -> None:
        """A group was stored (accepted) or dropped (rejected: its place is free again)."""
        self.given_back()
        self.accepted += is_accepted
        self.rejected += not is_accepted

    def given_back(self) -> None:
        """A group left this process without an end: it was released for another attempt."""
        if self.running == 0:
            raise ValueError("a group ended, but none was running")
        self.running -= 1
