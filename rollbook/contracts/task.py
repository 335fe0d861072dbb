"""A task: one row of a dataset, with an id that outlives edits of the file; and a draw: one time it is handed out."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

TaskId = NewType("TaskId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to do. `row` is what the rollout function receives, always as a copy of its own."""

    id: TaskId
    row: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a task needs an id that is not empty")
        if "@" in self.id:
            raise ValueError(f"task id {self.id!r} contains '@', which separates task and draw in a group id")

    def row_copy(self) -> dict[str, Any]:
        """A deep copy, so that a rollout that mutates its row poisons nobody."""
        return copy.deepcopy(dict(self.row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One time a task is handed out: the `number`-th draw of the task, at `position` in the cursor's order."""

    task_id: TaskId
    number: int
    position: int

    def __post_init__(self) -> None:
        if self.number < 0 or self.position < 0:
            raise ValueError(f"draw {self.number} at position {self.position} of {self.task_id}: both must be >= 0")
