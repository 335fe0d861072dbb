"""Plays a task's reference solution through the agent's interface: for tests, demonstrations and scripted policies."""

import re
from collections.abc import Mapping
from string import Template
from typing import Any

from rollbook.contracts.task import Observation
from rollbook.envs.builtin.awscli.tasks.checks import fill
from rollbook.envs.builtin.awscli.tasks.setup import chosen_drift, chosen_variant, kept_values
from rollbook.envs.builtin.awscli.tasks.task_bank import TaskStep, find_task

# The environment appends remarks to a command's output, each in parentheses on a separate line.
REMARK = re.compile(r"\([^\n]*\)|The task is solved\.|The episode is over[^\n]*")


class ReferencePolicy:
    """Plays the solution of one task row, one line for each observation.

    Like an agent, it does not know the ids that the cloud assigned during set-up: solutions look them up.
    """

    def __init__(self, row: Mapping[str, Any], *, seed: int = 0) -> None:
        task = find_task(row)
        seed = int(row.get("seed", seed))
        self._steps: list[TaskStep] = [
            *task.solution,
            *(step for fault in chosen_drift(task, seed) for step in fault.repair),
        ]
        self._variables = chosen_variant(task, seed)
        self._next = 0
        self.filled_in: list[str] = []
        """The names and ids in the last line that differ between episodes: an agent must read them in the goal or in an output."""

    def next_line(self, observation: Observation) -> str | None:
        """The next command, or None at the end. Raises `ValueError` if the previous one printed no usable output."""
        if self._next > 0:
            self._variables |= kept_values(self._steps[self._next - 1], output_of(observation.text), self._variables)
        if self._next >= len(self._steps):
            return None
        step = self._steps[self._next]
        self._next += 1
        self.filled_in = [
            self._variables[name] for name in Template(step.run).get_identifiers() if name in self._variables
        ]
        return str(fill(step.run, self._variables))


def output_of(text: str) -> str:
    """The output of a command without the environment's remarks."""
    lines = text.split("\n")
    end = len(lines)
    while True:
        last = end
        while last > 1 and not lines[last - 1].strip():
            last -= 1
        if last == 1 or REMARK.fullmatch(lines[last - 1].rstrip()) is None:
            return "\n".join(lines[:end])
        end = last - 1
        while end > 1 and not lines[end - 1]:
            end -= 1
