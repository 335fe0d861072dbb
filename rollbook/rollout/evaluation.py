"""Evaluation: plays a fixed list of tasks with the same workers as in training.

Evaluation groups never reach the ledger, so they are not part of its accounting. Unscorable episodes are counted, but left out of
the means: they are not failures of the policy.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollbook.concurrency.tasks import first_error
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.task import Task
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.workers.pool import WorkerPool
from rollbook.rollout.workers.spec import WorkerSpec
from rollbook.telemetry.events import EventLog

Z95 = 1.959964
"""Quantile of the normal distribution for a two-sided 95 % interval."""
ATTEMPTS = 3
"""Attempts for a task whose worker died, so that a task that always kills its worker cannot block the evaluation."""
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTask:
    """The result of one task. `rewards` and `solved` have one entry for each scorable episode."""

    task_id: str
    label: str
    rewards: tuple[float, ...]
    solved: tuple[bool, ...]
    unscorable: int
    response_tokens: float
    turns: float
    publications: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """For comparing two evaluations of the same tasks. `rewards` and `solved` have one entry for each scorable episode."""

    id: str
    label: str
    rewards: tuple[float, ...]
    solved: tuple[bool, ...]
    unscorable: int

    @classmethod
    def of(cls, played: PlayedTask) -> "TaskResult":
        return cls(
            id=played.task_id,
            label=played.label,
            rewards=played.rewards,
            solved=played.solved,
            unscorable=played.unscorable,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A mean with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def row(self) -> dict[str, float]:
        return {"mean": round(self.mean, 5), "low": round(self.low, 5), "high": round(self.high, 5)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelResult:
    label: str
    tasks: int
    episodes: int
    unscorable: int
    reward: Share | None
    solved: Share | None
    """None if no environment reported whether the task was solved."""
    solved_once: Share | None
    """Share of tasks that at least one episode solved. Its distance to `solved` is what RL can still teach."""
    response_tokens: float | None
    turns: float | None

    def row(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "tasks": self.tasks,
            "episodes": self.episodes,
            "unscorable": self.unscorable,
            "reward": None if self.reward is None else self.reward.row(),
            "solved": None if self.solved is None else self.solved.row(),
            "solved_once": None if self.solved_once is None else self.solved_once.row(),
            "response_tokens": self.response_tokens,
            "turns": self.turns,
        }


def summarise(label: str, played: Sequence[PlayedTask]) -> LabelResult:
    """Means over tasks of the mean over their episodes, so each task counts once."""
    scored = [task for task in played if task.rewards]
    solved_rates = [float(np.mean(task.solved)) for task in scored if task.solved]
    once = sum(any(task.solved) for task in scored)
    return LabelResult(
        label=label,
        tasks=len(played),
        episodes=sum(len(task.rewards) for task in played),
        unscorable=sum(task.unscorable for task in played),
        reward=mean_share([float(np.mean(task.rewards)) for task in scored]) if scored else None,
        solved=wilson(sum(solved_rates), len(solved_rates)) if solved_rates else None,
        solved_once=wilson(once, len(solved_rates)) if solved_rates else None,
        response_tokens=float(np.mean([task.response_tokens for task in scored])) if scored else None,
        turns=float(np.mean([task.turns for task in scored])) if scored else None,
    )


def by_label(played: Sequence[PlayedTask]) -> list[LabelResult]:
    """All tasks first, then each label in order of appearance, if there are several."""
    labels = list(dict.fromkeys(task.label for task in played))
    parts = [summarise(label, [task for task in played if task.label == label]) for label in labels]
    return [summarise(ALL, played), *(parts if len(parts) > 1 else [])]


def mean_share(values: Sequence[float]) -> Share:
    """Mean with a normal confidence interval. A single value has an interval of width 0."""
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    half = Z95 * error if math.isfinite(error) else 0.0
    return Share(mean=mean, low=mean - half, high=mean + half)


def wilson(successes: float, count: int) -> Share:
    """Wilson's confidence interval of a rate, which stays within 0 and 1."""
    rate = successes / count
    square = Z95 * Z95
    centre = (rate + square / (2 * count)) / (1 + square / count)
    half = Z95 / (1 + square / count) * math.sqrt(rate * (1 - rate) / count + square / (4 * count * count))
    return Share(mean=rate, low=max(0.0, min(rate, centre - half)), high=min(1.0, max(rate, centre + half)))


