"""`StalenessController`: how many groups the dispatcher requests from the ledger. Pure.

The ledger admits groups in one transaction, by the formula of `contracts/freshness.py`. The dispatcher never requests more than it
can play, and keeps the totals that the metrics show. With batch policy `parts` a slot has room for the samples of one group, and a
group that was submitted in part leaves the rest of its slot to others.

It also works alone, without a ledger, for a loop in one process: `published(0)`, then `begin` while `capacity` is above 0,
`settled` for each group that ends, `batch_taken` for each trained batch, and `published` for each version.
"""

from rollbook.contracts.admission import GateState, LedgerStatus, OpenReply
from rollbook.contracts.freshness import FreshnessRule, GateCounts

MAX_PROPOSED = 256
"""Draws in one request: keeps it small. The next request follows at once."""


class StalenessController:
    def __init__(self, rule: FreshnessRule, *, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}; a dispatcher must be able to play at least one group")
        self._rule = rule
        # The ledger grants at most `max_in_flight` groups to all dispatchers together; more slots would stay empty.
        self._slots = min(slots, rule.max_in_flight)
        self.limit = self._slots
        """Groups this dispatcher plays at the same time, at most."""
        self.capacity = 0
        """New groups that the gate would admit, by the last response of the ledger."""
        self.running = 0
        """What is being played: groups, or samples with batch policy `parts`."""
        self.accepted = 0
        self.rejected = 0
        self.gate = GateState.NO_POLICY
        self.version: int | None = None
        """The last published version. None if a ledger counts."""
        self._batches = 0
        self._queued = 0

    def set_limit(self, limit: int) -> None:
        """Groups that are running already continue."""
        self.limit = max(1, min(self._slots, limit))

    @property
    def free(self) -> int:
        """Whole slots that are free."""
        return max(0, self.limit * self._rule.unit - self.running) // self._rule.unit

    @property
    def to_propose(self) -> int:
        """Groups to request now: every free slot, because the gate may open at any moment."""
        return min(self.free, MAX_PROPOSED)

    def opened(self, reply: OpenReply) -> None:
        self.running += sum(grant.part.units for grant in reply.grants)
        self.capacity = reply.capacity
        self.gate = reply.gate

    def update(self, status: LedgerStatus) -> None:
        """Recompute gate and capacity from the status, by the gate's own formula."""
        self.gate = status.gate
        self.capacity = 0 if status.version is None else self._rule.capacity(status.counts, version=status.version)

    def count(self, *, is_accepted: bool) -> None:
        """A group or a part was stored (accepted) or dropped (rejected)."""
        self.accepted += is_accepted
        self.rejected += not is_accepted
        self._queued += is_accepted
        self._recount()

    def freed(self, units: int) -> None:
        """This much is not played any more: a group, or samples with batch policy `parts`."""
        if units > self.running:
            raise ValueError(f"{units} ended, but {self.running} were running")
        self.running -= units

    # ------------------------------------------------------------------ without a ledger

    def settled(self, *, is_accepted: bool) -> None:
        """A group was stored (accepted) or dropped (rejected)."""
        self.freed(1)
        self.count(is_accepted=is_accepted)

    def released(self) -> None:
        """A group left without a result."""
        self.freed(1)

    def published(self, version: int) -> None:
        """The policy has this version from now on."""
        self.version = version
        self.gate = GateState.OPEN
        self._recount()

    def begin(self) -> None:
        """A group starts."""
        if self.capacity < 1:
            raise ValueError("the gate admits no group now; wait until capacity is above 0")
        self.running += 1
        self._recount()

    def batch_taken(self, num_groups: int) -> None:
        """A batch was taken from the accepted groups."""
        self._batches += 1
        self._queued -= num_groups
        self._recount()

    def dropped(self) -> None:
        """An accepted group was dropped before it was in a batch."""
        self._queued -= 1
        self._recount()

    def _recount(self) -> None:
        if self.version is not None:
            counts = GateCounts(leased=self.running, queued=self._queued, batches_decided=self._batches)
            self.capacity = self._rule.capacity(counts, version=self.version)
