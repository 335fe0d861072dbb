"""Who is drawn next, among the open tasks. Pure: the same standing, position and seed give the same task.

Chance is a digest of (seed, position, task), so there is no generator whose state would have to be kept over restarts.

By mastery, a task's score is novelty + weakness + repetition − recency, and the highest is drawn. Repetition grows with every draw
that a task is overdue and with nothing else, which bounds every wait: let B = (novelty + weakness) / repetition. Once a task is
overdue by more than B, whoever is drawn before it was due no later than B after it, and is then not due for a while. So each other
task comes before it once at most, and the wait is at most its interval + B + the number of open tasks.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollbook.tasks.curriculum_config import CurriculumConfig

NEVER = -1
"""`last_position` of a task that was not drawn yet."""
_GOLDEN, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Every task at one moment, side by side. Index is the task's place in the source."""

    is_open: NDArray[np.bool_]
    """Its tier is unlocked."""
    open_since: NDArray[np.int64]
    """The position at which its tier was unlocked: waiting begins there."""
    num_draws: NDArray[np.int64]
    last_position: NDArray[np.int64]
    rate: NDArray[np.float64]
    is_graduated: NDArray[np.bool_]
    reviews: NDArray[np.int64]
    weight: NDArray[np.float64]


class Sampler(Protocol):
    def choose(self, standing: Standing, position: int) -> int:
        """The task of the draw at `position`: always an open one."""


def chances(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """One number in [0, 1) for each task: the same on every machine (splitmix64)."""
    with np.errstate(over="ignore"):
        at = np.array([seed % 2**64, position % 2**64], dtype=np.uint64)
        start = _mixed(_mixed(at[:1]) + at[1:])
        mixed = _mixed(start + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


class SequentialSampler:
    """Round after round in the order of the source: the open task that was drawn least, the earlier one of equals."""

    def choose(self, standing: Standing, position: int) -> int:
        return int(np.argmin(np.where(standing.is_open, standing.num_draws, np.iinfo(np.int64).max)))


@dataclass(frozen=True, slots=True)
class WeightedSampler:
    """By chance, in proportion to the weights of the open tasks."""

    seed: int

    def choose(self, standing: Standing, position: int) -> int:
        reached = np.cumsum(np.where(standing.is_open, standing.weight, 0.0))
        mark = float(chances(self.seed, position, 1)[0]) * reached[-1]
        # The product may be rounded up to the very end; the last open task holds that place.
        return min(int(np.searchsorted(reached, mark, side="right")), int(np.flatnonzero(standing.is_open)[-1]))


@dataclass(frozen=True, slots=True)
class MasterySampler:
    """By score; equals by chance."""

    rules: CurriculumConfig
    seed: int

    def choose(self, standing: Standing, position: int) -> int:
        scores = np.where(standing.is_open, self.scores(standing, position), -np.inf)
        best = np.flatnonzero(scores == scores.max())
        return int(best[np.argmax(chances(self.seed, position, len(scores))[best])])

    def scores(self, standing: Standing, position: int) -> NDArray[np.float64]:
        rules = self.rules
        round_draws = max(1, int(standing.is_open.sum()))
        has_waited = position - np.where(
            standing.last_position == NEVER,
            standing.open_since,
            np.maximum(standing.last_position, standing.open_since),
        )
        overdue = np.maximum(0.0, has_waited - self.intervals(standing, round_draws))
        drawn_ago = position - standing.last_position
        recent = np.where(standing.last_position == NEVER, 0.0, np.maximum(0.0, 1.0 - drawn_ago / round_draws))
        scores: NDArray[np.float64] = (
            rules.novelty / (1.0 + standing.num_draws)
            + rules.weakness * (1.0 - standing.rate)
            + rules.repetition * overdue
            - rules.recency * recent
        )
        return scores

    def intervals(self, standing: Standing, round_draws: int) -> NDArray[np.float64]:
        """Draws after which each task is due again."""
        rules = self.rules
        # Beyond sixty doublings every interval is the longest one; further on the power itself would be infinite.
        doubled = rules.repeat_after * np.exp2(np.minimum(standing.reviews, 60))
        graduated = np.minimum(rules.repeat_at_most, doubled)
        return np.where(standing.is_graduated, graduated, rules.longest_wait) * round_draws


def build_sampler(rules: CurriculumConfig, *, seed: int) -> Sampler:
    match rules.sampler:
        case "mastery":
            return MasterySampler(rules, seed)
        case "weighted":
            return WeightedSampler(seed)
        case "sequential":
            return SequentialSampler()
