"""Set the stage: a clean cloud becomes the environment of one task and seed, or the reset fails and says which command did not
work.
"""

import json
import shlex
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jmespath  # type: ignore[import-untyped]  # the package ships no types

from rollbook.contracts.errors import EpisodeError
from rollbook.envs.builtin.awscli.backend import Backend
from rollbook.envs.builtin.awscli.drift import chosen_faults, chosen_variant
from rollbook.envs.builtin.awscli.grading import Standing, flaw_at_start
from rollbook.envs.builtin.awscli.task_bank import AwsTask, Check, Fault, Step
from rollbook.envs.builtin.awscli.verification import Variables, call_of, filled, holds, value_of

# The id of what does not exist yet: every question about it is refused. Long enough for every id that the API checks by length.
NOT_THERE = "not-there-not-there-not-there"


class SetupError(EpisodeError):
    """The environment of a task could not be set up. The task or the simulator is wrong, never the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One environment, ready to play: the task with its names filled in, the faults that were applied, and how it stands."""

    task: AwsTask
    seed: int
    cloud: Backend
    variables: Variables
    faults: Sequence[Fault]
    start: Standing

    @property
    def goal(self) -> str:
        return str(filled(self.task.goal, self.variables)).strip()

    @property
    def hints(self) -> list[str]:
        return [filled(hint, self.variables) for hint in self.task.hints]

    @property
    def goals(self) -> list[Check]:
        return goals_of(self.task, self.faults)

    @property
    def solution(self) -> list[Step]:
        """The reference for this environment: the task's own steps, then the repair of each fault."""
        return [*self.task.solution, *(step for fault in self.faults for step in fault.repair)]

    async def standing(self) -> Standing:
        return await look(self.cloud, self.task, self.goals, self.variables)

    async def disturb(self, step: Step) -> None:
        """Somebody else's command. It may fail: what it would undo may not be there yet."""
        await self.cloud.run(shlex.split(filled(step.run, self.variables))[1:])


def goals_of(task: AwsTask, faults: Sequence[Fault]) -> list[Check]:
    return [*task.checks, *(check for fault in faults for check in fault.checks)]


async def prepare(task: AwsTask, cloud: Backend, *, seed: int) -> Setting:
    """Run the set-up and the drift, and check that the start is fair. Raises `SetupError`."""
    variables = chosen_variant(task, seed)
    for name, content in task.files.items():
        path = cloud.scratch / filled(name, variables)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, filled(content, variables))
    for step in task.setup:
        variables |= await _set_up(task, cloud, step, variables)
    faults = chosen_faults(task, seed)
    for fault in faults:
        for step in fault.breaks:
            variables |= await _set_up(task, cloud, step, variables)
    goals = goals_of(task, faults)
    start = await look(cloud, task, goals, variables)
    is_fault = [False] * len(task.checks) + [True] * (len(goals) - len(task.checks))
    flaw = flaw_at_start(
        start, [check.says for check in goals], [check.says for check in task.keeps], must_be_open=is_fault
    )
    if flaw is not None:
        raise SetupError(f"task {task.id} (seed {seed}): {flaw}; this episode is given up, and the task needs mending")
    return Setting(task=task, seed=seed, cloud=cloud, variables=variables, faults=faults, start=start)


def write_file(path: Path, content: str | Mapping[str, str]) -> None:
    """A text file; a mapping of names to texts becomes a zip archive, the same bytes every time."""
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
        return
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in sorted(content.items()):
            archive.writestr(zipfile.ZipInfo(name), text)


async def look(cloud: Backend, task: AwsTask, goals: Sequence[Check], variables: Variables) -> Standing:
    """Ask the cloud for every fact: first for ids that the facts are about, then for all facts in one go."""
    variables = dict(variables)
    for name, question in task.lookups.items():
        (answer,) = await cloud.ask([call_of(question, variables)])
        value = value_of(question, answer, variables)
        variables[name] = NOT_THERE if value is None else str(value)
    checks = [*goals, *task.keeps]
    answers = await cloud.ask([call_of(check, variables) for check in checks])
    facts = [holds(check, answer, variables) for check, answer in zip(checks, answers, strict=True)]
    return Standing(goals=tuple(facts[: len(goals)]), keeps=tuple(facts[len(goals) :]))


def kept(step: Step, output: str, variables: Variables) -> dict[str, str]:
    """The parts of a command's JSON output that later steps use. Raises `ValueError` when a part is not there."""
    if not step.keep:
        return {}
    try:
        document = json.loads(output)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"`{step.run}` printed no JSON to keep {', '.join(step.keep)} from: {output[:200]!r}"
        ) from error
    found: dict[str, str] = {}
    for name, query in step.keep.items():
        value: Any = jmespath.search(filled(query, variables), document)
        if value is None:
            raise ValueError(f"`{step.run}` printed nothing at {query!r}, which {name} is kept from")
        found[name] = value if isinstance(value, str) else json.dumps(value)
    return found


async def _set_up(task: AwsTask, cloud: Backend, step: Step, variables: Variables) -> dict[str, str]:
    line = filled(step.run, variables)
    words = shlex.split(line)
    if words[:1] != ["aws"]:
        raise SetupError(f"task {task.id}: the set-up line {line!r} does not begin with aws")
    result = await cloud.run(words[1:])
    if result.rc != 0:
        raise SetupError(
            f"task {task.id}: the set-up command `{line}` failed with code {result.rc}: {result.stderr.strip()[:500]}; "
            "this episode is given up"
        )
    try:
        return kept(step, result.stdout, variables)
    except ValueError as error:
        raise SetupError(f"task {task.id}: {error}") from error
