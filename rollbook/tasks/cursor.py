"""A resumable walk over a dataset, epoch by epoch. The ledger is the truth about what was drawn; the cursor is rebuilt from it.

Position k is task k mod n of epoch k // n, in the order that (seed, epoch) shuffles to; its draw number is the epoch. A position
that the ledger opened is never proposed again, settled or not: the ledger itself grants another attempt. A position it did not
open is proposed, also one in a gap below what others opened. What is held grows with what is in flight, never with history.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.contracts.admission import DrawProgress, PastDraw
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupOutcome
from rollbook.contracts.task import Draw, Task, TaskId

KEPT_ORDERS = 2
"""Shuffled epochs kept in memory: the one being drawn, and the one before for gaps at the border."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorState:
    """Where the cursor stands, for display."""

    position: int
    """Every position below is settled."""
    next_position: int
    """Nothing from here on was ever proposed by this process."""
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
        if not tasks:
            raise ValueError("a cursor needs at least one task")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs is {epochs}; it must be at least 1, or None for an endless source")
        self._tasks = tuple(tasks)
        self._by_id = {task.id: task for task in self._tasks}
        if len(self._by_id) != len(self._tasks):
            raise ValueError(
                f"{len(self._tasks) - len(self._by_id)} tasks share their id with another; ids must be unique"
            )
        self._end = None if epochs is None else epochs * len(self._tasks)
        self._shuffle = shuffle
        self._seed = seed
        self._orders: dict[int, Sequence[int]] = {}
        self._proposed: deque[Draw] = deque()
        self._gaps: deque[int] = deque()
        self._next = 0
        # Taken (or opened before us) and not yet settled: the complement of "settled", because that one would grow for ever.
        self._unsettled: set[int] = set()

    def rebuild(self, progress: DrawProgress) -> None:
        """Take up where the ledger stands. Call it before the first `propose` of a process."""
        opened = set(progress.opened_beyond)
        self._next = max(progress.opened_below, max(opened, default=-1) + 1)
        self._gaps = deque(p for p in range(progress.opened_below, self._next) if p not in opened)
        settled = set(progress.settled_beyond)
        open_below = range(progress.settled_below, progress.opened_below)
        self._unsettled = {p for p in (*open_below, *opened) if p not in settled and p >= progress.settled_below}
        self._proposed.clear()

    @property
    def needs_history(self) -> bool:
        return False

    def recall(self, past: Sequence[PastDraw]) -> None:
        """The order of a cursor does not depend on what came of its draws."""

    def propose(self, count: int) -> Sequence[Draw]:
        while len(self._proposed) < count:
            position = self._following()
            if position is None:
                break
            self._proposed.append(self._draw(position))
        return [self._proposed[i] for i in range(min(count, len(self._proposed)))]

    def taken(self, count: int) -> None:
        if count > len(self._proposed):
            raise ValueError(f"{count} draws were taken, but only {len(self._proposed)} are proposed")
        for _ in range(count):
            self._unsettled.add(self._proposed.popleft().position)

    def task(self, task_id: TaskId) -> Task:
        """The task with a row of its own: whoever plays it may change the row and poisons nobody."""
        task = self._by_id.get(task_id)
        if task is None:
            raise RunError(
                f"task {task_id!r} was drawn before, but the dataset no longer has it; "
                f"put it back, or start a new run directory for the new dataset"
            )
        return Task(id=task.id, row=task.row_copy())

    def observe(self, group_id: GroupId, position: int, outcome: GroupOutcome | None) -> None:
        self._unsettled.discard(position)

    @property
    def is_exhausted(self) -> bool:
        return not self._proposed and not self._gaps and self._end is not None and self._next >= self._end

    @property
    def position(self) -> int:
        """Every position below is settled, as far as the ledger said at `rebuild` and this process has seen since."""
        waiting = (*self._gaps, *(draw.position for draw in self._proposed), *self._unsettled)
        return min((self._next, *waiting))

    def state(self) -> CursorState:
        return CursorState(
            position=self.position,
            next_position=self._next,
            epoch=self._next // len(self._tasks),
            num_tasks=len(self._tasks),
            unsettled=len(self._unsettled),
            gaps=len(self._gaps),
            is_exhausted=self.is_exhausted,
        )

    def _following(self) -> int | None:
        if self._gaps:
            return self._gaps.popleft()
        if self._end is not None and self._next >= self._end:
            return None
        self._next += 1
        return self._next - 1

    def _draw(self, position: int) -> Draw:
        epoch, place = divmod(position, len(self._tasks))
        return Draw(task_id=self._tasks[self._order(epoch)[place]].id, number=epoch, position=position)

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._tasks))
        order = self._orders.get(epoch)
        if order is None:
            shuffled = list(range(len(self._tasks)))
            # Seeded by a text, whose digest is the same in every process and every Python.
            random.Random(f"{self._seed}:{epoch}").shuffle(shuffled)
            while len(self._orders) >= KEPT_ORDERS:
                self._orders.pop(min(self._orders))
            order = self._orders[epoch] = shuffled
        return order
