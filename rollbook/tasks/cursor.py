"""A resumable pass over a dataset, epoch by epoch, rebuilt from the draws that the ledger opened.

Position k is task k mod n of epoch k // n, in the order shuffled by (seed, epoch); its draw number is the epoch. A position that
the ledger opened is never proposed again: the ledger itself grants new attempts. Memory use depends on the draws in flight, not
on the length of the history.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollbook.contracts.admission import DrawProgress, PastDraw
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupOutcome
from rollbook.contracts.task import Draw, Task, TaskId


class TaskTable:
    """Tasks in the order of the source."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        if not tasks:
            raise ValueError("at least one task is required")
        self.tasks = tuple(tasks)
        self.index = {task.id: at for at, task in enumerate(self.tasks)}
        if len(self.index) != len(self.tasks):
            raise ValueError(
                f"{len(self.tasks) - len(self.index)} tasks share their id with another; ids must be unique"
            )

    def copy(self, task_id: TaskId) -> Task:
        """The task with a copy of its row, because a rollout may change the row."""
        at = self.index.get(task_id)
        if at is None:
            raise RunError(
                f"task {task_id!r} was drawn before, but the dataset no longer has it; "
                f"put it back, or start a new run directory for the new dataset"
            )
        return Task(id=task_id, row=self.tasks[at].row_copy())


class DrawQueue:
    """Draws by position: first the gaps below the highest opened position, then new positions up to `end`."""

    def __init__(self, draw_at: Callable[[int], Draw], *, end: int | None) -> None:
        self._draw_at = draw_at
        self._end = end
        self._proposed: deque[Draw] = deque()
        self._gaps: deque[int] = deque()
        self.next_position = 0
        """No draw at this position or above was proposed by this process."""

    def rebuild(self, progress: DrawProgress) -> None:
        opened = set(progress.opened_beyond)
        self.next_position = max(progress.opened_below, max(opened, default=-1) + 1)
        self._gaps = deque(p for p in range(progress.opened_below, self.next_position) if p not in opened)
        self._proposed.clear()

    def propose(self, count: int) -> Sequence[Draw]:
        while len(self._proposed) < count:
            if self._gaps:
                position = self._gaps.popleft()
            elif self._end is None or self.next_position < self._end:
                position = self.next_position
                self.next_position += 1
            else:
                break
            self._proposed.append(self._draw_at(position))
        return [self._proposed[i] for i in range(min(count, len(self._proposed)))]

    def take(self, count: int) -> list[Draw]:
        """Remove and return the first `count` proposed draws."""
        if count > len(self._proposed):
            raise ValueError(f"{count} draws were taken, but only {len(self._proposed)} are proposed")
        return [self._proposed.popleft() for _ in range(count)]

    @property
    def is_exhausted(self) -> bool:
        return self._end is not None and not self.untaken and self.next_position >= self._end

    @property
    def gaps(self) -> int:
        return len(self._gaps)

    @property
    def untaken(self) -> tuple[int, ...]:
        """Positions below `next_position` that were not taken."""
        return (*self._gaps, *(draw.position for draw in self._proposed))


KEPT_ORDERS = 2
"""Shuffled epochs kept in memory: the current one, and the one before it for gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorState:
    """State of the cursor, for display."""

    position: int
    """Every position below is settled."""
    next_position: int
    """No position from here on was proposed by this process."""
    epoch: int
    num_tasks: int
    unsettled: int
    gaps: int
    is_exhausted: bool


class CursorDataLoader:
    """Satisfies `TaskSource`."""

    def __init__(
        self, tasks: Sequence[Task], *, epochs: int | None = None, shuffle: bool = True, seed: int = 0
    ) -> None:
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs is {epochs}; it must be at least 1, or None for an endless source")
        self._table = TaskTable(tasks)
        self._queue = DrawQueue(self._draw_at, end=None if epochs is None else epochs * len(tasks))
        self._shuffle = shuffle
        self._seed = seed
        self._orders: dict[int, Sequence[int]] = {}
        # Opened and not yet settled. The set of settled positions would grow without bound.
        self._unsettled: set[int] = set()

    def rebuild(self, progress: DrawProgress) -> None:
        self._queue.rebuild(progress)
        settled = set(progress.settled_beyond)
        opened = (*range(progress.settled_below, progress.opened_below), *progress.opened_beyond)
        self._unsettled = {p for p in opened if p not in settled and p >= progress.settled_below}

    def catch_up(self, progress: DrawProgress) -> None:
        self._queue.rebuild(progress)

    @property
    def needs_history(self) -> bool:
        return False

    def recall(self, past: Sequence[PastDraw]) -> None:
        """Does nothing: the order does not depend on outcomes."""

    def propose(self, count: int) -> Sequence[Draw]:
        return self._queue.propose(count)

    def taken(self, count: int) -> None:
        self._unsettled.update(draw.position for draw in self._queue.take(count))

    def task(self, task_id: TaskId) -> Task:
        return self._table.copy(task_id)

    def observe(self, group_id: GroupId, position: int, outcome: GroupOutcome | None) -> None:
        self._unsettled.discard(position)

    @property
    def is_exhausted(self) -> bool:
        return self._queue.is_exhausted

    @property
    def position(self) -> int:
        """Every position below is settled, by the ledger at `rebuild` or by this process since."""
        return min((self._queue.next_position, *self._queue.untaken, *self._unsettled))

    def state(self) -> CursorState:
        num_tasks = len(self._table.tasks)
        return CursorState(
            position=self.position,
            next_position=self._queue.next_position,
            epoch=self._queue.next_position // num_tasks,
            num_tasks=num_tasks,
            unsettled=len(self._unsettled),
            gaps=self._queue.gaps,
            is_exhausted=self.is_exhausted,
        )

    def _draw_at(self, position: int) -> Draw:
        epoch, at = divmod(position, len(self._table.tasks))
        return Draw(task_id=self._table.tasks[self._order(epoch)[at]].id, number=epoch, position=position)

    def _order(self, epoch: int) -> Sequence[int]:
        indices = range(len(self._table.tasks))
        if not self._shuffle:
            return indices
        order = self._orders.get(epoch)
        if order is None:
            shuffled = list(indices)
            # Seeded by a text, because its hash is the same in every process and every Python version.
            random.Random(f"{self._seed}:{epoch}").shuffle(shuffled)
            while len(self._orders) >= KEPT_ORDERS:
                self._orders.pop(min(self._orders))
            order = self._orders[epoch] = shuffled
        return order
