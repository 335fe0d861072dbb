"""Prepares a clean cloud for one task and seed. If a set-up command fails, the reset fails and names the command.

Faults are seeded: the same task, seed and moves meet the same ones. Drift applies some of the task's faults to the initial state.
Chaos has two kinds: a *refused* request fails as if the service were busy, and a retry helps; an *undone* change is one of the
task's chaos commands, run after the agent's move as if by another user. The last move of an episode is never disturbed.
"""

import json
import random
import shlex
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import jmespath  # type: ignore[import-untyped]  # the package ships no types

from rollbook.contracts.decoding import load_json
from rollbook.contracts.errors import EpisodeError
from rollbook.envs.builtin.awscli.cloud.backend import Backend
from rollbook.envs.builtin.awscli.tasks.checks import (
    CheckResults,
    Variables,
    call_of,
    fill,
    holds,
    start_problem,
    value_of,
)
from rollbook.envs.builtin.awscli.tasks.task_bank import ApiQuestion, AwsTask, Check, Fault, TaskStep, TaskTier

# The chance of a chaos fault at each move, before the operator's factor.
CHANCE = {
    TaskTier.WARM_UP: 0.0,
    TaskTier.BEGINNER: 0.05,
    TaskTier.INTERMEDIATE: 0.1,
    TaskTier.ADVANCED: 0.15,
    TaskTier.EXPERT: 0.2,
}
# With more faults an episode would depend mostly on chance.
MAX_FAULTS = 2
REFUSALS = (
    ("ThrottlingException", "Rate exceeded"),
    ("ServiceUnavailable", "Service is temporarily unavailable. Please retry the request."),
    ("InternalError", "An internal error occurred. Please retry your request."),
)


def seeded(task_id: str, seed: int, purpose: str) -> random.Random:
    """A separate generator for each purpose: an extra draw for chaos does not change the draws for drift."""
    return random.Random(f"{task_id}/{seed}/{purpose}")


def chosen_variant(task: AwsTask, seed: int) -> dict[str, str]:
    """The names of this episode."""
    variant = seeded(task.id, seed, "variant").choice(task.variants)
    return {name: str(value) for name, value in variant.items()}


def chosen_drift(task: AwsTask, seed: int) -> Sequence[Fault]:
    """The drift faults of this episode, in the order they are applied; empty for a task without drift."""
    if not task.drift:
        return ()
    rng = seeded(task.id, seed, "drift")
    low, high = task.drift_count
    return rng.sample(task.drift, rng.randint(low, high))


class FaultKind(StrEnum):
    REFUSED = "refused"
    UNDONE = "undone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosFault:
    """One chaos fault: the error message of a refused request, or the command that undoes a change."""

    kind: FaultKind
    text: str = ""
    step: TaskStep | None = None


class Chaos:
    """The chaos faults of one episode. `scale` multiplies the tier's chance; 0 disables chaos."""

    def __init__(self, task: AwsTask, *, seed: int, scale: float) -> None:
        self._rng = seeded(task.id, seed, "chaos")
        self._chance = min(1.0, CHANCE[task.tier] * scale)
        self._undo_steps = list(task.chaos)
        self.num_faults = 0

    def draw(self, *, is_last_move: bool) -> ChaosFault | None:
        """Called once for each command that may change something."""
        if self._rng.random() >= self._chance or self.num_faults >= MAX_FAULTS or is_last_move:
            return None
        self.num_faults += 1
        if self._undo_steps and self._rng.random() < 0.5:
            return ChaosFault(kind=FaultKind.UNDONE, step=self._undo_steps[self._rng.randrange(len(self._undo_steps))])
        code, message = REFUSALS[self._rng.randrange(len(REFUSALS))]
        return ChaosFault(
            kind=FaultKind.REFUSED, text=f"An error occurred ({code}) when calling the operation: {message}"
        )


# Stands for the id of a resource that does not exist; calls with it are refused. Long enough for the API's length checks.
MISSING_ID = "not-there-not-there-not-there"


