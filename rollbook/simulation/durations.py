"""How long the parts of a run take: the input of a simulation. Measured by `trace.py`, or written by hand."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rollbook.simulation.processors import UNLIMITED, Processors

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request to the policy and the environment's response."""

    work: float
    """Its duration relative to an average request under the same load."""
    act_s: float
    """Seconds of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    turns: tuple[Turn, ...]
    other_s: float = 0.0
    """Seconds that are neither the policy's nor the environment's: opening, scoring."""
    tokens: int = 1
    """Trained tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDurations:
    """The recorded groups of a task. The episodes of a group stay together: they ran at the same time, and resemble each other."""

    groups: tuple[tuple[Episode, ...], ...]
    drop_share: float = 0.0
    """Share of its groups that were filtered or invalid."""

    def draw(self, samples: int, rng: random.Random) -> Sequence[Episode]:
        """The episodes of a recorded group; if it has another size, a random choice of them."""
        episodes = rng.choice(self.groups)
        if len(episodes) == samples:
            return episodes
        return rng.sample(episodes, samples) if len(episodes) > samples else rng.choices(episodes, k=samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTime:
    """Seconds of an average policy request by load: an affine function of the requests that a replica has at that moment."""

    base_s: float
    per_request_s: float
    """Added for each concurrent request on the same device: of the same replica, or of all replicas on one GPU."""
    per_total_s: float = 0.0
    """Added for each concurrent request of any replica: what replicas on one machine share."""
    per_worker_s: float = 0.0
    """Added for each concurrent request of the same worker process."""
    slowdown: float = 0.0
    """Relative slowdown while the trainer trains, because both share a device."""

    def slope(self, *, replicas: int, per_device: int, workers: int) -> float:
        """Seconds for each concurrent request of one replica. Requests are spread evenly over replicas and workers."""
        return self.per_request_s * per_device + replicas * self.per_total_s + replicas / workers * self.per_worker_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTime:
    """Seconds of a training step by the size of its batch."""

    base_s: float = 0.0
    per_sample_s: float = 0.0
    per_token_s: float = 0.0
    slowdown: float = 0.0
    """Relative slowdown while requests are generated."""
    spread: tuple[float, ...] = (1.0,)
    """Measured durations relative to the expected ones."""

    def seconds(self, *, samples: int, tokens: int) -> float:
        """Without generation at the same time."""
        return self.base_s + self.per_sample_s * samples + self.per_token_s * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    tasks: tuple[TaskDurations, ...]
    request: RequestTime
    training: TrainingTime
    processors: Processors = UNLIMITED
    settle_s: tuple[float, ...] = (0.0,)
    """From the end of a training step until every replica has its weights and the ledger has confirmed them."""
    open_s: float = 0.0
    """From the admission of a group to the start of its episodes."""
    submit_s: float = 0.0
    """From the end of the last episode until the ledger has stored the group."""
    fetch_s: float = 0.0
    """From the decision of a batch until the trainer has it."""
    between_steps_s: float = 0.0
    """The trainer's own work between two steps: metrics, the copy of its state for a checkpoint."""


@dataclass(slots=True)
class EpisodeSource:
    """Draws tasks and episodes at random, by the recorded shares.

    The recorded training and publication times are used evenly, in an order that does not depend on the episodes: two simulated
    runs differ by their settings only, and a few steps have the recorded mean.
    """

    durations: Durations
    rng: random.Random
    _cumulative: list[int] = field(init=False)
    _spread: Sequence[float] = field(init=False)
    _settle_s: Sequence[float] = field(init=False)
    _trained: int = 0
    _settled: int = 0

    def __post_init__(self) -> None:
        self._cumulative = list(accumulate(len(task.groups) for task in self.durations.tasks))
        self._spread = sorted(self.durations.training.spread)
        self._settle_s = sorted(self.durations.settle_s)

    def group(self, samples: int) -> tuple[Sequence[Episode], bool]:
        """The episodes of one draw, and whether the group is dropped at its end."""
        task = self.rng.choices(self.durations.tasks, cum_weights=self._cumulative)[0]
        is_dropped = task.drop_share > 0 and self.rng.random() < task.drop_share
        return task.draw(samples, self.rng), is_dropped

    def settle_s(self) -> float:
        self._settled += 1
        return _evenly(self._settle_s, self._settled)

    def training_s(self, *, samples: int, tokens: int) -> float:
        self._trained += 1
        expected = self.durations.training.seconds(samples=samples, tokens=tokens)
        return expected * _evenly(self._spread, self._trained)


def _evenly(ordered: Sequence[float], number: int) -> float:
    """Multiples of the golden ratio cover the values evenly, however many are taken."""
    return ordered[int(number * GOLDEN % 1.0 * len(ordered))]
