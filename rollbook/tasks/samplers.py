"""Samplers choose the next task among the open ones. Pure: the same task states, position and seed give the same task.

Random numbers are a hash of (seed, position, task), so no generator state must be kept over restarts.

The mastery sampler draws the task with the highest score: novelty + weakness + repetition - recency. Repetition grows with every
draw that a task is overdue, which bounds every wait. Let B = (novelty + weakness) / repetition. Once a task is overdue by more than
B, any task drawn before it was due at most B later, and is then not due for a while. So every other task is drawn before it at most
once, and the wait is at most its interval + B + the number of open tasks.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollbook.tasks.config import CurriculumConfig

NEVER = -1
"""`last_position` of a task that was never drawn."""
_GOLDEN, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStates:
    """The state of every task, in the order of the source."""

    is_open: NDArray[np.bool_]
    """Its tier is open."""
    open_since: NDArray[np.int64]
    """The position at which its tier opened; waiting starts there."""
    num_draws: NDArray[np.int64]
    last_position: NDArray[np.int64]
    rate: NDArray[np.float64]
    is_graduated: NDArray[np.bool_]
    reviews: NDArray[np.int64]
    weight: NDArray[np.float64]


class Sampler(Protocol):
    def choose(self, states: TaskStates, position: int) -> int:
        """The open task for the draw at `position`."""


def random_numbers(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """One random number in [0, 1) for each task, the same on every machine (splitmix64)."""
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
    """The open task with the fewest draws, the first one of equals: rounds in the order of the source."""

    def choose(self, states: TaskStates, position: int) -> int:
        return int(np.argmin(np.where(states.is_open, states.num_draws, np.iinfo(np.int64).max)))


@dataclass(frozen=True, slots=True)
class WeightedSampler:
    """Random, in proportion to the weights of the open tasks."""

    seed: int

    def choose(self, states: TaskStates, position: int) -> int:
        reached = np.cumsum(np.where(states.is_open, states.weight, 0.0))
        mark = float(random_numbers(self.seed, position, 1)[0]) * reached[-1]
        # Rounding may move the mark to the very end; then the last open task is meant.
        return min(int(np.searchsorted(reached, mark, side="right")), int(np.flatnonzero(states.is_open)[-1]))


@dataclass(frozen=True, slots=True)
class MasterySampler:
    """The highest score; a random one of equals."""

    rules: CurriculumConfig
    seed: int

    def choose(self, states: TaskStates, position: int) -> int:
        scores = np.where(states.is_open, self.scores(states, position), -np.inf)
        best = np.flatnonzero(scores == scores.max())
        return int(best[np.argmax(random_numbers(self.seed, position, len(scores))[best])])

    def scores(self, states: TaskStates, position: int) -> NDArray[np.float64]:
        rules = self.rules
        round_draws = max(1, int(states.is_open.sum()))
        waited = position - np.where(
            states.last_position == NEVER,
            states.open_since,
            np.maximum(states.last_position, states.open_since),
        )
        overdue = np.maximum(0.0, waited - self.intervals(states, round_draws))
        drawn_ago = position - states.last_position
        recent = np.where(states.last_position == NEVER, 0.0, np.maximum(0.0, 1.0 - drawn_ago / round_draws))
        scores: NDArray[np.float64] = (
            rules.novelty / (1.0 + states.num_draws)
            + rules.weakness * (1.0 - states.rate)
            + rules.repetition * overdue
            - rules.recency * recent
        )
        return scores

    def intervals(self, states: TaskStates, round_draws: int) -> NDArray[np.float64]:
        """Draws after which each task is due again."""
        rules = self.rules
        # After sixty doublings every interval is the longest; larger powers would overflow.
        doubled = rules.repeat_after * np.exp2(np.minimum(states.reviews, 60))
        graduated = np.minimum(rules.repeat_at_most, doubled)
        return np.where(states.is_graduated, graduated, rules.longest_wait) * round_draws


def build_sampler(rules: CurriculumConfig, *, seed: int) -> Sampler:
    match rules.sampler:
        case "mastery":
            return MasterySampler(rules, seed)
        case "weighted":
            return WeightedSampler(seed)
        case "sequential":
            return SequentialSampler()
