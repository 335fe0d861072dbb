"""Play a task's reference solution through the same door as an agent: for proofs, demonstrations and scripted policies."""

import json
import re
from collections.abc import Mapping
from typing import Any

from rollbook.contracts.environment import Observation
from rollbook.contracts.ports import Environment
from rollbook.envs.builtin.awscli.drift import chosen_faults, chosen_variant
from rollbook.envs.builtin.awscli.environment import find_task
from rollbook.envs.builtin.awscli.setting import kept
from rollbook.envs.builtin.awscli.task_bank import Step
from rollbook.envs.builtin.awscli.verification import filled

# Remarks that the environment puts under a command's output stand in parentheses on lines of their own.
REMARK = re.compile(r"\n+(?:\([^\n]*\)|The task is solved\.|The episode is over[^\n]*)\s*$")


class ReferencePolicy:
    """Knows the solution of one task row, and says its next line after each observation.

    What the set-up kept (ids made up by the cloud) is not known to it, as it is not known to an agent: solutions look things up.
    """

    def __init__(self, row: Mapping[str, Any], *, seed: int = 0) -> None:
        task = find_task(row)
        seed = int(row.get("seed", seed))
        self._steps: list[Step] = [
            *task.solution,
            *(step for fault in chosen_faults(task, seed) for step in fault.repair),
        ]
        self._variables = chosen_variant(task, seed)
        self._next = 0

    def next_line(self, observation: Observation) -> str | None:
        """The next command, or None when the solution is played. Errors of the previous one show here."""
        if self._next > 0:
            self._variables |= kept(self._steps[self._next - 1], output_of(observation.text), self._variables)
        if self._next >= len(self._steps):
            return None
        step = self._steps[self._next]
        self._next += 1
        return str(filled(step.run, self._variables))


def output_of(text: str) -> str:
    """A command's own output, without the environment's remarks under it."""
    while (remark := REMARK.search(text)) is not None and not _is_json(text):
        text = text[: remark.start()]
    return text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


async def play_reference(env: Environment, row: Mapping[str, Any], *, seed: int = 0) -> list[Observation]:
    """Reset and play to the end. The observations, the first one included."""
    policy = ReferencePolicy(row, seed=seed)
    seen = [await env.reset({**row, "seed": row.get("seed", seed)})]
    while not seen[-1].done:
        line = policy.next_line(seen[-1])
        if line is None:
            break
        seen.append(await env.step(line))
    return seen