class SetupError(EpisodeError):
    """A task could not be set up. The task or the simulator is wrong, never the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTask:
    """A task whose cloud is set up: its variables, the applied drift faults, and the check results at the start.

    `truth` is the answer to the task's question, read before the agent can change anything.
    """

    task: AwsTask
    seed: int
    cloud: Backend
    variables: Variables
    faults: Sequence[Fault]
    start: CheckResults
    truth: Any = None

    @property
    def goals(self) -> list[Check]:
        return goals_of(self.task, self.faults)

    async def check_results(self) -> CheckResults:
        return await run_checks(self.cloud, self.task, self.goals, self.variables)


def goals_of(task: AwsTask, faults: Sequence[Fault]) -> list[Check]:
    return [*task.checks, *(check for fault in faults for check in fault.checks)]


async def prepare(task: AwsTask, cloud: Backend, *, seed: int) -> PreparedTask:
    """Run the set-up and the drift, then verify the initial state. Raises `SetupError`."""
    variables = chosen_variant(task, seed)
    for name, content in task.files.items():
        path = cloud.scratch / fill(name, variables)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_file(path, fill(content, variables))
    faults = chosen_drift(task, seed)
    for step in [*task.setup, *(step for fault in faults for step in fault.breaks)]:
        variables |= await _run_setup_step(task, cloud, step, variables)
    goals = goals_of(task, faults)
    start = await run_checks(cloud, task, goals, variables)
    is_fault = [False] * len(task.checks) + [True] * (len(goals) - len(task.checks))
    problem = start_problem(
        start, [check.says for check in goals], [check.says for check in task.keeps], must_be_open=is_fault
    )
    if problem is not None:
        raise SetupError(
            f"task {task.id} (seed {seed}): {problem}; this episode is dropped, and the task must be fixed"
        )
    truth = None if task.answer is None else await _truth(task, task.answer, cloud, variables)
    return PreparedTask(task=task, seed=seed, cloud=cloud, variables=variables, faults=faults, start=start, truth=truth)


async def _truth(task: AwsTask, question: ApiQuestion, cloud: Backend, variables: Variables) -> Any:
    (answer,) = await cloud.call_api([call_of(question, variables)])
    truth = value_of(question, answer, variables)
    if truth is None or truth in ([], {}, ""):
        raise SetupError(
            f"task {task.id}: {question.call} returned no answer to the question: {answer.message or 'no value'}"
        )
    return truth


def _write_file(path: Path, content: str | Mapping[str, str]) -> None:
    """Write a text file, or a reproducible zip archive for a mapping of names to strings."""
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
        return
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in sorted(content.items()):
            archive.writestr(zipfile.ZipInfo(name), text)


async def run_checks(cloud: Backend, task: AwsTask, goals: Sequence[Check], variables: Variables) -> CheckResults:
    """Look up the ids that the checks refer to, then run all checks in one batch."""
    variables = dict(variables)
    for name, question in task.lookups.items():
        (answer,) = await cloud.call_api([call_of(question, variables)])
        value = value_of(question, answer, variables)
        variables[name] = MISSING_ID if value is None else str(value)
    checks = [*goals, *task.keeps]
    answers = await cloud.call_api([call_of(check, variables) for check in checks])
    results = [holds(check, answer, variables) for check, answer in zip(checks, answers, strict=True)]
    return CheckResults(
        goals=tuple(results[: len(goals)]),
        keeps=tuple(results[len(goals) :]),
        absences=frozenset(i for i, check in enumerate(goals) if check.is_absence),
    )


def kept_values(step: TaskStep, output: str, variables: Variables) -> dict[str, str]:
    """The values of a command's JSON output that later steps use. Raises `ValueError` if one is missing."""
    if not step.keep:
        return {}
    try:
        document = load_json(output)
    except ValueError as error:
        raise ValueError(
            f"`{step.run}` printed no JSON to read {', '.join(step.keep)} from: {output[:200]!r}"
        ) from error
    values: dict[str, str] = {}
    for name, query in step.keep.items():
        value: Any = jmespath.search(fill(query, variables), document)
        if value is None:
            raise ValueError(f"`{step.run}` printed nothing at {query!r}, the source of {name}")
        values[name] = value if isinstance(value, str) else json.dumps(value)
    return values


async def _run_setup_step(task: AwsTask, cloud: Backend, step: TaskStep, variables: Variables) -> dict[str, str]:
    line = fill(step.run, variables)
    words = shlex.split(line)
    if words[:1] != ["aws"]:
        raise SetupError(f"task {task.id}: the set-up line {line!r} does not begin with aws")
    result = await cloud.run(words[1:])
    if result.rc != 0:
        raise SetupError(
            f"task {task.id}: the set-up command `{line}` failed with code {result.rc}: {result.stderr.strip()[:500]}; "
            "this episode is dropped"
        )
    try:
        return kept_values(step, result.stdout, variables)
    except ValueError as error:
        raise SetupError(f"task {task.id}: {error}") from error
