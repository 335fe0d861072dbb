"""How processes that need more cores than the machine has slow each other down.

A trace shows how many cores they need. Its durations are slowed by its own shortage of cores: divide them by `slowness_during`.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.simulation.trace import Trace, TracedCpu
from rollbook.telemetry.intervals import Intervals

Array = NDArray[np.float64]

TRAINER_ROLES = frozenset({"trainer", "rank"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    cores: float
    request_s: float = 0.0
    """CPU seconds of all processes but the trainer for each policy request."""
    worker_s: float = 0.0
    """CPU seconds of the workers for each policy request. A worker has one event loop: it uses at most one core."""
    trainer: float = 0.0
    """Cores that the trainer needs while it trains."""

    def worker_slowness(self, *, rate: float, workers: int) -> float:
        """How much longer requests take because the workers cannot handle `rate` requests per second."""
        return max(1.0, rate * self.worker_s / workers)

    def slowness(self, *, rate: float, is_training: bool) -> float:
        """How much longer requests take because the cores are shared."""
        requests = rate * self.request_s
        if not is_training or requests + self.trainer <= self.cores:
            return max(1.0, requests / self.cores)
        if self.trainer >= 1.0:
            return (requests + self.trainer) / self.cores
        # A trainer that computes only part of its time slows down by that part: `training_slowness`. So it uses
        # trainer / (1 - trainer + trainer * slowness) cores, the requests use requests / slowness, both together all of them.
        squared, linear = self.cores * self.trainer, self.cores * (1.0 - self.trainer) - (requests + 1.0) * self.trainer
        constant = requests * (1.0 - self.trainer)
        root = math.sqrt(linear**2 + 4.0 * squared * constant)
        # The form that subtracts no close numbers.
        found = 2.0 * constant / (root + linear) if linear > 0 else (root - linear) / (2.0 * squared)
        return max(1.0, found)

    def training_slowness(self, slowness: float) -> float:
        """How much longer training takes where requests take `slowness` times as long."""
        return 1.0 + min(1.0, self.trainer) * (slowness - 1.0)


UNLIMITED = Processors(cores=math.inf)
"""For traces without CPU times, and for runs on several machines."""


@dataclass(frozen=True, slots=True)
class _Activity:
    """What the cores of a trace were needed for: shares of its time, and the number of its requests."""

    cpu: TracedCpu
    seconds: float
    busy: float
    training: float
    requests: int

    @classmethod
    def of(cls, trace: Trace, cpu: TracedCpu) -> "_Activity":
        begin, end = trace.steps[0].start, trace.steps[-1].end
        seconds = max(end - begin, 1e-9)
        busy, training = (found.union().within(begin, end) for found in (trace.requests, trace.training))
        starts = trace.requests.starts
        return cls(
            cpu=cpu,
            seconds=seconds,
            busy=max(1e-9, float(busy.lengths.sum()) / seconds),
            training=max(1e-9, float(training.lengths.sum()) / seconds),
            requests=int(((starts >= begin) & (starts < end)).sum()),
        )

    def used_s(self, roles: Set[str]) -> float:
        return self.seconds * sum(self.cpu.used.get(role, 0.0) for role in roles)

    def needed(self, roles: Set[str]) -> float:
        """Mean number of cores. A process that waits for a core needs one as well."""
        return sum(self.cpu.used.get(role, 0.0) + self.cpu.waited.get(role, 0.0) for role in roles)

    @property
    def computing(self) -> float:
        """The share of a training step in which the trainer needed a core."""
        return min(1.0, self.needed(TRAINER_ROLES) / self.training)

    def slowness(self, *, is_busy: bool, is_training: bool) -> float:
        needed = is_busy * self.needed(self.cpu.used.keys() - TRAINER_ROLES) / self.busy
        needed += is_training * self.needed(TRAINER_ROLES) / self.training
        return max(1.0, needed / self.cpu.cores)


def fit_processors(traces: Sequence[Trace]) -> Processors:
    """`UNLIMITED` unless every trace has CPU times."""
    known = [_Activity.of(trace, trace.cpu) for trace in traces if trace.cpu is not None]
    if len(known) < len(traces):
        return UNLIMITED
    requests = max(1, sum(did.requests for did in known))
    training_s = sum(float(training_seconds(trace).sum()) for trace in traces)
    return Processors(
        cores=sum(did.cpu.cores for did in known) / len(known),
        request_s=sum(did.used_s(did.cpu.used.keys() - TRAINER_ROLES) for did in known) / requests,
        worker_s=sum(did.used_s({"worker"}) for did in known) / requests,
        trainer=sum(did.used_s(TRAINER_ROLES) for did in known) / training_s,
    )


def slowness_during(trace: Trace, periods: Intervals) -> Array:
    """By how much the shortage of cores of a trace slowed what computes all of the time, in each of these periods."""
    if trace.cpu is None:
        return np.ones(len(periods))
    did = _Activity.of(trace, trace.cpu)
    busy, training = trace.share_with_requests(periods), trace.share_with_training(periods)
    return (
        (1.0 - busy) * (1.0 - training)
        + busy * (1.0 - training) * did.slowness(is_busy=True, is_training=False)
        + (1.0 - busy) * training * did.slowness(is_busy=False, is_training=True)
        + busy * training * did.slowness(is_busy=True, is_training=True)
    )


def training_seconds(trace: Trace) -> Array:
    """What each training step would have taken with enough cores."""
    steps = trace.step_times
    if trace.cpu is None:
        return steps.lengths
    # Only the part of a step in which the trainer computed or waited for a core was slowed.
    slowness, computing = slowness_during(trace, steps), _Activity.of(trace, trace.cpu).computing
    return steps.lengths * (computing / slowness + 1.0 - computing)
