"""`MasteryRecord`: results are folded into mastery in the order of their draws, whatever the order in which they arrive.

Draws overlap, so a slow one is heard of after faster ones that were handed out later. Mastery depends on order; were it the order
of arrival, a restart (which reads the ledger by draw) would find another mastery. So results above the oldest draw that is still
open are kept aside and folded again when one arrives in their midst. What is kept is what is in flight, never history.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollbook.tasks.curriculum_config import CurriculumConfig
from rollbook.tasks.mastery import TaskMastery, TierProgress
from rollbook.tasks.samplers import NEVER, Standing
from rollbook.tasks.tiers import Tiers

LATE_DRAWS = 1024
"""A draw that is open for longer than this many later ones is not waited for: more than any gate lets run at the same time. Should
its result come after all, it counts as of the day it comes."""


@dataclass(frozen=True, slots=True, order=True)
class Result:
    """The success of one draw. Sorted by position; draws of two dispatchers may share one."""

    position: int
    task: int
    """Index of the task in the source."""
    number: int
    success: float = field(compare=False)


class MasteryRecord:
    def __init__(self, tiers: Tiers, weights: Sequence[float], rules: CurriculumConfig) -> None:
        count = len(tiers.ranks)
        self._tiers = tiers
        self._rules = rules
        self._ranks = np.array(tiers.ranks, dtype=np.int64)
        # Folded for good, and folded for now on top of it.
        self._settled: dict[int, TaskMastery] = {}
        self._settled_progress = TierProgress()
        self._current: dict[int, TaskMastery] = {}
        self._progress = TierProgress()
        self._kept: list[Result] = []
        self._num_folded = 0
        self._is_in_order = True
        self._num_draws = np.zeros(count, dtype=np.int64)
        self._last_position = np.full(count, NEVER, dtype=np.int64)
        self._rate = np.zeros(count, dtype=np.float64)
        self._is_graduated = np.zeros(count, dtype=np.bool_)
        self._reviews = np.zeros(count, dtype=np.int64)
        self._weight = np.array(weights, dtype=np.float64)

    def handed_out(self, task: int, number: int, position: int) -> None:
        """A draw of the task is under way or behind us."""
        self._num_draws[task] = max(self._num_draws[task], number + 1)
        self._last_position[task] = max(self._last_position[task], position)

    def next_number(self, task: int) -> int:
        return int(self._num_draws[task])

    def add(self, result: Result) -> None:
        """Note a result; the next `fold` counts it."""
        self._is_in_order &= bisect_left(self._kept, result) >= self._num_folded
        insort(self._kept, result)

    @property
    def is_folded(self) -> bool:
        return self._num_folded == len(self._kept)

    def is_kept(self, result: Result) -> bool:
        at = bisect_left(self._kept, result)
        return at < len(self._kept) and self._kept[at] == result

    def fold(self, *, open_from: int) -> None:
        """Bring mastery up to date: for good below `open_from`, where every draw is settled or given up; for now above it."""
        touched: set[int] = set()
        if not self._is_in_order:
            touched |= set(self._current)
            self._current, self._progress, self._num_folded = {}, self._settled_progress, 0
            self._is_in_order = True
        for result in self._kept[self._num_folded :]:
            self._current[result.task] = self._after(self.mastery(result.task), result)
            self._progress = self._progressed(self._progress, result)
            touched.add(result.task)
        num_settled = bisect_left(self._kept, open_from, key=lambda result: result.position)
        for result in self._kept[:num_settled]:
            self._settled[result.task] = self._after(self._settled.get(result.task, TaskMastery()), result)
            self._settled_progress = self._progressed(self._settled_progress, result)
        del self._kept[:num_settled]
        self._num_folded = len(self._kept)
        for task in touched:
            mastery = self.mastery(task)
            self._rate[task] = mastery.rate(self._rules)
            self._is_graduated[task] = mastery.is_graduated
            self._reviews[task] = mastery.reviews

    def mastery(self, task: int) -> TaskMastery:
        return self._current.get(task) or self._settled.get(task) or TaskMastery()

    @property
    def progress(self) -> TierProgress:
        return self._progress

    def standing(self) -> Standing:
        """As of the last `fold`."""
        opened_at = np.array(self._progress.opened_at, dtype=np.int64)
        is_open = self._ranks < len(opened_at)
        return Standing(
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

    def _after(self, mastery: TaskMastery, result: Result) -> TaskMastery:
        return mastery.after(result.success, self._rules)

    def _progressed(self, progress: TierProgress, result: Result) -> TierProgress:
        return progress.after(
            result.success,
            rank=self._tiers.ranks[result.task],
            position=result.position,
            num_tiers=len(self._tiers.names),
            rules=self._rules,
        )
