"""Mastery of tasks and tiers, as immutable values that are updated result by result. Pure.

A result is the success of one draw, between 0 and 1. A task keeps its last results and weighs newer ones more. It graduates by rate
and number of draws, and stays graduated until its rate falls below a lower limit. A graduated task is drawn again at intervals that
double with each successful review. Tiers open one after the other: the next one opens by rate and number of draws of the highest
open tier, sooner on the fast track, and the highest one closes again when nothing succeeds in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.contracts.group import GroupOutcome
from rollbook.tasks.config import CurriculumConfig


def decayed_rate(results: Sequence[float], decay: float) -> float:
    """Weighted mean of the results, oldest first; each weighs `decay` times its successor. 0 without results."""
    total = weights = 0.0
    for result in results:
        total = total * decay + result
        weights = weights * decay + 1.0
    return total / weights if weights else 0.0


def success_of(outcome: GroupOutcome) -> float | None:
    """Solve rate of a draw, or its mean reward if the environment does not report what is solved.

    None if nothing could be scored: an infrastructure failure is not a failure of the policy.
    """
    success = outcome.solved_rate if outcome.solved_rate is not None else outcome.reward_mean
    return None if success is None else min(1.0, max(0.0, success))


@dataclass(frozen=True, slots=True)
class TaskMastery:
    results: tuple[float, ...] = ()
    """The last results, oldest first."""
    is_graduated: bool = False
    reviews: int = 0
    """Successful draws in a row since it graduated. Each doubles the interval to the next."""

    def rate(self, rules: CurriculumConfig) -> float:
        return decayed_rate(self.results, rules.decay)

    def after(self, result: float, rules: CurriculumConfig) -> "TaskMastery":
        results = (*self.results, result)[-rules.task_window :]
        rate = decayed_rate(results, rules.decay)
        if not self.is_graduated:
            has_graduated = len(results) >= rules.graduate_tries and rate >= rules.graduate_rate
            return TaskMastery(results, has_graduated)
        if rate < rules.relapse_rate:
            return TaskMastery(results)
        return TaskMastery(results, True, self.reviews + 1 if result >= rules.graduate_rate else 0)


@dataclass(frozen=True, slots=True)
class TierProgress:
    opened_at: tuple[int, ...] = (0,)
    """For each open tier, lowest first: the position of the draw whose result opened it."""
    results: tuple[float, ...] = ()
    """The last results of the highest open tier, since it is the highest."""
    is_on_probation: bool = False
    """The tier above was closed again, so it does not reopen by the fast track."""

    @property
    def highest_open(self) -> int:
        return len(self.opened_at) - 1

    def after(
        self, result: float, *, rank: int, position: int, num_tiers: int, rules: CurriculumConfig
    ) -> "TierProgress":
        """Only results of the highest open tier have an effect."""
        if rank != self.highest_open:
            return self
        results = (*self.results, result)[-rules.tier_window :]
        rate = decayed_rate(results, rules.decay)
        if rank + 1 < num_tiers and self._is_promoted(results, rate, rules):
            return TierProgress((*self.opened_at, position))
        if rank > 0 and len(results) >= rules.demote_tries and rate < rules.demote_rate:
            return TierProgress(self.opened_at[:-1], is_on_probation=True)
        return TierProgress(self.opened_at, results, self.is_on_probation)

    def _is_promoted(self, results: Sequence[float], rate: float, rules: CurriculumConfig) -> bool:
        if len(results) >= rules.promote_tries and rate >= rules.promote_rate:
            return True
        is_fast = len(results) >= rules.fast_track_tries and rate >= rules.fast_track_rate
        return is_fast and not self.is_on_probation
