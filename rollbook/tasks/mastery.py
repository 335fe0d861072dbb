"""Tiers and mastery of tasks: immutable values that are updated result by result. Pure.

A result is the success of one draw, between 0 and 1. A task keeps its last results and weighs newer ones more. It graduates by rate
and number of draws, and stays graduated until its rate falls below a lower limit. A graduated task is drawn again at intervals that
double with each successful review. Tiers open one after the other: the next one opens by rate and number of draws of the highest
open tier, sooner on the fast track, and the highest one closes again when nothing succeeds in it.

`MasteryRecord` folds results into mastery in the order of their draws, not of their arrival. A slow draw finishes after faster ones
that were drawn later. Mastery depends on the order, and a restart reads the ledger by draw, so the order of arrival must not
matter. Results above the oldest unsettled draw are kept, and folded again when an earlier result arrives. The kept results are
bounded by the draws in flight.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupOutcome
from rollbook.contracts.task import Task
from rollbook.tasks.config import CurriculumConfig
from rollbook.tasks.samplers import NEVER, TaskStates


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


ONLY_TIER = "all"


class CurriculumError(RunError):
    """The rows do not match the curriculum's settings."""


@dataclass(frozen=True, slots=True)
class Tiers:
    names: tuple[str, ...]
    """Easiest first."""
    ranks: tuple[int, ...]
    """For each task, in the order of the source: the index of its tier in `names`."""


def tiers_of(tasks: Sequence[Task], rules: CurriculumConfig) -> Tiers:
    field = rules.tier_field
    without = [task.id for task in tasks if task.row.get(field) is None]
    if len(without) == len(tasks) and not rules.tiers:
        return Tiers((ONLY_TIER,), (0,) * len(tasks))
    if without:
        raise CurriculumError(
            f"task {without[0]!r} and {len(without) - 1} more have no field {field!r}, others do; "
            f"give each task its tier, or choose another tasks.curriculum.tier_field"
        )
    values = [_tier(task, field) for task in tasks]
    order = rules.tiers or _natural_order(values)
    rank_of = {value: rank for rank, value in enumerate(order)}
    for task, value in zip(tasks, values, strict=True):
        if value not in rank_of:
            raise CurriculumError(
                f"task {task.id!r} is of tier {value!r}, which tasks.curriculum.tiers does not name "
                f"({', '.join(map(repr, order))}); add it there"
            )
    # A tier without tasks is left out: without draws, the tier above it would never open.
    used = [value for value in order if value in set(values)]
    rank_of = {value: rank for rank, value in enumerate(used)}
    return Tiers(tuple(str(value) for value in used), tuple(rank_of[value] for value in values))


def _tier(task: Task, field: str) -> str | int:
    value = task.row[field]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise CurriculumError(
            f"task {task.id!r}: field {field!r} is {value!r}; a tier must be a text or a whole number"
        )
    return value


def _natural_order(values: Sequence[str | int]) -> tuple[str | int, ...]:
    """Numbers by size; names by their first row."""
    numbers = {value for value in values if isinstance(value, int)}
    return tuple(sorted(numbers)) if len(numbers) == len(set(values)) else tuple(dict.fromkeys(values))


