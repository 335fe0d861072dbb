"""The tasks: what a task file may say, and the bank that reads `bank/*.yaml`.

A task is graded by what exists afterwards (`checks`, `keeps`), never by what was typed. Its `solution` is a reference that a test
plays for real. Names come from `variants`, one of which the seed picks, so that a policy cannot learn a name by heart.
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
# Of a hundred parts, by a digest of the task's id: the same for ever, whatever tasks are added.
SPLIT_PARTS = {"test": 12, "validation": 12}


class Tier(StrEnum):
    WARM_UP = "warm-up"
    BEGINNER = "beginner"
    INTERMEDIATE = "intermediate"
    ADVANCED = "advanced"
    EXPERT = "expert"


class Split(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


MAX_STEPS = {Tier.WARM_UP: 6, Tier.BEGINNER: 8, Tier.INTERMEDIATE: 12, Tier.ADVANCED: 20, Tier.EXPERT: 24}


class _Words(BaseModel, frozen=True, extra="forbid", populate_by_name=True):
    pass


class Step(_Words):
    """One command of a set-up or a solution. `keep` names parts of its JSON output (JMESPath) for later use as `${name}`."""

    run: str
    keep: dict[str, str] = Field(default_factory=dict)


class Question(_Words):
    """One call of the API and the part of its answer that matters."""

    call: str = Field(pattern=r"^[a-z0-9-]+\.[a-z0-9_]+$")
    """Service and operation as botocore names them: `s3.get_bucket_versioning`."""

    params: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Parameters of the call."""

    region: str | None = None
    """Another region than the environment's own."""

    query: str = "@"
    """JMESPath into the answer."""

    parse: str | None = None
    """Where the value is a string that holds JSON: JMESPath into that."""


class Check(Question):
    """A fact about the environment. Exactly one expectation; without any, the call must succeed and the value be something."""

    says: str = Field(min_length=1)
    """The fact in words, for the viewer."""

    equals: Any = None
    """The value is exactly this."""

    contains: Any = None
    """The value is a list with this item, a mapping with at least these entries, or a text with this part."""

    count: int | None = None
    """The value is a list of this length; what is not there has length 0."""

    matches: str | None = None
    """The value is a text in which this regular expression is found."""

    absent: bool | None = None
    """The value is empty or null, or the API says there is no such thing."""

    @model_validator(mode="after")
    def _one_expectation(self) -> "Check":
        named = sorted({"equals", "contains", "count", "matches", "absent"} & self.model_fields_set)
        if len(named) > 1:
            raise ValueError(f"check {self.says!r} expects {' and '.join(named)}: one expectation each")
        return self


class Fault(_Words):
    """One thing that can be wrong in an environment that drifted: how it breaks, how one sees that, how it is repaired."""

    name: str = Field(min_length=1)
    breaks: list[Step] = Field(min_length=1)
    checks: list[Check] = Field(min_length=1)
    repair: list[Step] = Field(min_length=1)

    @field_validator("breaks", "repair", mode="before")
    @classmethod
    def _from_lines(cls, value: Any) -> Any:
        return _steps(value)


class AwsTask(_Words):
    """One task."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    tier: Tier
    services: list[str] = Field(min_length=1)
    goal: str = Field(min_length=10)
    """What the agent is told. `${names}` come from the variant and from what the set-up kept."""

    variants: tuple[dict[str, str | int], ...] = Field(default=({},), min_length=1)
    """Names and numbers; the seed picks one set."""

    files: dict[str, str | dict[str, str]] = Field(default_factory=dict)
    """Local files in the agent's working directory: texts, or a mapping of texts for a zip archive."""

    setup: list[Step] = Field(default_factory=list)
    """Run before the agent starts. A command that fails here aborts the reset."""

    lookups: dict[str, Question] = Field(default_factory=dict)
    """Ids that the cloud makes up, asked for before the checks, in order; each may use the ones above it as `${name}`."""

    checks: list[Check] = Field(default_factory=list)
    """What must be true at the end."""

    keeps: list[Check] = Field(default_factory=list)
    """What is true at the start and must stay so."""

    answer: Question | None = None
    """A question about the environment: the agent replies with `answer VALUE`, and the truth is read from the environment then."""

    drift: list[Fault] = Field(default_factory=list)
    """Faults of which the seed applies some."""

    drift_count: tuple[int, int] = (2, 3)
    """Fewest and most faults that are applied at the same time."""

    chaos: list[Step] = Field(default_factory=list)
    """Commands by which somebody else undoes part of the work, when chaos strikes."""

    solution: list[Step] = Field(min_length=1)
    """The reference. With drift, the repairs of the applied faults follow."""

    hints: list[str] = Field(min_length=NUM_HINTS, max_length=NUM_HINTS)
    """From a nudge to almost the command."""

    max_steps: int | None = Field(default=None, ge=1)
    """Moves the agent has; None: by tier."""

    @field_validator("setup", "solution", "chaos", mode="before")
    @classmethod
    def _from_lines(cls, value: Any) -> Any:
        return _steps(value)

    @model_validator(mode="after")
    def _can_be_graded(self) -> "AwsTask":
        if not (self.checks or self.drift or self.answer):
            raise ValueError("nothing to grade: a task has checks, drift or an answer")
        if self.answer is not None and (self.checks or self.drift):
            raise ValueError("a task asks for an answer or for a state, not for both")
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
    """A plain line is a step that keeps nothing."""
    return [{"run": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value


def read_tasks(paths: Iterable[Path]) -> dict[str, AwsTask]:
    """Tasks by id. Raises `RunError` that names file, task and field."""
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
                raise RunError(f"task bank: {path.name}: {row!r} is no task; each is a mapping with id, tier, goal …")
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
    """The tasks that come with the package, read once."""
    return read_tasks(BANK.glob("*.yaml"))


def aws_tasks(*, split: Split | str | None = None, tiers: Iterable[Tier | str] | None = None) -> list[dict[str, Any]]:
    """Rows for a dataset: id, tier, services, split. The environment finds the rest by the id."""
    wanted = set(Tier) if tiers is None else {Tier(tier) for tier in tiers}
    return [
        {"id": task.id, "tier": task.tier.value, "services": list(task.services), "split": task.split.value}
        for task in task_bank().values()
        if task.tier in wanted and (split is None or task.split is Split(split))
    ]
