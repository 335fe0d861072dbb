"""`GroupAssembler`: the siblings of one draw, played at the same time, fenced, and joined into a group with its outcome.

Rollout functions are foreign code. Whatever escapes one never touches its siblings; what becomes of it stands in `failures.py`.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.exception_groups import where_cancelled
from rollbook.concurrency.retry import backoff
from rollbook.contracts.errors import RollbookError, WorkerError
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupOutcome, PromptGroup
from rollbook.contracts.task import Task, TaskId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.contract import RolloutFn
from rollbook.rollout.episodes.policy import EpisodeContext, enter_episode
from rollbook.rollout.episodes.stopwatch import EpisodeTime
from rollbook.rollout.groups.failures import (
    Action,
    BadSampleError,
    RolloutHangsError,
    SampleRaisedError,
    UnscorableError,
    action_on,
)
from rollbook.rollout.groups.filters import FilterError, GroupFilter
from rollbook.rollout.settings.groups import GroupRules

CAUSE_CHARS = 300
"""A cause is counted by its text and stored with the group: a message that quotes a whole document is cut."""


_ANNOTATIONS = msgspec.msgpack.Decoder(tuple[list[dict[str, Any]] | None, dict[str, float | bool], dict[str, Any]])
"""Messages, metrics and facts of a sample."""

Score: TypeAlias = Callable[[Mapping[str, Any], RolloutSample], Awaitable[RolloutSample]]
"""Takes the task's row and a finished episode; gives it with the reward of the user's functions."""


def sample_name(group_id: str) -> str:
    """How the tasks of a group's episodes are called, for whoever asks where they hang."""
    return f"rollout.sample.{group_id}"


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
    wanted: int
    causes: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    declined: int = 0
    scored: int = 0
    has_enough: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when as many scorable samples are there as a group has. Only with over-sampling do some still play then."""

    def took(self, sample: RolloutSample) -> RolloutSample:
        self.scored += 1
        if self.scored >= self.wanted:
            self.has_enough.set()
        return sample


class GroupAssembler:
    def __init__(
        self,
        rollout: RolloutFn,
        rules: GroupRules,
        *,
        filters: Sequence[GroupFilter] = (),
        score: Score | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._rollout = rollout
        self._score = score
        self._rules = rules
        self._filters = tuple(filters)
        self._clock = clock or SystemClock()

    async def play(self, order: GroupOrder) -> GroupResult:
        """Play every sample of the draw and join what came of it."""
        started = self._clock.now()
        tally = _Tally(
            retries_left=self._rules.retry_budget,
            until=started + order.deadline_s,
            wanted=self._rules.completions_per_prompt,
        )
        task = Task(id=order.task_id, row=order.row)
        try:
            async with asyncio.TaskGroup() as siblings:
                played = [
                    siblings.create_task(self._sample(order, task, tally), name=f"{sample_name(order.group_id)}.{i}")
                    for i in range(self._rules.samples_started)
                ]
                if self._rules.oversample:
                    siblings.create_task(_stop_surplus(tally, played), name=f"rollout.surplus.{order.group_id}")
        except BaseExceptionGroup as escaped:
            raise escaped.exceptions[0] from escaped
        found = [sample for one in played if not one.cancelled() and (sample := one.result()) is not None]
        samples, surplus = self._rules.choose(found)
        surplus += sum(one.cancelled() for one in played)
        return self._join(order, samples, tally, seconds=self._clock.now() - started, surplus=surplus)

    async def _sample(self, order: GroupOrder, task: Task, tally: _Tally) -> RolloutSample | None:
        """One sample: scorable if the budget allows; else the unscorable one there is, or None."""
        waits = backoff(first_s=0.1)
        while True:
            result = await self._attempt(order, task, tally)
            if result is None:
                tally.declined += 1
                return None
            if isinstance(result, RolloutSample):
                return tally.took(result)
            sample, error = result
            tally.causes[(str(error) or type(error).__name__)[:CAUSE_CHARS]] += 1
            wait_s = next(waits)
            # An episode that could not end before the group's lease does would only be thrown away.
            is_late = self._clock.now() + wait_s >= tally.until
            if action_on(error) is not Action.RETRY_SAMPLE or tally.retries_left == 0 or is_late:
                return sample
            tally.retries_left -= 1
            tally.retried += 1
            await self._clock.sleep(wait_s)

    async def _attempt(
        self, order: GroupOrder, task: Task, tally: _Tally
    ) -> RolloutSample | tuple[RolloutSample | None, Exception] | None:
        """One episode, fenced: a scorable sample, or what went wrong with the unscorable one there is. None: declined."""
        try:
            sample = _checked(await self._episode(order, task, tally))
            if sample is None:
                return None
            if self._score is not None:
                sample = await self._score(task.row_copy(), sample)
                if not sample.is_scorable:
                    return sample, UnscorableError(sample.invalid_cause)
        except asyncio.CancelledError:
            if (me := asyncio.current_task()) is not None and me.cancelling():
                raise
            return None, SampleRaisedError("rollout raised CancelledError, though nobody cancelled it")
        except Exception as error:
            match action_on(error):
                case Action.STOP_RUN | Action.REPLACE_WORKER:
                    if isinstance(error, RollbookError):
                        raise
                    raise WorkerError(f"rollout raised {type(error).__name__}: {error}") from error
                case _ if isinstance(error, RollbookError):
                    return None, error
                case _:
                    return None, SampleRaisedError(f"rollout raised {type(error).__name__}: {error}")
        if not sample.is_scorable:
            return sample, BadSampleError(sample.invalid_cause)
        return sample

    async def _episode(self, order: GroupOrder, task: Task, tally: _Tally) -> object:
        """Call the rollout function once, for no longer than the episode's own time lasts, and never beyond the lease."""
        loop = asyncio.get_running_loop()
        own = EpisodeTime(min(self._rules.max_seconds, tally.until - self._clock.now()), clock=self._clock)
        enter_episode(
            EpisodeContext(group_id=order.group_id, min_publication=order.min_publication, until=tally.until, time=own)
        )
        try:
            async with asyncio.timeout(None) as limit:

                def set_alarm() -> None:
                    lease_s = tally.until - self._clock.now()
                    left_s = lease_s if own.is_stopped else min(lease_s, own.left_s)
                    if not limit.expired():
                        limit.reschedule(loop.time() + max(0.0, left_s) + self._rules.grace_s)

                own.changed = set_alarm
                set_alarm()
                return await self._rollout(task.row_copy())
        except TimeoutError as error:
            if not limit.expired():
                raise
            waited = f" and {own.waited_s:.3g} s of waiting" if own.waited_s > 0.05 else ""
            raise RolloutHangsError(
                f"rollout did not end within {own.seconds:g} s (max_seconds){waited} and was cancelled{where_cancelled(error)}"
            ) from error
        finally:
            own.changed = lambda: None

    def _join(
        self, order: GroupOrder, samples: tuple[RolloutSample, ...], tally: _Tally, *, seconds: float, surplus: int
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
            surplus_samples=surplus,
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


async def _stop_surplus(tally: _Tally, played: Sequence[asyncio.Task[RolloutSample | None]]) -> None:
    """Over-sampling: end those that still play once the group is full. Ends: when all have ended."""
    everyone = asyncio.gather(*played, return_exceptions=True)
    everyone.add_done_callback(lambda _: tally.has_enough.set())
    await tally.has_enough.wait()
    for one in played:
        one.cancel("surplus")


def _checked(sample: object) -> RolloutSample | None:
    """What a rollout function returned, if it is a sample that can be stored."""
    if sample is None:
        return None
    if not isinstance(sample, RolloutSample):
        raise BadSampleError(f"rollout returned a {type(sample).__name__}; it must return a RolloutSample or None")
    try:
        # Checked here, so that one bad sample does not make its whole group impossible to encode.
        _ANNOTATIONS.decode(msgspec.msgpack.encode((sample.messages, sample.metrics, sample.facts)))
    except (TypeError, ValueError, OverflowError) as error:
        raise BadSampleError(
            f"rollout returned a sample whose messages, metrics or facts are not plain JSON: {error}"
        ) from error
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
