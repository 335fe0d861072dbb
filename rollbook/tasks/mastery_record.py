"""`MasteryRecord`: folds results into mastery in the order of their draws, not of their arrival.

A slow draw finishes after faster ones that were drawn later. Mastery depends on the order, and a restart reads the ledger by draw,
so the order of arrival must not matter. Results above the oldest unsettled draw are kept, and folded again when an earlier result
arrives. The kept results are bounded by the draws in flight.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollbook.tasks.config import CurriculumConfig
from rollbook.tasks.mastery import TaskMastery, TierProgress
from rollbook.tasks.samplers import NEVER, TaskStates
from rollbook.tasks.tiers import Tiers

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
        self._is_in_order &= bisect_left(self._kept, result) >= self._num_folded
        insort(self._kept, result)

    @property
    def is_folded(self) -> bool:
        return self._num_folded == len(self._kept)

    def is_kept(self, result: Result) -> bool:
        at = bisect_left(self._kept, result)
        return at < len(self._kept) and self._kept[at] == result

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
        """As of the last `fold`."""
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
