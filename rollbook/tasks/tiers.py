"""Reads tiers and weights from the rows of the tasks."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.contracts.errors import RunError
from rollbook.contracts.task import Task
from rollbook.tasks.config import CurriculumConfig

ONLY_TIER = "all"


class CurriculumError(RunError):
    """The rows do not match the curriculum's settings."""


@dataclass(frozen=True, slots=True)
class Tiers:
    names: tuple[str, ...]
    """Easiest first."""
    ranks: tuple[int, ...]
    """Of each task, in the order of the source: the index of its tier in `names`."""


def tiers_of(tasks: Sequence[Task], rules: CurriculumConfig) -> Tiers:
    field = rules.tier_field
    without = [task.id for task in tasks if task.row.get(field) is None]
    if len(without) == len(tasks) and not rules.tiers:
        return Tiers((ONLY_TIER,), (0,) * len(tasks))
    if without:
        raise CurriculumError(
            f"task {without[0]!r} and {len(without) - 1} more have no field {field!r}, others do; "
            f"give each task its tier, or choose another tasks.curriculum.tier_field"
        )
    values = [_tier(task, field) for task in tasks]
    order = rules.tiers or _natural_order(values)
    rank_of = {value: rank for rank, value in enumerate(order)}
    for task, value in zip(tasks, values, strict=True):
        if value not in rank_of:
            raise CurriculumError(
                f"task {task.id!r} is of tier {value!r}, which tasks.curriculum.tiers does not name "
                f"({', '.join(map(repr, order))}); add it there"
            )
    # A tier without tasks is left out: without draws, the tier above it would never open.
    used = [value for value in order if value in set(values)]
    rank_of = {value: rank for rank, value in enumerate(used)}
    return Tiers(tuple(str(value) for value in used), tuple(rank_of[value] for value in values))


def _tier(task: Task, field: str) -> str | int:
    value = task.row[field]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise CurriculumError(
            f"task {task.id!r}: field {field!r} is {value!r}; a tier must be a text or a whole number"
        )
    return value


def _natural_order(values: Sequence[str | int]) -> tuple[str | int, ...]:
    """Numbers by size; names by their first row."""
    numbers = {value for value in values if isinstance(value, int)}
    return tuple(sorted(numbers)) if len(numbers) == len(set(values)) else tuple(dict.fromkeys(values))


def weights_of(tasks: Sequence[Task], rules: CurriculumConfig) -> list[float]:
    """Weights for the weighted sampler; 1 for the other samplers."""
    if rules.sampler != "weighted":
        return [1.0] * len(tasks)
    weights = []
    for task in tasks:
        weight = task.row.get(rules.weight_field, 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise CurriculumError(
                f"task {task.id!r}: field {rules.weight_field!r} is {weight!r}; a weight must be a number above 0"
            )
        weights.append(float(weight))
    return weights
