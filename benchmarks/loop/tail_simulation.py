"""Simulates the four batch policies with episodes of log-normal duration: how fast can the loop be, and what does each policy cost?

The model is a loop without overhead. A step of P groups of n episodes takes 1 to train (more if the batch holds more samples, less
for samples whose tokens are all masked: they are not trained), weights are updated in flight, and at most (O + 1) P n episodes run.
The gate is the real one. An event is the end of an episode or of a training step.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollbook.contracts.freshness import BatchPolicy, FreshnessRule, GateCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`mean` is the mean duration of an episode, in training steps; `shape` is the sigma of its logarithm."""

    max_head_offpolicy_versions: int
    mean: float
    shape: float
    groups_per_step: int = 8
    group_size: int = 8
    quorum: int = 4
    turns: int = 3
    """Times at which tokens are sampled, at equal intervals: the first at the start of the episode, the last at its end."""

    @property
    def samples_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    @property
    def slots(self) -> int:
        """Episodes that may run at the same time."""
        return (self.max_head_offpolicy_versions + 1) * self.samples_per_step

    @property
    def ideal_step(self) -> float:
        """Duration of a step if neither the trainer nor a slot ever waits."""
        return max(1.0, self.mean * self.samples_per_step / self.slots)

    def durations(self, num_groups: int, *, seed: int) -> list[list[float]]:
        """Durations of the episodes of each group, in training steps."""
        rng = random.Random(seed)
        location = math.log(self.mean) - self.shape**2 / 2
        return [[rng.lognormvariate(location, self.shape) for _ in range(self.group_size)] for _ in range(num_groups)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    speed: float
    """Speed relative to the ideal."""
    masked: float
    """Share of the sampled tokens that was masked."""
    dropped: float
    """Share of the episodes that was dropped."""
    duration: float
    """From the start to the end of the last step, in training steps."""


@dataclass(slots=True, eq=False)
class _Group:
    sequence: int
    version: int
    running: int
    finished: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of the episodes that were not submitted yet."""
    num_finished: int = 0

    @property
    def num_missing(self) -> int:
        """Samples that were not submitted yet."""
        return self.running + len(self.finished)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    group: _Group
    episodes: list[tuple[float, float]]


class Simulation:
    """The durations of group number k are `durations[k]`; after the last ones, the first ones follow again."""

    def __init__(self, policy: BatchPolicy, workload: Workload, durations: Sequence[Sequence[float]]) -> None:
        self._policy = policy
        self._load = workload
        self._rule = FreshnessRule(
            groups_per_step=workload.groups_per_step,
            max_in_flight=(workload.max_head_offpolicy_versions + 1) * workload.groups_per_step,
            max_head_offpolicy_versions=workload.max_head_offpolicy_versions,
            policy=policy,
            samples_per_group=workload.group_size,
        )
        self._durations = durations
        self._now = 0.0
        self._decided = 0
        self._published_at = [0.0]
        self._training_ends: float | None = None
        self._open: dict[int, _Group] = {}
        self._running: list[tuple[float, int, float]] = []
        """End, group and start of each running episode."""
        self._queue: deque[_Part] = deque()
        self._sequences = itertools.count()
        self._masked = 0.0
        self._trained = self._dropped = self._opened = 0

    @property
    def _version(self) -> int:
        return len(self._published_at) - 1

    def run(self, steps: int, *, warm_up: int = 0) -> Outcome:
        """Masked tokens and speed are those of the `steps` after the warm-up."""
        self._admit()
        self._run_until(warm_up)
        before, began, self._masked = self._trained, self._now, 0.0
        self._run_until(warm_up + steps)
        trained = self._trained - before
        return Outcome(
            speed=trained / self._load.samples_per_step * self._load.ideal_step / (self._now - began),
            masked=self._masked / trained,
            dropped=self._dropped / self._opened,
            duration=self._now,
        )

    def _run_until(self, steps: int) -> None:
        while self._version < steps:
            if self._training_ends is None and (samples := self._decide()) is not None:
                self._training_ends = self._now + samples / self._load.samples_per_step
            elif self._training_ends is not None and (not self._running or self._training_ends <= self._running[0][0]):
                self._now, self._training_ends = self._training_ends, None
                self._published_at.append(self._now)
            else:
                self._finish_episode()
            self._admit()

    def _admit(self) -> None:
        """Open groups while the gate allows it."""
        while self._rule.capacity(self._gate_counts(), version=self._version) > 0:
            group = _Group(next(self._sequences), self._version, self._load.group_size)
            self._open[group.sequence] = group
            self._opened += self._load.group_size
            for duration in self._durations[group.sequence % len(self._durations)]:
                heapq.heappush(self._running, (self._now + duration, group.sequence, self._now))

    def _gate_counts(self) -> GateCounts:
        aged: list[_Group] = []
        if self._policy.masks_tokens:
            oldest = self._version - self._load.max_head_offpolicy_versions
            aged = [group for group in self._open.values() if group.version < oldest]
        if self._policy is not BatchPolicy.PARTS:
            return GateCounts(
                leased=len(self._open), queued=len(self._queue), batches_decided=self._decided, aged=len(aged)
            )
        return GateCounts(
            leased=sum(group.num_missing for group in self._open.values()),
            queued=sum(len(part.episodes) for part in self._queue),
            batches_decided=self._decided,
            aged=sum(group.num_missing for group in aged),
        )

    def _finish_episode(self) -> None:
        self._now, sequence, started = heapq.heappop(self._running)
        group = self._open[sequence]
        group.running -= 1
        group.num_finished += 1
        group.finished.append((started, self._now))
        has_quorum = self._policy is BatchPolicy.PARTS and group.num_finished >= self._load.quorum
        if group.running == 0 or has_quorum:
            self._queue.append(_Part(group, group.finished))
            group.finished = []
        if group.running == 0:
            del self._open[sequence]

    def _decide(self) -> int | None:
        """Form the next batch. Returns how many of its samples have a token to train. None: there is no batch yet."""
        oldest = self._decided - self._load.max_head_offpolicy_versions
        cut = self._published_at[oldest] if oldest > 0 else 0.0
        if self._policy is not BatchPolicy.WAIT:
            self._drop_stale(cut)
        order = sorted(self._queue, key=lambda part: part.group.sequence)
        if self._policy is BatchPolicy.WAIT:
            first_open = min(self._open, default=math.inf)
            order = [part for part in order if part.group.sequence < first_open + self._rule.window]
        elif self._policy is BatchPolicy.DROP:
            order = list(self._queue)
        sizes = itertools.accumulate(len(part.episodes) for part in order)
        count = next((n for n, total in enumerate(sizes, 1) if total >= self._load.samples_per_step), None)
        if count is None:
            return None
        batch = [episode for part in order[:count] for episode in part.episodes]
        for part in order[:count]:
            self._queue.remove(part)
        masked = [self._masked_share(start, end, cut) for start, end in batch]
        self._masked += sum(masked)
        self._trained += len(batch)
        self._decided += 1
        return sum(share < 1 for share in masked)

    def _masked_share(self, start: float, end: float, cut: float) -> float:
        """Share of the turns whose tokens were sampled before the cut."""
        if cut <= start:
            return 0.0
        interval = (end - start) / (self._load.turns - 1)
        return min(self._load.turns, math.ceil((cut - start) / interval)) / self._load.turns

    def _drop_stale(self, cut: float) -> None:
        for part in list(self._queue):
            if self._policy is BatchPolicy.DROP:
                is_stale = min(start for start, _ in part.episodes) < cut
            else:
                is_stale = max(end for _, end in part.episodes) <= cut
            if is_stale:
                self._queue.remove(part)
                self._dropped += len(part.episodes)
