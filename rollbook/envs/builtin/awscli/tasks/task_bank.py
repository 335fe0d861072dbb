"""The schema of a task, and the reader of `bank/*.yaml`.

A task is graded by the resulting state (`checks`, `keeps`), never by the commands. Its `solution` is a reference that a test runs.
Names come from `variants`, one of which the seed picks, so that a policy cannot memorise names.
"""

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from rollbook.contracts.errors import RunError

BANK = Path(__file__).parent / "bank"
NUM_HINTS = 3
# Percent of all tasks, chosen by a digest of the task's id: adding tasks does not change the split of others.
SPLIT_PARTS = {"test": 12, "validation": 12}


class TaskTier(StrEnum):
    WARM_UP = "warm-up"
    BEGINNER = "beginner"
    INTERMEDIATE = "intermediate"
    ADVANCED = "advanced"
    EXPERT = "expert"


class Split(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


MAX_STEPS = {
    TaskTier.WARM_UP: 6,
    TaskTier.BEGINNER: 8,
    TaskTier.INTERMEDIATE: 12,
    TaskTier.ADVANCED: 20,
    TaskTier.EXPERT: 24,
}


class _Model(BaseModel, frozen=True, extra="forbid", populate_by_name=True):
    pass


class TaskStep(_Model):
    """One command of a set-up or a solution. `keep` maps names to JMESPath queries into its JSON output, for use as `${name}`."""

    run: str
    keep: dict[str, str] = Field(default_factory=dict)


class ApiQuestion(_Model):
    """One API call and a query into its answer."""

    call: str = Field(pattern=r"^[a-z0-9-]+\.[a-z0-9_]+$")
    """Service and operation as botocore names them: `s3.get_bucket_versioning`."""

    params: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Parameters of the call."""

    region: str | None = None
    """A region other than the default."""

    query: str = "@"
    """JMESPath into the answer."""

    parse: str | None = None
    """If the value is a string that contains JSON: JMESPath into it."""


class Check(ApiQuestion):
    """A statement about the cloud, with at most one expectation. Without one, the call must succeed and the value must not be
    empty.
    """

    says: str = Field(min_length=1)
    """The statement in words, for the viewer."""

    equals: Any = None
    """The value is exactly this."""

    contains: Any = None
    """The value is a list with this item, a mapping with at least these entries, or a string with this part."""

    count: int | None = None
    """The value is a list of this length; a missing value has length 0."""

    matches: str | None = None
    """The value is a string that contains a match of this regular expression."""

    absent: bool | None = None
    """The value is empty or null, or the API reports that the resource does not exist."""

    @model_validator(mode="after")
    def _one_expectation(self) -> "Check":
        named = sorted({"equals", "contains", "count", "matches", "absent"} & self.model_fields_set)
        if len(named) > 1:
            raise ValueError(f"check {self.says!r} expects {' and '.join(named)}: one expectation each")
        return self

    @property
    def is_absence(self) -> bool:
        """Whether the check holds even in an empty account."""
        return bool(self.absent) or self.count == 0


class Fault(_Model):
    """One drift fault: the commands that cause it, the checks that detect it, the commands that repair it."""

    name: str = Field(min_length=1)
    breaks: list[TaskStep] = Field(min_length=1)
    checks: list[Check] = Field(min_length=1)
    repair: list[TaskStep] = Field(min_length=1)

    @field_validator("breaks", "repair", mode="before")
    @classmethod
    def _from_lines(cls, value: Any) -> Any:
        return _steps(value)


class AwsTask(_Model):
    id: str = Field(pattern=r"^[a-z0-9-]+$")
    tier: TaskTier
    services: list[str] = Field(min_length=1)
    goal: str = Field(min_length=10)
    """The agent's instruction. `${names}` come from the variant and from values the set-up kept."""

    variants: tuple[dict[str, str | int], ...] = Field(default=({},), min_length=1)
    """Sets of names and numbers; the seed picks one set."""

    files: dict[str, str | dict[str, str]] = Field(default_factory=dict)
    """Local files in the agent's working directory: strings, or a mapping of strings for a zip archive."""

    setup: list[TaskStep] = Field(default_factory=list)
    """Commands that run before the agent starts. If one fails, the reset fails."""

    lookups: dict[str, ApiQuestion] = Field(default_factory=dict)
    """Ids assigned by the cloud, looked up in order before the checks; each may use earlier ones as `${name}`."""

    checks: list[Check] = Field(default_factory=list)
    """Must hold at the end."""

    keeps: list[Check] = Field(default_factory=list)
    """Hold at the start and must hold at the end."""

    answer: ApiQuestion | None = None
    """A question: the agent replies with `answer VALUE`, which is compared with the state of the cloud at the start."""

    drift: list[Fault] = Field(default_factory=list)
    """Faults; the seed selects which are applied."""

    drift_count: tuple[int, int] = (2, 3)
    """The minimum and maximum number of applied faults."""

    chaos: list[TaskStep] = Field(default_factory=list)
    """Commands that undo part of the work, run as chaos faults."""

    solution: list[TaskStep] = Field(min_length=1)
    """The reference solution. With drift, the repairs of the applied faults follow it."""

    hints: list[str] = Field(min_length=NUM_HINTS, max_length=NUM_HINTS)
    """From a vague hint to almost the full command."""

    max_steps: int | None = Field(default=None, ge=1)
    """The number of moves; None: the default of the tier."""

    @field_validator("setup", "solution", "chaos", mode="before")
    @classmethod
    def _from_lines(cls, value: Any) -> Any:
        return _steps(value)

    @model_validator(mode="after")
    def _can_be_graded(self) -> "AwsTask":
        if not (self.checks or self.drift or self.answer):
            raise ValueError("nothing to grade: a task needs checks, drift or an answer")
        if self.answer is not None and (self.checks or self.drift):
            raise ValueError("a task has an answer, or checks and drift, not both")
        goals = [*self.checks, *(check for fault in self.drift for check in fault.checks)]
        absence = next((check.says for check in goals if check.is_absence), None)
        if absence is not None and not any(not check.is_absence for check in self.keeps):
            raise ValueError(
                f"the check {absence!r} holds even in an empty account: add `keeps` for what must not be deleted"
            )
        low, high = self.drift_count
        if self.drift and not 1 <= low <= high <= len(self.drift):
            raise ValueError(f"drift_count {low} to {high} does not fit {len(self.drift)} faults")
        names = {frozenset(variant) for variant in self.variants}
        if len(names) != 1:
            raise ValueError("variants must all name the same variables")
        return self

    @property
    def split(self) -> Split:
        part = int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], "big") % 100
        if part < SPLIT_PARTS["test"]:
            return Split.TEST
        return Split.VALIDATION if part < SPLIT_PARTS["test"] + SPLIT_PARTS["validation"] else Split.TRAIN

    @property
    def step_limit(self) -> int:
        return self.max_steps or MAX_STEPS[self.tier]


