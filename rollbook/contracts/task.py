"""A task is one row of a dataset, with a stable id. A draw is one use of a task."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

TaskId = NewType("TaskId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of the dataset. The rollout function receives a copy of `row`."""

    id: TaskId
    row: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("the id of a task must not be empty")
        if "@" in self.id:
            raise ValueError(f"task id {self.id!r} contains '@', which separates task and draw in a group id")

    def row_copy(self) -> dict[str, Any]:
        """A deep copy, so that a rollout that changes its row does not affect others."""
        return copy.deepcopy(dict(self.row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The `number`-th use of a task, at `position` in the cursor's order."""

    task_id: TaskId
    number: int
    position: int

    def __post_init__(self) -> None:
        if self.number < 0 or self.position < 0:
            raise ValueError(f"draw {self.number} at position {self.position} of {self.task_id}: both must be >= 0")
