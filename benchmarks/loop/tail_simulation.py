"""Simulates the four batch policies with episodes of log-normal duration: how fast can the loop be, and what does each policy cost?

The model is a loop without overhead. A step of P groups of n episodes takes 1 to train (more if the batch holds more samples),
weights are updated in flight, and at most (O + 1) P n episodes run. An event is the end of an episode or of a training step.
"""

import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field

from rollbook.contracts.freshness import BatchPolicy

TAKES_WHOLE_GROUPS = frozenset({BatchPolicy.WAIT, BatchPolicy.DROP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`mean` is the mean duration of an episode, in training steps; `shape` is the sigma of its logarithm."""

    max_head_offpolicy_versions: int
    mean: float
    shape: float
    groups_per_step: int = 8
    group_size: int = 8
    quorum: int = 4

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

    def duration(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.mean) - self.shape**2 / 2, self.shape) if self.shape else self.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    speed: float
    """Speed relative to the ideal."""
    masked: float
    """Share of the sampled tokens that was masked."""
    dropped: float
    """Share of the episodes that was dropped."""


@dataclass(slots=True, eq=False)
class _Group:
    sequence: int
    version: int
    running: int
    finished: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of the episodes that were not submitted yet."""
    num_finished: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    group: _Group
    episodes: list[tuple[float, float]]


class Simulation:
    def __init__(self, policy: BatchPolicy, workload: Workload, *, seed: int) -> None:
        self._policy = policy
        self._load = workload
        self._rng = random.Random(seed)
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

    def run(self, steps: int) -> Outcome:
        self._admit()
        while self._version < steps:
            if self._training_ends is None and (samples := self._decide()):
                self._training_ends = self._now + samples / self._load.samples_per_step
            elif self._training_ends is not None and (not self._running or self._training_ends <= self._running[0][0]):
                self._now, self._training_ends = self._training_ends, None
                self._published_at.append(self._now)
            else:
                self._finish_episode()
            self._admit()
        steps_done = self._trained / self._load.samples_per_step
        return Outcome(
            speed=steps_done * self._load.ideal_step / self._now,
            masked=self._masked / self._trained,
            dropped=self._dropped / self._opened,
        )

    def _admit(self) -> None:
        """Open groups while the gate and the slots allow it."""
        size, per_step = self._load.group_size, self._load.samples_per_step
        allowed = (self._load.max_head_offpolicy_versions + self._version + 1) * per_step
        while True:
            queued = sum(len(part.episodes) for part in self._queue)
            taken = per_step * self._decided + queued + self._expected()
            if allowed - taken < size or len(self._running) + size > self._load.slots:
                return
            group = _Group(next(self._sequences), self._version, size)
            self._open[group.sequence] = group
            self._opened += size
            for _ in range(size):
                ends = self._now + self._load.duration(self._rng)
                heapq.heappush(self._running, (ends, group.sequence, self._now))

    def _expected(self) -> int:
        """Samples that the gate expects from open groups."""
        if self._policy in TAKES_WHOLE_GROUPS:
            return len(self._open) * self._load.group_size
        oldest = self._version - self._load.max_head_offpolicy_versions
        young = [group for group in self._open.values() if group.version >= oldest]
        if self._policy is BatchPolicy.PARTS:
            return sum(group.running + len(group.finished) for group in young)
        return len(young) * self._load.group_size

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

    def _decide(self) -> int:
        """Form the next batch. Returns its number of samples, or 0."""
        oldest = self._decided - self._load.max_head_offpolicy_versions
        cut = self._published_at[oldest] if oldest > 0 else 0.0
        if self._policy is not BatchPolicy.WAIT:
            self._drop_stale(oldest, cut)
        order = sorted(self._queue, key=lambda part: part.group.sequence)
        if self._policy is BatchPolicy.WAIT:
            first_open = min(self._open, default=math.inf)
            order = [part for part in order if part.group.sequence < first_open]
        elif self._policy is BatchPolicy.DROP:
            order = list(self._queue)
        sizes = itertools.accumulate(len(part.episodes) for part in order)
        count = next((n for n, total in enumerate(sizes, 1) if total >= self._load.samples_per_step), None)
        if count is None:
            return 0
        batch = [episode for part in order[:count] for episode in part.episodes]
        for part in order[:count]:
            self._queue.remove(part)
        self._masked += sum(max(0.0, min(cut, end) - start) / (end - start) for start, end in batch)
        self._trained += len(batch)
        self._decided += 1
        return len(batch)

    def _drop_stale(self, oldest: int, cut: float) -> None:
        for part in list(self._queue):
            whole = self._policy is BatchPolicy.DROP
            if part.group.version < oldest if whole else max(end for _, end in part.episodes) <= cut:
                self._queue.remove(part)
                self._dropped += len(part.episodes)


def simulate(policy: BatchPolicy, workload: Workload, *, steps: int = 250, seeds: int = 3) -> Outcome:
    """The mean over `seeds` simulations."""
    runs = [Simulation(policy, workload, seed=seed).run(steps) for seed in range(seeds)]
    return Outcome(
        speed=sum(run.speed for run in runs) / seeds,
        masked=sum(run.masked for run in runs) / seeds,
        dropped=sum(run.dropped for run in runs) / seeds,
    )