def weights_of(tasks: Sequence[Task], rules: CurriculumConfig) -> list[float]:
    """Weights for the weighted sampler; 1 for the other samplers."""
    if rules.sampler != "weighted":
        return [1.0] * len(tasks)
    weights = []
    for task in tasks:
        weight = task.row.get(rules.weight_field, 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise CurriculumError(
                f"task {task.id!r}: field {rules.weight_field!r} is {weight!r}; a weight must be a number above 0"
            )
        weights.append(float(weight))
    return weights


LATE_DRAWS = 1024
"""A draw is not waited for after this many later ones, which is more than any gate admits at the same time. Its result, should it
still arrive, counts from its arrival."""


@dataclass(frozen=True, slots=True, order=True)
class Result:
    """The success of one draw. Sorted by position, which draws of two dispatchers may share."""

    position: int
    task: int
    """Index of the task in the source."""
    number: int
    success: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class ProposedDraw:
    """A draw that may still be removed, and the position of the draw of its task before it."""

    task: int
    number: int
    last_position: int


class MasteryRecord:
    def __init__(self, tiers: Tiers, weights: Sequence[float], rules: CurriculumConfig) -> None:
        count = len(tiers.ranks)
        self._tiers = tiers
        self._rules = rules
        self._ranks = np.array(tiers.ranks, dtype=np.int64)
        # Mastery of settled draws, and on top of it that of the kept results.
        self._settled: dict[int, TaskMastery] = {}
        self._settled_progress = TierProgress()
        self._current: dict[int, TaskMastery] = {}
        self._progress = TierProgress()
        self._kept: list[Result] = []
        self._num_folded = 0
        self._is_in_order = True
        self._with_results: dict[int, int] = {}
        """By task, a bit for each of its draws that has a result."""
        self._num_draws = np.zeros(count, dtype=np.int64)
        self._last_position = np.full(count, NEVER, dtype=np.int64)
        self._rate = np.zeros(count, dtype=np.float64)
        self._is_graduated = np.zeros(count, dtype=np.bool_)
        self._reviews = np.zeros(count, dtype=np.int64)
        self._weight = np.array(weights, dtype=np.float64)

    def add_draw(self, task: int, number: int, position: int) -> ProposedDraw:
        added = ProposedDraw(task, number, int(self._last_position[task]))
        self._num_draws[task] = max(self._num_draws[task], number + 1)
        self._last_position[task] = max(self._last_position[task], position)
        return added

    def remove_draw(self, draw: ProposedDraw) -> None:
        """Without effect if later draws of the task were added since."""
        if self._num_draws[draw.task] == draw.number + 1:
            self._num_draws[draw.task], self._last_position[draw.task] = draw.number, draw.last_position

    def next_number(self, task: int) -> int:
        return int(self._num_draws[task])

    def add_result(self, result: Result) -> None:
        """Keep a result for the next `fold`."""
        self._with_results[result.task] = self._with_results.get(result.task, 0) | 1 << result.number
        self._is_in_order &= bisect_left(self._kept, result) >= self._num_folded
        insort(self._kept, result)

    @property
    def is_folded(self) -> bool:
        return self._num_folded == len(self._kept)

    def has_result(self, task: int, number: int) -> bool:
        return bool(self._with_results.get(task, 0) >> number & 1)

    def fold(self, *, settled_below: int) -> None:
        """Update mastery with all results. Those below `settled_below` are final and no longer kept."""
        changed: set[int] = set()
        if not self._is_in_order:
            changed |= set(self._current)
            self._current, self._progress, self._num_folded = {}, self._settled_progress, 0
            self._is_in_order = True
        for result in self._kept[self._num_folded :]:
            self._current[result.task] = self._with_result(self.mastery(result.task), result)
            self._progress = self._progressed(self._progress, result)
            changed.add(result.task)
        num_settled = bisect_left(self._kept, settled_below, key=lambda result: result.position)
        for result in self._kept[:num_settled]:
            self._settled[result.task] = self._with_result(self._settled.get(result.task, TaskMastery()), result)
            self._settled_progress = self._progressed(self._settled_progress, result)
        del self._kept[:num_settled]
        self._num_folded = len(self._kept)
        for task in changed:
            mastery = self.mastery(task)
            self._rate[task] = mastery.rate(self._rules)
            self._is_graduated[task] = mastery.is_graduated
            self._reviews[task] = mastery.reviews

    def mastery(self, task: int) -> TaskMastery:
        return self._current.get(task) or self._settled.get(task) or TaskMastery()

    @property
    def progress(self) -> TierProgress:
        return self._progress

    def task_states(self) -> TaskStates:
        """The states after the last `fold`."""
        opened_at = np.array(self._progress.opened_at, dtype=np.int64)
        is_open = self._ranks < len(opened_at)
        return TaskStates(
            is_open=is_open,
            open_since=np.where(is_open, opened_at[np.minimum(self._ranks, len(opened_at) - 1)], 0),
            num_draws=self._num_draws,
            last_position=self._last_position,
            rate=self._rate,
            is_graduated=self._is_graduated,
            reviews=self._reviews,
            weight=self._weight,
        )

    @property
    def ranks(self) -> NDArray[np.int64]:
        return self._ranks

    def _with_result(self, mastery: TaskMastery, result: Result) -> TaskMastery:
        return mastery.after(result.success, self._rules)

    def _progressed(self, progress: TierProgress, result: Result) -> TierProgress:
        return progress.after(
            result.success,
            rank=self._tiers.ranks[result.task],
            position=result.position,
            num_tiers=len(self._tiers.names),
            rules=self._rules,
        )
