"""Is what is trained like what was dispatched? A selection-bias audit. Pure.

Whoever discards what is late trains on what is fast: slow tasks and long answers quietly go missing, and no loss curve shows it. So
the groups that were trained are compared with all that were dispatched, by length, latency and reward, with the statistic of
Kolmogorov and Smirnov: the largest distance between the two distributions. Groups that a filter dropped are left out on both sides:
they were chosen against on purpose.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.admission import PastDraw
from rollbook.contracts.group import GroupId, GroupState

MEASURES = ("tokens", "seconds", "reward")
LEAST_GROUPS = 20
"""Of either kind: below this nothing can be told."""
LEAST_DISTANCE = 0.1
"""Between trained and dispatched: less is no bias that matters, however sure it is."""
CERTAINTY = 1.949
"""c(0.001) of the two-sample test: by chance alone one audit in a thousand would warn."""
TRAINED = frozenset({GroupState.BATCHED, GroupState.TRAINED, GroupState.DURABLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What is known of one dispatched group. `is_trained` is None while nobody has decided."""

    tokens: float | None = None
    seconds: float | None = None
    reward: float | None = None
    is_filtered: bool = False
    is_trained: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """One measure: the distance, the two means, and whether it is a warning."""

    measure: str
    distance: float
    dispatched_mean: float
    trained_mean: float
    is_biased: bool

    def __str__(self) -> str:
        sign = "more" if self.trained_mean > self.dispatched_mean else "less"
        return (
            f"{self.measure}: trained groups have {sign} ({self.trained_mean:.4g} against {self.dispatched_mean:.4g} of "
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
    """The largest difference between the shares of two samples that lie below a value: 0 alike, 1 apart."""
    a, b = np.sort(np.asarray(first, dtype=np.float64)), np.sort(np.asarray(second, dtype=np.float64))
    if not len(a) or not len(b):
        return 0.0
    at = np.concatenate([a, b])
    below_a = np.searchsorted(a, at, side="right") / len(a)
    below_b = np.searchsorted(b, at, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def compare(groups: Iterable[Played]) -> SelectionReport:
    """Compare what was trained with all whose fate is known."""
    known = [group for group in groups if group.is_trained is not None and not group.is_filtered]
    trained = sum(bool(group.is_trained) for group in known)
    biases = tuple(bias for measure in MEASURES if (bias := _bias(measure, known)) is not None)
    return SelectionReport(dispatched=len(known), trained=trained, biases=biases)


def _bias(measure: str, known: Sequence[Played]) -> Bias | None:
    values = [(float(value), bool(g.is_trained)) for g in known if (value := getattr(g, measure)) is not None]
    inside = [value for value, is_trained in values if is_trained]
    outside = [value for value, is_trained in values if not is_trained]
    if len(inside) < LEAST_GROUPS:
        return None
    everything = inside + outside
    distance = ks_distance(inside, everything)
    # The two parts share no group, so the test is made between them; what is told is the distance to the whole.
    is_sure = len(outside) >= LEAST_GROUPS and ks_distance(inside, outside) > CERTAINTY * math.sqrt(
        (len(inside) + len(outside)) / (len(inside) * len(outside))
    )
    return Bias(
        measure=measure,
        distance=distance,
        dispatched_mean=float(np.mean(everything)),
        trained_mean=float(np.mean(inside)),
        is_biased=is_sure and distance >= LEAST_DISTANCE,
    )


@dataclass(slots=True)
class SelectionAudit:
    """Remembers the last `window` groups of a dispatcher, and what the ledger says became of them."""

    window: int
    _groups: dict[GroupId, Played] = field(default_factory=dict)

    def landed(
        self, group_id: GroupId, *, tokens: float | None, seconds: float, reward: float | None, is_filtered: bool
    ) -> None:
        self._remember(group_id, Played(tokens=tokens, seconds=seconds, reward=reward, is_filtered=is_filtered))

    def given_up(self, group_id: GroupId, *, seconds: float) -> None:
        """It took too long or its worker died: so long at least."""
        self._remember(group_id, Played(seconds=seconds))

    def heard(self, past: Iterable[PastDraw]) -> None:
        for draw in past:
            known = self._groups.get(draw.group_id)
            if known is None or draw.state in (GroupState.DISPATCHED, GroupState.QUEUED):
                continue
            self._groups[draw.group_id] = Played(
                tokens=known.tokens,
                seconds=known.seconds,
                reward=known.reward,
                is_filtered=known.is_filtered,
                is_trained=draw.state in TRAINED,
            )

    def report(self) -> SelectionReport:
        return compare(self._groups.values())

    def _remember(self, group_id: GroupId, played: Played) -> None:
        self._groups.pop(group_id, None)
        self._groups[group_id] = played
        while len(self._groups) > self.window:
            self._groups.pop(next(iter(self._groups)))


def played_of(outcome: Mapping[str, Any], *, state: str, drop_reason: str | None) -> Played:
    """From a row of the ledger."""
    is_open = state in (GroupState.DISPATCHED, GroupState.QUEUED)
    return Played(
        tokens=outcome.get("mean_response_tokens") if outcome.get("num_samples") else None,
        seconds=outcome.get("seconds"),
        reward=outcome.get("reward_mean"),
        is_filtered=bool(drop_reason) and str(drop_reason).startswith("filtered"),
        is_trained=None if is_open else state in TRAINED,
    )
