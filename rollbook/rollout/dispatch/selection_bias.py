"""Audit of selection bias: do the trained groups look like the dispatched ones? Pure.

Dropping stale groups favours fast ones: slow tasks and long responses go missing, and no loss curve shows it. This audit compares
trained groups with all dispatched ones by length, latency and reward, using the Kolmogorov-Smirnov distance. Groups dropped by a
filter are left out on both sides, because they were dropped on purpose.

Masking old tokens selects too: long samples lose more tokens than short ones. `compare_masked` compares the trained tokens with all
trainable ones, by the same measures of their samples.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.admission import PastDraw
from rollbook.contracts.group import GroupId, GroupState

MEASURES = ("tokens", "seconds", "reward")
MIN_GROUPS = 20
"""Trained, and not trained: with fewer groups there is no result."""
MIN_DISTANCE = 0.1
"""A smaller distance between trained and dispatched groups does not matter, even if it is certain."""
KS_CRITICAL = 1.949
"""c(0.001) of the two-sample test: one audit in a thousand warns by chance."""
UNDECIDED = frozenset({GroupState.DISPATCHED, GroupState.QUEUED})
TRAINED = frozenset({GroupState.BATCHED, GroupState.TRAINED, GroupState.DURABLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedGroup:
    """One dispatched group. `is_trained` is None until the ledger has decided."""

    tokens: float | None = None
    seconds: float | None = None
    reward: float | None = None
    is_filtered: bool = False
    is_trained: bool | None = None

    @classmethod
    def from_ledger(cls, outcome: Mapping[str, Any], *, state: str, drop_reason: str | None) -> "PlayedGroup":
        return cls(
            tokens=outcome.get("mean_response_tokens") if outcome.get("num_samples") else None,
            seconds=outcome.get("seconds"),
            reward=outcome.get("reward_mean"),
            is_filtered=bool(drop_reason) and str(drop_reason).startswith("filtered"),
            is_trained=None if state in UNDECIDED else state in TRAINED,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """One measure: the distance, both means, and whether it is a warning."""

    measure: str
    distance: float
    dispatched_mean: float
    trained_mean: float
    is_biased: bool

    def __str__(self) -> str:
        direction = "more" if self.trained_mean > self.dispatched_mean else "less"
        return (
            f"{self.measure}: trained groups have {direction} ({self.trained_mean:.4g} against {self.dispatched_mean:.4g} of "
            f"all, distance {self.distance:.2f})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionReport:
    dispatched: int = 0
    trained: int = 0
    biases: tuple[Bias, ...] = ()

    @property
    def left_out_share(self) -> float:
        return 1.0 - self.trained / self.dispatched if self.dispatched else 0.0

    @property
    def warnings(self) -> tuple[Bias, ...]:
        return tuple(bias for bias in self.biases if bias.is_biased)


def ks_distance(first: Sequence[float] | NDArray[Any], second: Sequence[float] | NDArray[Any]) -> float:
    """The largest difference between two empirical distribution functions: 0 for equal samples, 1 for disjoint ones."""
    a, b = np.sort(np.asarray(first, dtype=np.float64)), np.sort(np.asarray(second, dtype=np.float64))
    if not len(a) or not len(b):
        return 0.0
    at = np.concatenate([a, b])
    below_a = np.searchsorted(a, at, side="right") / len(a)
    below_b = np.searchsorted(b, at, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def compare(groups: Iterable[PlayedGroup]) -> SelectionReport:
    """Compare the trained groups with all decided ones."""
    decided = [group for group in groups if group.is_trained is not None and not group.is_filtered]
    trained = sum(bool(group.is_trained) for group in decided)
    biases = tuple(bias for measure in MEASURES if (bias := _bias(measure, decided)) is not None)
    return SelectionReport(dispatched=len(decided), trained=trained, biases=biases)


def _bias(measure: str, decided: Sequence[PlayedGroup]) -> Bias | None:
    values = [(float(value), bool(g.is_trained)) for g in decided if (value := getattr(g, measure)) is not None]
    trained = [value for value, is_trained in values if is_trained]
    others = [value for value, is_trained in values if not is_trained]
    if len(trained) < MIN_GROUPS:
        return None
    every = trained + others
    distance = ks_distance(trained, every)
    # The test needs independent samples, so it compares trained groups with the others; the report compares with all.
    is_significant = len(others) >= MIN_GROUPS and ks_distance(trained, others) > KS_CRITICAL * math.sqrt(
        (len(trained) + len(others)) / (len(trained) * len(others))
    )
    return Bias(
        measure=measure,
        distance=distance,
        dispatched_mean=float(np.mean(every)),
        trained_mean=float(np.mean(trained)),
        is_biased=is_significant and distance >= MIN_DISTANCE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSample:
    """A sample of a batch: its trainable tokens, and how many of them were trained."""

    trainable: int
    trained: int
    seconds: float | None = None
    reward: float | None = None
    masked_at: NDArray[np.bool_] | None = None
    """For each trainable token, in order: whether it was masked."""


QUARTERS = 4


def masked_by_position(samples: Sequence[MaskedSample]) -> list[float]:
    """The masked share of the tokens in each quarter of their sample, the first one first."""
    tokens, masked = np.zeros(QUARTERS), np.zeros(QUARTERS)
    for sample in samples:
        if sample.masked_at is not None and len(sample.masked_at):
            quarters = np.arange(len(sample.masked_at)) * QUARTERS // len(sample.masked_at)
            tokens += np.bincount(quarters, minlength=QUARTERS)
            masked += np.bincount(quarters, weights=sample.masked_at, minlength=QUARTERS)
    return [float(share) for share in masked / np.maximum(tokens, 1)]


def masked_by_length(samples: Sequence[MaskedSample]) -> list[float]:
    """The masked share of the tokens in each quarter of the samples, the shortest samples first."""
    ordered = sorted(samples, key=lambda sample: sample.trainable)
    parts = [ordered[n * len(ordered) // QUARTERS : (n + 1) * len(ordered) // QUARTERS] for n in range(QUARTERS)]
    tokens = [sum(sample.trainable for sample in part) for part in parts]
    trained = [sum(sample.trained for sample in part) for part in parts]
    return [1.0 - after / before if before else 0.0 for before, after in zip(tokens, trained, strict=True)]


def compare_masked(samples: Sequence[MaskedSample]) -> tuple[Bias, ...]:
    """How the trained tokens differ from all trainable ones, by measure. Empty if there are too few samples."""
    found: list[Bias] = []
    for measure, name in zip(MEASURES, ("trainable", "seconds", "reward"), strict=True):
        known = [sample for sample in samples if getattr(sample, name) is not None]
        values = np.array([getattr(sample, name) for sample in known], dtype=np.float64)
        before = np.array([sample.trainable for sample in known], dtype=np.float64)
        after = np.array([sample.trained for sample in known], dtype=np.float64)
        if len(known) < MIN_GROUPS or not after.sum():
            continue
        order = np.argsort(values, kind="stable")
        shares = [np.cumsum(weights[order]) / weights.sum() for weights in (before, after)]
        # The distribution functions are compared after all samples of equal value.
        ends = np.flatnonzero(np.append(np.diff(values[order]) > 0, True))
        distance = float(np.abs(shares[0] - shares[1])[ends].max())
        found.append(
            Bias(
                measure=measure,
                distance=distance,
                dispatched_mean=float(np.average(values, weights=before)),
                trained_mean=float(np.average(values, weights=after)),
                is_biased=distance >= MIN_DISTANCE,
            )
        )
    return tuple(found)


@dataclass(slots=True)
class SelectionAudit:
    """The last `window` groups of a dispatcher, with their states in the ledger."""

    window: int
    _groups: dict[GroupId, PlayedGroup] = field(default_factory=dict)

    def add_settled(
        self, group_id: GroupId, *, tokens: float | None, seconds: float, reward: float | None, is_filtered: bool
    ) -> None:
        self._add(group_id, PlayedGroup(tokens=tokens, seconds=seconds, reward=reward, is_filtered=is_filtered))

    def add_released(self, group_id: GroupId, *, seconds: float) -> None:
        """A group that timed out or lost its worker. `seconds` is a lower bound."""
        self._add(group_id, PlayedGroup(seconds=seconds))

    def update(self, past: Iterable[PastDraw]) -> None:
        """Take over the ledger's decisions."""
        for draw in past:
            known = self._groups.get(draw.group_id)
            if known is not None and draw.state not in UNDECIDED:
                self._groups[draw.group_id] = replace(known, is_trained=draw.state in TRAINED)

    def report(self) -> SelectionReport:
        return compare(self._groups.values())

    def _add(self, group_id: GroupId, group: PlayedGroup) -> None:
        self._groups.pop(group_id, None)
        self._groups[group_id] = group
        while len(self._groups) > self.window:
            self._groups.pop(next(iter(self._groups)))
