"""Measuring a policy: every task of a fixed list is played by the same workers as in training, and nothing is trained from it.

Evaluation groups never reach the ledger: they have a purpose of their own and stay outside the law that every training group is
accounted for by. What could not be scored is counted and left out of the means, never taken for a failure of the policy.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollbook.concurrency.exception_groups import first_error
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.group_codec import decode_group
from rollbook.contracts.task import Task
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.workers.messages import Finished
from rollbook.rollout.workers.pool import WorkerPool
from rollbook.rollout.workers.spec import WorkerSpec
from rollbook.telemetry.events import EventLog

Z95 = 1.959964
"""Two-sided 95 % of the normal distribution."""
ATTEMPTS = 3
"""How often a task is played again whose worker died: a measurement must not hang on one that kills its worker each time."""
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTask:
    """What became of one task: one entry for each scorable episode."""

    task_id: str
    label: str
    rewards: tuple[float, ...]
    solved: tuple[bool, ...]
    unscorable: int
    response_tokens: float
    turns: float
    publications: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A measured part of the tasks, with the interval that holds the true one 19 times out of 20."""

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
    """None where no world said whether the task was solved."""
    solved_once: Share | None
    """The part of the tasks that at least one of their episodes solved. Above `solved` lies what reward alone can still teach."""
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
    """Means over tasks of the mean over their episodes: a task counts once, however often it was played."""
    scored = [task for task in played if task.rewards]
    told = [float(np.mean(task.solved)) for task in scored if task.solved]
    once = sum(any(task.solved) for task in scored)
    return LabelResult(
        label=label,
        tasks=len(played),
        episodes=sum(len(task.rewards) for task in played),
        unscorable=sum(task.unscorable for task in played),
        reward=mean_share([float(np.mean(task.rewards)) for task in scored]) if scored else None,
        solved=wilson(sum(told), len(told)) if told else None,
        solved_once=wilson(once, len(told)) if told else None,
        response_tokens=float(np.mean([task.response_tokens for task in scored])) if scored else None,
        turns=float(np.mean([task.turns for task in scored])) if scored else None,
    )


def by_label(played: Sequence[PlayedTask]) -> list[LabelResult]:
    """The whole first, then one line for each label, in order of appearance; a single label says nothing more than the whole."""
    labels = list(dict.fromkeys(task.label for task in played))
    parts = [summarise(label, [task for task in played if task.label == label]) for label in labels]
    return [summarise(ALL, played), *(parts if len(parts) > 1 else [])]


def mean_share(values: Sequence[float]) -> Share:
    """Mean with the normal interval of its standard error; a single value says nothing about its own spread."""
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    half = Z95 * error if math.isfinite(error) else 0.0
    return Share(mean=mean, low=mean - half, high=mean + half)


def wilson(successes: float, count: int) -> Share:
    """Wilson's interval of a rate: it stays within 0 and 1, and is honest about 0 of 20."""
    rate = successes / count
    square = Z95 * Z95
    centre = (rate + square / (2 * count)) / (1 + square / count)
    half = Z95 / (1 + square / count) * math.sqrt(rate * (1 - rate) / count + square / (4 * count * count))
    return Share(mean=rate, low=max(0.0, min(rate, centre - half)), high=min(1.0, max(rate, centre + half)))


class Evaluator:
    """A pool of workers that plays tasks for nobody's training. Made by `open_evaluator`."""

    def __init__(self, *, label_field: str, concurrency: int, max_seconds: float) -> None:
        self._label_field = label_field
        self._deadline_s = ATTEMPTS * max_seconds + 30.0
        # Its own budget: however many tasks there are, the policy server never sees more of them at a time.
        self._places = asyncio.Semaphore(concurrency)
        self._waiting: dict[tuple[str, int], asyncio.Future[Finished | str]] = {}
        self._pool: WorkerPool | None = None
        self._passes = 0

    def bind(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def measure(self, tasks: Sequence[Task], *, min_publication: int = 0) -> list[PlayedTask]:
        """Play every task once, as one group. Returns in the order of `tasks`."""
        self._passes += 1
        async with asyncio.TaskGroup() as group:
            played = [
                group.create_task(self._play(task, min_publication), name=f"evaluation.{task.id}") for task in tasks
            ]
        return [task.result() for task in played]

    async def _play(self, task: Task, min_publication: int) -> PlayedTask:
        label = str(task.row.get(self._label_field, ALL))
        async with self._places:
            for attempt in range(1, ATTEMPTS + 1):
                result = await self._attempt(task, attempt, min_publication)
                if isinstance(result, Finished):
                    return _played(task, label, result)
        raise RunError(f"evaluation: task {task.id} lost its worker {ATTEMPTS} times; the last time: {result}")

    async def _attempt(self, task: Task, attempt: int, min_publication: int) -> Finished | str:
        assert self._pool is not None
        order = GroupOrder(
            group_id=GroupId(f"evaluation/{task.id}@{self._passes}"),
            attempt=attempt,
            task_id=task.id,
            draw=self._passes,
            row=task.row,
            min_publication=min_publication,
            deadline_s=self._deadline_s,
        )
        answer: asyncio.Future[Finished | str] = asyncio.get_running_loop().create_future()
        self._waiting[order.group_id, attempt] = answer
        try:
            self._pool.play(order)
            return await answer
        finally:
            self._waiting.pop((order.group_id, attempt), None)
            if answer.cancelled():
                self._pool.cancel(order.group_id, attempt)

    def group_finished(self, order: GroupOrder, result: Finished) -> None:
        self._answer(order, result)

    def group_lost(self, order: GroupOrder, cause: str) -> None:
        self._answer(order, cause)

    def worker_died(self, cause: str) -> None:
        """The pool replaces it; its groups are told one by one."""

    def _answer(self, order: GroupOrder, answer: Finished | str) -> None:
        waiting = self._waiting.get((order.group_id, order.attempt))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


@asynccontextmanager
async def open_evaluator(
    spec: WorkerSpec, *, concurrency: int, label_field: str, log: EventLog
) -> AsyncIterator[Evaluator]:
    """Workers that are ready when the block begins and gone when it has ended."""
    evaluator = Evaluator(label_field=label_field, concurrency=concurrency, max_seconds=spec.config.max_seconds)
    pool = WorkerPool(spec, listener=evaluator, log=log)
    evaluator.bind(pool)
    try:
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(pool.run(), name="evaluation.pool")
            await pool.ready.wait()
            yield evaluator
            keeping.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


def _played(task: Task, label: str, result: Finished) -> PlayedTask:
    """A filter's verdict does not matter here: what all siblings solved is measured too."""
    group = None if result.group is None else decode_group(result.group.payload)
    scorable = () if group is None else group.scorable
    return PlayedTask(
        task_id=task.id,
        label=label,
        rewards=tuple(float(sample.reward) for sample in scorable if sample.reward is not None),
        solved=tuple(sample.solved for sample in scorable if sample.solved is not None),
        unscorable=result.outcome.num_samples - len(scorable) if group is not None else 1,
        response_tokens=float(np.mean([sample.num_trained for sample in scorable])) if scorable else 0.0,
        turns=float(np.mean([len(sample.turns) for sample in scorable])) if scorable else 0.0,
        publications=frozenset() if group is None else group.trained_publications(),
    )


def share_of_publication(played: Sequence[PlayedTask], publication: int) -> float:
    """The part of the tasks whose every token came from this publication: 1 where the version was pinned."""
    return sum(task.publications == {publication} for task in played) / len(played) if played else 0.0


def table_rows(results: Sequence[LabelResult]) -> list[Mapping[str, Any]]:
    return [result.row() for result in results]
