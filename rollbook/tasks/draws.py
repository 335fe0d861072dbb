"""What both task sources share: tasks by id, and the queue of proposed draws."""

from collections import deque
from collections.abc import Callable, Sequence

from rollbook.contracts.admission import DrawProgress
from rollbook.contracts.errors import RunError
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
