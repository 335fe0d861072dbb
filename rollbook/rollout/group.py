"""`GroupAssembler`: the siblings of one draw, played at the same time, fenced, and joined into a group with its outcome.

Rollout functions are foreign code. Whatever escapes one becomes the cause of an unscorable sample, is played again while the
group's budget lasts, and never touches its siblings. Only `RunError` and `WorkerError` pass: they judge more than an episode.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.retry import backoff
from rollbook.contracts.errors import EpisodeError, RunError, TransientError, WorkerError
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupOutcome, PromptGroup
from rollbook.contracts.task import Task, TaskId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.contract import RolloutFn
from rollbook.rollout.filters import FilterError, GroupFilter
from rollbook.rollout.group_rules import GroupRules
from rollbook.rollout.policy import EpisodeContext, enter_episode

GRACE_S = 5.0
"""From the end of an episode's time to its cancellation: a function that watches its own time ends by itself within it."""

CAUSE_CHARS = 300
"""A cause is counted by its text and stored with the group: a message that quotes a whole document is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """One group to play: what a worker needs of a grant and its task."""

    group_id: GroupId
    attempt: int
    task_id: TaskId
    draw: int
    row: Mapping[str, Any]
    min_publication: int
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """`group` is None when not one sample exists; then `drop` says why. `drop` with a group: to be stored as dropped."""

    outcome: GroupOutcome
    group: PromptGroup | None = None
    drop: DropReason | None = None

    def __post_init__(self) -> None:
        if self.group is None and self.drop is None:
            raise ValueError("a result without a group needs the reason")


@dataclass(slots=True)
class _Tally:
    """What the siblings of one group share while they are played."""

    retries_left: int
    until: float
    causes: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    declined: int = 0


class GroupAssembler:
    def __init__(
        self, rollout: RolloutFn, rules: GroupRules, *, filters: Sequence[GroupFilter] = (), clock: Clock | None = None
    ) -> None:
        self._rollout = rollout
        self._rules = rules
        self._filters = tuple(filters)
        self._clock = clock or SystemClock()

    async def play(self, order: GroupOrder) -> GroupResult:
        """Play every sample of the draw and join what came of it."""
        started = self._clock.now()
        tally = _Tally(retries_left=self._rules.retry_budget, until=started + order.deadline_s)
        task = Task(id=order.task_id, row=order.row)
        try:
            async with asyncio.TaskGroup() as siblings:
                played = [
                    siblings.create_task(self._sample(order, task, tally), name=f"rollout.sample.{order.group_id}.{i}")
                    for i in range(self._rules.completions_per_prompt)
                ]
        except BaseExceptionGroup as escaped:
            raise escaped.exceptions[0] from escaped
        samples = tuple(sample for task_ in played if (sample := task_.result()) is not None)
        return self._join(order, samples, tally, self._clock.now() - started)

    async def _sample(self, order: GroupOrder, task: Task, tally: _Tally) -> RolloutSample | None:
        """One sample: scorable if the budget allows; else the unscorable one there is, or None."""
        waits = backoff(first_s=0.1)
        while True:
            result = await self._attempt(order, task, tally)
            if result is None:
                tally.declined += 1
                return None
            if isinstance(result, RolloutSample) and result.is_scorable:
                return result
            cause = result if isinstance(result, str) else result.invalid_cause or ""
            tally.causes[cause[:CAUSE_CHARS]] += 1
            wait_s = next(waits)
            # An episode that could not end before the group's lease does would only be thrown away.
            if tally.retries_left == 0 or self._clock.now() + wait_s >= tally.until:
                return result if isinstance(result, RolloutSample) else None
            tally.retries_left -= 1
            tally.retried += 1
            await self._clock.sleep(wait_s)

    async def _attempt(self, order: GroupOrder, task: Task, tally: _Tally) -> RolloutSample | str | None:
        """Call the rollout function once, fenced. A text is the cause why there is no sample."""
        seconds = min(self._rules.max_seconds, tally.until - self._clock.now())
        enter_episode(
            EpisodeContext(
                group_id=order.group_id, min_publication=order.min_publication, until=self._clock.now() + seconds
            )
        )
        try:
            async with asyncio.timeout(max(0.0, seconds) + GRACE_S) as limit:
                sample = await self._rollout(task.row_copy())
        except (RunError, WorkerError):
            raise
        except (EpisodeError, TransientError) as error:
            return str(error) or type(error).__name__
        except asyncio.CancelledError:
            if (me := asyncio.current_task()) is not None and me.cancelling():
                raise
            return "rollout raised CancelledError, though nobody cancelled it"
        except TimeoutError as error:
            if limit.expired():
                return f"rollout did not end within {seconds:g} s (max_seconds) and was cancelled"
            return f"rollout raised TimeoutError: {error}"
        except Exception as error:
            return f"rollout raised {type(error).__name__}: {error}"
        return _checked(sample)

    def _join(
        self, order: GroupOrder, samples: tuple[RolloutSample, ...], tally: _Tally, seconds: float
    ) -> GroupResult:
        scorable = sum(sample.is_scorable for sample in samples)
        drop = self._rules.missing_floor(scorable=scorable, declined=tally.declined, causes=tally.causes)
        if not samples:
            assert drop is not None
            return GroupResult(outcome=_nothing(tally, seconds), drop=drop)
        group = PromptGroup(id=order.group_id, task_id=order.task_id, draw=order.draw, samples=samples)
        if drop is None:
            drop = self._filtered(group, tally)
        outcome = group.outcome(
            seconds=seconds,
            invalid_causes=tally.causes,
            retried_samples=tally.retried,
            declined_samples=tally.declined,
        )
        return GroupResult(group=group, outcome=outcome, drop=drop)

    def _filtered(self, group: PromptGroup, tally: _Tally) -> DropReason | None:
        try:
            reason = next((reason for ask in self._filters if (reason := ask(group)) is not None), None)
        except FilterError as error:
            # Neither kept nor filtered: a broken filter must not decide, and the breaker must see it.
            tally.causes[str(error)[:CAUSE_CHARS]] += 1
            return DropReason(DropKind.INVALID, str(error))
        return None if reason is None else DropReason(DropKind.FILTERED, reason)


def _checked(sample: object) -> RolloutSample | str | None:
    """What a rollout function returned, or what is wrong with it."""
    if sample is None:
        return None
    if not isinstance(sample, RolloutSample):
        return f"rollout returned a {type(sample).__name__}; it must return a RolloutSample or None"
    try:
        # It is stored as JSON; better to learn here that it cannot be than when the whole group is submitted.
        msgspec.json.encode((sample.messages, sample.metrics, sample.facts))
    except (TypeError, ValueError, OverflowError) as error:
        return f"rollout returned a sample whose messages, metrics or facts are not plain JSON: {error}"
    return sample


def _nothing(tally: _Tally, seconds: float) -> GroupOutcome:
    return GroupOutcome(
        num_samples=0,
        num_scorable=0,
        reward_mean=None,
        reward_std=None,
        solved_rate=None,
        truncated_rate=0.0,
        mean_turns=0.0,
        mean_response_tokens=0.0,
        seconds=seconds,
        invalid_causes=dict(tally.causes),
        retried_samples=tally.retried,
        declined_samples=tally.declined,
    )
