"""How well each task and each tier is mastered: pure values that are folded over results, one after the other.

A *result* is the success of one draw, between 0 and 1. A task remembers its last results and weighs the younger ones more. It
graduates by rate and count, stays graduated until its rate falls below the lower mark, and while it is graduated it is drawn again
at intervals that double with each review that goes well. Tiers open one after the other: the highest open one is promoted past by
rate and count, or at once on the fast track, and is left again when nothing succeeds in it.

Nothing here knows the clock, the ledger or chance: the same results in the same order give the same mastery.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.contracts.group import GroupOutcome
from rollbook.tasks.curriculum_config import CurriculumConfig


def decayed_rate(results: Sequence[float], decay: float) -> float:
    """The mean of the results, oldest first, each weighing `decay` times its successor. 0 for none."""
    total = weights = 0.0
    for result in results:
        total = total * decay + result
        weights = weights * decay + 1.0
    return total / weights if weights else 0.0


def success_of(outcome: GroupOutcome) -> float | None:
    """What a draw says about mastery: its solve rate, or its mean reward where the world does not say what is solved.

    None when nothing could be scored: a failure of the infrastructure is no failure of the policy.
    """
    told = outcome.solved_rate if outcome.solved_rate is not None else outcome.reward_mean
    return None if told is None else min(1.0, max(0.0, told))


@dataclass(frozen=True, slots=True)
class TaskMastery:
    """What is known of one task."""

    results: tuple[float, ...] = ()
    """The last ones, oldest first."""
    is_graduated: bool = False
    reviews: int = 0
    """Draws that went well in a row since it graduated: each doubles the time to the next."""

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
    """Which tiers are open, and how the highest of them goes."""

    opened_at: tuple[int, ...] = (0,)
    """Of each open tier, from the lowest on: the position of the draw whose result opened it."""
    results: tuple[float, ...] = ()
    """The last ones of the highest open tier since it became that."""
    is_on_probation: bool = False
    """A tier above was left again: the next promotion takes the long way."""

    @property
    def highest_open(self) -> int:
        return len(self.opened_at) - 1

    def after(
        self, result: float, *, rank: int, position: int, num_tiers: int, rules: CurriculumConfig
    ) -> "TierProgress":
        """Only results of the highest open tier move anything: what lies below is the tasks' own affair."""
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