class Evaluator:
    """Plays tasks with a pool of workers. Made by `open_evaluator`."""

    def __init__(self, spec: WorkerSpec, *, label_field: str, concurrency: int, log: EventLog) -> None:
        self.pool = WorkerPool(spec, listener=self, log=log)
        self._label_field = label_field
        self._episodes = spec.config.completions_per_prompt
        self._deadline_s = ATTEMPTS * spec.config.max_seconds + 30.0
        # Limits the load on the policy server, which training may share.
        self._slots = asyncio.Semaphore(concurrency)
        self._waiting: dict[tuple[str, int], asyncio.Future[PlayedPart | str]] = {}
        self._passes = 0

    async def measure(self, tasks: Sequence[Task], *, min_publication: int = 0) -> list[PlayedTask]:
        """Play each task once, as one group. Returns results in the order of `tasks`."""
        self._passes += 1
        async with asyncio.TaskGroup() as group:
            played = [
                group.create_task(self._play(task, min_publication), name=f"evaluation.{task.id}") for task in tasks
            ]
        return [task.result() for task in played]

    async def _play(self, task: Task, min_publication: int) -> PlayedTask:
        label = str(task.row.get(self._label_field, ALL))
        async with self._slots:
            for attempt in range(1, ATTEMPTS + 1):
                result = await self._attempt(task, attempt, min_publication)
                if isinstance(result, PlayedPart):
                    return _played(task, label, result, episodes=self._episodes)
        raise RunError(f"evaluation: task {task.id} lost its worker {ATTEMPTS} times; the last time: {result}")

    async def _attempt(self, task: Task, attempt: int, min_publication: int) -> PlayedPart | str:
        order = GroupOrder(
            group_id=GroupId(f"evaluation/{task.id}@{self._passes}"),
            attempt=attempt,
            task_id=task.id,
            draw=self._passes,
            row=task.row,
            min_publication=min_publication,
            deadline_s=self._deadline_s,
        )
        answer: asyncio.Future[PlayedPart | str] = asyncio.get_running_loop().create_future()
        self._waiting[order.group_id, attempt] = answer
        try:
            self.pool.play(order)
            return await answer
        finally:
            self._waiting.pop((order.group_id, attempt), None)
            if answer.cancelled():
                self.pool.cancel(order.group_id, attempt)

    def group_played(self, played: PlayedPart) -> None:
        self._answer(played.order_id, played.encoded.attempt, played)

    def group_lost(self, order: GroupOrder, cause: str) -> None:
        self._answer(order.group_id, order.attempt, cause)

    def worker_died(self, cause: str) -> None:
        """The pool replaces the worker and reports its groups as lost."""

    def _answer(self, group_id: GroupId, attempt: int, answer: PlayedPart | str) -> None:
        waiting = self._waiting.get((group_id, attempt))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


@asynccontextmanager
async def open_evaluator(
    spec: WorkerSpec, *, concurrency: int, label_field: str, log: EventLog
) -> AsyncIterator[Evaluator]:
    """Open an evaluator whose workers are ready; they are stopped at the end of the block."""
    evaluator = Evaluator(spec, label_field=label_field, concurrency=concurrency, log=log)
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(evaluator.pool.run(), name="evaluation.pool")
            await evaluator.pool.ready.wait()
            yield evaluator
            running.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


def _played(task: Task, label: str, result: PlayedPart, *, episodes: int) -> PlayedTask:
    """Dropped groups count too: a task that all episodes solved is part of the result. `episodes`: of each task."""
    group = result.group
    scorable = () if group is None else group.scorable
    return PlayedTask(
        task_id=task.id,
        label=label,
        rewards=tuple(float(sample.reward) for sample in scorable if sample.reward is not None),
        solved=tuple(sample.solved for sample in scorable if sample.solved is not None),
        unscorable=episodes - len(scorable),  # an episode that failed left no sample
        response_tokens=float(np.mean([sample.num_trained for sample in scorable])) if scorable else 0.0,
        turns=float(np.mean([len(sample.turns) for sample in scorable])) if scorable else 0.0,
        publications=frozenset() if group is None else group.trained_publications(),
    )


def share_of_publication(played: Sequence[PlayedTask], publication: int) -> float:
    """Share of tasks whose tokens all came from this publication."""
    return sum(task.publications == {publication} for task in played) / len(played) if played else 0.0
