"""The ledger of a simulated run: the rules of the real one, on counters and lists instead of a store.

Admission is `FreshnessRule.capacity`, batch forming is `freshness.is_stale` and `freshness.choose`: the functions that the
real ledger calls. Only the bookkeeping around them is different. A test feeds the same history to both and compares every decision.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollbook.contracts.freshness import BatchPolicy, Candidate, FreshnessRule, GateCounts, choose, is_stale
from rollbook.contracts.group import GroupId

_UNUSED_ID = GroupId("")
"""The rules choose by sequence and arrival; nothing simulated has an id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBatch:
    step: int
    taken: tuple[Candidate, ...]
    cut: int | None


@dataclass(slots=True)
class _OpenGroup:
    version: int
    """The version at its admission."""
    units: int
    """What is still played: 1, or samples with policy `parts`."""
    part: int = 1


class SimulatedLedger:
    """All amounts are in units of the gate: groups, or samples with policy `parts`."""

    def __init__(self, rule: FreshnessRule) -> None:
        self.rule = rule
        self.version = 0
        self.decided = 0
        self.opened = self.queued = self.batched = 0
        self.dropped: Counter[str] = Counter()
        """Units by kind of drop."""
        self._open: dict[int, _OpenGroup] = {}
        self._leased = 0
        self._leased_by_version: Counter[int] = Counter()
        self._oldest_dispatched = 0
        self._arrivals = 0
        self._queue: list[Candidate] = []
        self._key: Callable[[Candidate], tuple[int, int]] = (
            (lambda c: (c.arrival, 0)) if rule.policy is BatchPolicy.DROP else (lambda c: (c.sequence, c.part))
        )
        self._next_sequence = 0
        self._unchecked: list[Candidate] = []
        """Queued since the last check for stale groups."""
        self._checked_step = 0
        self._is_unchanged = False
        """The last try to form a batch failed, and nothing that it depends on has changed since."""

    @property
    def leased(self) -> int:
        return self._leased

    @property
    def oldest_dispatched(self) -> int | None:
        """The lowest sequence that is still played."""
        while self._oldest_dispatched < self._next_sequence and self._oldest_dispatched not in self._open:
            self._oldest_dispatched += 1
        return self._oldest_dispatched if self._open else None

    @property
    def capacity(self) -> int:
        """New groups that the gate would admit now."""
        aged = 0
        if self.rule.policy.masks_tokens:
            oldest = self.version - self.rule.max_head_offpolicy_versions
            aged = sum(units for version, units in self._leased_by_version.items() if version < oldest)
        counts = GateCounts(leased=self._leased, queued=self.queued, batches_decided=self.decided, aged=aged)
        return self.rule.capacity(counts, version=self.version)

    def open(self, limit: int) -> list[int]:
        """Admit up to `limit` groups. Returns their sequence numbers."""
        granted: list[int] = []
        while len(granted) < limit and self.capacity >= 1:
            sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
            self._open[sequence] = _OpenGroup(version=self.version, units=self.rule.unit)
            self._lease(self.version, self.rule.unit)
            self.opened += self.rule.unit
            granted.append(sequence)
        return granted

    def submit(
        self, sequence: int, *, samples: int, oldest_version: int, newest_version: int, drop: str | None = None
    ) -> Candidate:
        """Store a group, or with policy `parts` the next `samples` of it. With `drop`, it is stored and not trained."""
        group = self._open[sequence]
        size = samples if self.rule.policy is BatchPolicy.PARTS else 1
        candidate = Candidate(
            group_id=_UNUSED_ID,
            sequence=sequence,
            arrival=self._arrivals,
            oldest_version=oldest_version,
            newest_version=newest_version,
            part=group.part,
            size=size,
        )
        self._arrivals += 1
        group.part += 1
        group.units -= size
        self._lease(group.version, -size)
        if group.units == 0:
            was_oldest = self.oldest_dispatched == sequence
            del self._open[sequence]
            self._is_unchanged &= not was_oldest
        if drop is not None:
            self.dropped[drop] += size
            return candidate
        insort(self._queue, candidate, key=self._key)
        self._unchecked.append(candidate)
        self.queued += size
        # A candidate behind the front cannot change the choice.
        last = self._queue[min(len(self._queue), self.rule.batch_size) - 1]
        self._is_unchanged &= self._key(candidate) > self._key(last)
        return candidate

    def close(self, sequence: int, drop: str) -> None:
        """Settle what is left of a group without storing it."""
        group = self._open.pop(sequence)
        self._lease(group.version, -group.units)
        self.dropped[drop] += group.units
        self._is_unchanged = False

    def publish(self, version: int) -> None:
        """Every replica has this version."""
        self.version = version

    def decide(self, step: int) -> SimulatedBatch | None:
        """The batch of `step`, if there are enough groups. Drops stale ones, as the real ledger does at every request."""
        if step != self.decided + 1:
            raise ValueError(f"batch {step} cannot be decided, the next one is {self.decided + 1}")
        self._drop_stale(step)
        if self._is_unchanged or self.queued < self.rule.batch_size:
            return None
        front = self._queue[: self.rule.batch_size]
        taken = choose(front, oldest_dispatched=self.oldest_dispatched, rule=self.rule, step=step)
        size = sum(candidate.size for candidate in taken)
        if size < self.rule.batch_size:
            self._is_unchanged = True
            return None
        self._remove(taken)
        self.batched += size
        self.decided = step
        return SimulatedBatch(step=step, taken=taken, cut=self.rule.cut(step))

    def _drop_stale(self, step: int) -> None:
        # Staleness depends on the step alone, so a group is checked once for each step.
        to_check = self._unchecked if step == self._checked_step else self._queue
        stale = [candidate for candidate in to_check if is_stale(candidate, self.rule, step=step)]
        if stale:
            self._remove(stale)
            self.dropped["stale"] += sum(candidate.size for candidate in stale)
        self._unchecked, self._checked_step = [], step

    def _remove(self, candidates: Iterable[Candidate]) -> None:
        removed = {id(candidate): candidate.size for candidate in candidates}
        self._queue = [candidate for candidate in self._queue if id(candidate) not in removed]
        self.queued -= sum(removed.values())
        self._is_unchanged = False

    def _lease(self, version: int, units: int) -> None:
        self._leased += units
        self._leased_by_version[version] += units
        if not self._leased_by_version[version]:
            del self._leased_by_version[version]