def _steps(value: Any) -> Any:
    """A plain string is a step that keeps no values."""
    return [{"run": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value


def read_tasks(paths: Iterable[Path]) -> dict[str, AwsTask]:
    """Tasks by id. Raises `RunError` with the file, task and field."""
    tasks: dict[str, AwsTask] = {}
    for path in sorted(paths):
        try:
            rows = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        except (OSError, yaml.YAMLError) as error:
            raise RunError(f"task bank: {path.name} cannot be read: {error}") from error
        if not isinstance(rows, list):
            raise RunError(f"task bank: {path.name} must be a list of tasks")
        for row in rows:
            if not isinstance(row, dict):
                raise RunError(
                    f"task bank: {path.name}: {row!r} is not a task; a task is a mapping with id, tier, goal …"
                )
            task = parse_task(row, where=path.name)
            if task.id in tasks:
                raise RunError(f"task bank: {path.name}: the id {task.id!r} is used twice")
            tasks[task.id] = task
    return tasks


def parse_task(row: Mapping[str, Any], *, where: str) -> AwsTask:
    try:
        return AwsTask.model_validate(row)
    except ValidationError as error:
        name = dict(row).get("id", "?")
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'task'}: {e['msg']}" for e in error.errors())
        raise RunError(f"task bank: {where}: task {name}: {faults}") from error


@cache
def task_bank() -> Mapping[str, AwsTask]:
    """The tasks shipped with the package, read once."""
    return read_tasks(BANK.glob("*.yaml"))


def find_task(row: Mapping[str, Any]) -> AwsTask:
    """The task of the bank with the row's id, or the whole task contained in the row."""
    if "goal" in row:
        return parse_task(
            {key: value for key, value in row.items() if key not in {"seed", "split", "chaos_scale"}}, where="row"
        )
    task = task_bank().get(str(row.get("id")))
    if task is None:
        raise ValueError(
            f"the bank of {len(task_bank())} tasks has no task {row.get('id')!r}; a row needs the id of one, or a goal"
        )
    return task


def aws_tasks(
    *, split: Split | str | None = None, tiers: Iterable[TaskTier | str] | None = None
) -> list[dict[str, Any]]:
    """Rows for a dataset: id, tier, services, split. The environment looks up the rest by id."""
    wanted = set(TaskTier) if tiers is None else {TaskTier(tier) for tier in tiers}
    return [
        {"id": task.id, "tier": task.tier.value, "services": list(task.services), "split": task.split.value}
        for task in task_bank().values()
        if task.tier in wanted and (split is None or task.split is Split(split))
    ]
