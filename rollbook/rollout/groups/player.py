"""`GroupAssembler`: plays the episodes of one draw concurrently and joins their samples into a group, or into parts of it.

Rollout functions are user code. An exception in one never affects the other episodes of its group; `failures.py` decides what it
means.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.exception_groups import first_error
from rollbook.concurrency.retry import backoff
from rollbook.concurrency.stacks import where_cancelled
from rollbook.contracts.admission import OpenPart
from rollbook.contracts.decoding import msgpack_decoder
from rollbook.contracts.errors import RollbookError, WeightsAwaitedError, WorkerError
from rollbook.contracts.freshness import SAME_MOMENT_S
from rollbook.contracts.group import DropKind, DropReason, GroupId, PromptGroup, group_id
from rollbook.contracts.policy import Completion
from rollbook.contracts.task import Task, TaskId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.contracts.user_errors import describe_error
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.contract import RolloutFn
from rollbook.rollout.groups.failures import (
    BadSampleError,
    FailureAction,
    RolloutHangsError,
    SampleRaisedError,
    UnscorableError,
    action_on,
    describe_causes,
)
from rollbook.rollout.groups.filters import FilterError, GroupFilter, load_filters
from rollbook.rollout.groups.parts import GroupParts
from rollbook.rollout.groups.results import CAUSE_CHARS, GroupResult, GroupTally, times_of, valid_text
from rollbook.rollout.policy import EpisodeContext, current_episode, enter_episode
from rollbook.rollout.stopwatch import EpisodeTime, MovableTimeout

LATE_S = 2.0
"""The dispatcher cancels a late group within this time."""
_ANNOTATIONS = msgpack_decoder(tuple[list[dict[str, Any]] | None, dict[str, float | bool], dict[str, Any], str | None])
"""Messages, metrics, facts and invalid cause of a sample."""

OnPart: TypeAlias = Callable[["GroupResult"], Awaitable[None]]

Score: TypeAlias = Callable[[Mapping[str, Any], RolloutSample], Awaitable[RolloutSample]]
"""Takes the row of the task and a finished sample; returns the sample with its reward."""


OnFailure: TypeAlias = Callable[["GroupOrder", str, Sequence[Completion]], None]
"""Called for each failed episode with its cause and what the policy sampled in it."""


def episode_task_name(group_id: str) -> str:
    """Prefix of the names of the asyncio tasks that play a group's episodes."""
    return f"rollout.sample.{group_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """One group to play: the fields of a grant and its task that a worker needs."""

    group_id: GroupId
    attempt: int
    task_id: TaskId
    draw: int
    row: Mapping[str, Any]
    min_publication: int
    deadline_s: float
    part: OpenPart | None = None
    """With batch policy `parts`: what is left of the group, to be submitted in parts."""


class GroupAssembler:
    def __init__(
        self,
        rollout: RolloutFn,
        config: RolloutConfig,
        *,
        filters: Sequence[GroupFilter] | None = None,
        score: Score | None = None,
        on_failure: OnFailure | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`filters` replace those of the config. `score` calls the reward functions of the config, if it has some."""
        if config.rewards.functions and score is None:
            raise ValueError(
                "the config has reward functions, and a GroupAssembler does not start their processes; pass score="
            )
        self._rollout = rollout
        self._score = score
        self._on_failure = on_failure
        self._config = config
        self._filters = tuple(load_filters(config) if filters is None else filters)
        self._clock = clock or SystemClock()

    async def play(self, order: GroupOrder) -> GroupResult:
        """Play every episode of the draw and join the samples."""
        started = self._clock.now()
        tally = GroupTally(
            retries_left=self._config.retry_budget,
            until=started + order.deadline_s,
            wanted=self._config.completions_per_prompt,
        )
        task = Task(id=order.task_id, row=order.row)
        try:
            async with asyncio.TaskGroup() as group:
                episodes = [
                    group.create_task(self._sample(order, task, tally), name=f"{episode_task_name(order.group_id)}.{i}")
                    for i in range(self._config.episodes_per_group)
                ]
                if self._config.oversample:
                    group.create_task(_cancel_surplus(tally, episodes), name=f"rollout.surplus.{order.group_id}")
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        found = [sample for one in episodes if not one.cancelled() and (sample := one.result()) is not None]
        samples = _select(found, self._config.completions_per_prompt)
        surplus = len(found) - len(samples) + sum(one.cancelled() for one in episodes)
        return self._join(order, samples, tally, seconds=self._clock.now() - started, surplus=surplus)

    async def play_parts(self, order: GroupOrder, part: OpenPart, on_part: OnPart) -> None:
        """Play what is left of the draw. `on_part` gets each part as soon as it is complete; the last one has `is_last`."""
        started = self._clock.now()
        tally = GroupTally(
            retries_left=self._config.retry_budget, until=started + order.deadline_s, wanted=part.num_samples
        )
        parts = GroupParts.begin(
            part,
            group_id=group_id(order.task_id, order.draw),
            task_id=order.task_id,
            draw=order.draw,
            quorum=self._config.quorum_size,
        )
        # One entry per episode, so it never holds more than the group has samples.
        ended: asyncio.Queue[RolloutSample | None] = asyncio.Queue(maxsize=part.num_samples)
        task = Task(id=order.task_id, row=order.row)

        playing, all_ended = part.num_samples, asyncio.Event()

        async def play_one() -> None:
            nonlocal playing
            ended.put_nowait(await self._sample(order, task, tally))
            playing -= 1
            if playing == 0:
                all_ended.set()

        try:
            async with asyncio.TaskGroup() as group:
                for i in range(part.num_samples):
                    group.create_task(play_one(), name=f"{episode_task_name(order.group_id)}.{i}")
                running = part.num_samples
                while running:
                    found = [await ended.get()]
                    if not all_ended.is_set():
                        await self._wait_a_moment(group, all_ended)
                    while not ended.empty():
                        found.append(ended.get_nowait())
                    running -= len(found)
                    for sample in found:
                        if sample is not None:
                            parts.add(sample)
                    tally.lost += found.count(None)
                    seconds = self._clock.now() - started
                    if (result := self._next_part(parts, tally, seconds=seconds, is_last=running == 0)) is not None:
                        await on_part(result)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _wait_a_moment(self, group: asyncio.TaskGroup, all_ended: asyncio.Event) -> None:
        """Wait for more samples of the same part, but no longer than there are some."""
        waits = (
            group.create_task(self._clock.sleep(SAME_MOMENT_S), name="rollout.same_moment"),
            group.create_task(all_ended.wait(), name="rollout.all_ended"),
        )
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _next_part(self, parts: GroupParts, tally: GroupTally, *, seconds: float, is_last: bool) -> GroupResult | None:
        """The result to report now; None: the quorum is not reached."""
        is_first = parts.baseline is None
        if (group := parts.take(is_last=is_last)) is None:
            if not is_last:
                return None
            outcome, reason = tally.empty_outcome(seconds), tally.missing
            return GroupResult(outcome=outcome, drop=reason, episodes=tuple(tally.episodes), missing=reason)
        scorable = len(group.scorable)
        # Without an earlier part, the samples must be enough for a baseline.
        drop = self._too_few(scorable, tally) if is_first else None
        if not scorable and drop is None:
            causes = describe_causes(tally.causes)
            drop = DropReason(DropKind.INVALID, f"no sample of the part is scorable ({causes})")
        if drop is None:
            drop = self._filtered(group, tally)
        outcome = group.outcome(
            seconds=seconds,
            invalid_causes=tally.causes,
            retried_samples=tally.retried,
            declined_samples=tally.declined,
        )
        result = GroupResult(
            group=group,
            outcome=outcome,
            drop=drop,
            episodes=tuple(tally.episodes),
            is_last=is_last,
            missing=tally.missing if is_last and tally.lost else None,
        )
        tally.begin_part()
        return result

    async def _sample(self, order: GroupOrder, task: Task, tally: GroupTally) -> RolloutSample | None:
        """One scorable sample if the retry budget allows, otherwise the unscorable one or None."""
        waits = backoff(first_s=0.1)
        while True:
            began = time.time()
            result = await self._attempt(order, task, tally)
            tally.episodes.append(times_of(began, result))
            if result is None:
                tally.declined += 1
                return None
            if isinstance(result, RolloutSample):
                tally.add_scored()
                return result
            sample, error = result
            if isinstance(error, WeightsAwaitedError) and self._clock.now() < tally.until + LATE_S:
                # The trainer starts or replays. Without weights no episode can succeed, so this is no failure of the group: the
                # dispatcher releases it at its deadline.
                await self._clock.sleep(next(waits) if self._clock.now() + LATE_S < tally.until else 2 * LATE_S)
                continue
            cause = valid_text(str(error) or type(error).__name__)[:CAUSE_CHARS]
            tally.causes[cause] += 1
            if self._on_failure is not None and (episode := current_episode()) is not None:
                self._on_failure(order, cause, episode.completions)
            wait_s = next(waits)
            # A result after the end of the lease would be discarded.
            is_late = self._clock.now() + wait_s >= tally.until
            if action_on(error) is not FailureAction.RETRY_SAMPLE or tally.retries_left == 0 or is_late:
                return sample
            tally.retries_left -= 1
            tally.retried += 1
            await self._clock.sleep(wait_s)

    async def _attempt(
        self, order: GroupOrder, task: Task, tally: GroupTally
    ) -> RolloutSample | tuple[RolloutSample | None, Exception] | None:
        """Play one episode: a scorable sample, or the error with the unscorable sample if there is one. None: declined."""
        began = time.time()
        try:
            sample = checked_sample(await self._episode(order, task, tally))
            if sample is None:
                return None
            if self._score is not None:
                sample = await self._score(task.row_copy(), sample)
            sample = _with_times(sample, began)
            if self._score is not None and not sample.is_scorable:
                return sample, UnscorableError(sample.invalid_cause)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            return None, SampleRaisedError("rollout raised CancelledError without being cancelled")
        except Exception as error:
            if _is_cancelled():
                # The clean-up of the rollout function failed. As a failure, the episode of a cancelled group would be retried.
                raise asyncio.CancelledError from error
            match action_on(error):
                case FailureAction.STOP_RUN | FailureAction.REPLACE_WORKER:
                    if isinstance(error, RollbookError):
                        raise
                    raise WorkerError(f"rollout raised {describe_error(error)}") from error
                case _ if isinstance(error, RollbookError):
                    return None, error
                case _:
                    return None, SampleRaisedError(f"rollout raised {describe_error(error)}")
        if not sample.is_scorable:
            return sample, BadSampleError(sample.invalid_cause)
        return sample

    async def _episode(self, order: GroupOrder, task: Task, tally: GroupTally) -> object:
        """Call the rollout function once, within the time of the episode and of the lease."""
        stopwatch = EpisodeTime(min(self._config.max_seconds, tally.until - self._clock.now()), clock=self._clock)
        enter_episode(
            EpisodeContext(
                group_id=order.group_id, min_publication=order.min_publication, until=tally.until, time=stopwatch
            )
        )
        try:
            async with asyncio.timeout(None) as limit:

                def left_s() -> float:
                    lease_s = tally.until - self._clock.now()
                    seconds = lease_s if stopwatch.is_stopped else min(lease_s, stopwatch.left_s)
                    return max(0.0, seconds) + self._config.grace_s

                with MovableTimeout(limit, left_s) as move:
                    stopwatch.changed = move
                    return await self._rollout(task.row_copy())
        except TimeoutError as error:
            if not limit.expired():
                raise
            waited = f" and {stopwatch.waited_s:.3g} s of waiting" if stopwatch.waited_s > 0.05 else ""
            raise RolloutHangsError(
                f"rollout did not end within {stopwatch.seconds:g} s (max_seconds){waited} and was cancelled"
                f"{where_cancelled(error)}"
            ) from error
        finally:
            stopwatch.changed = lambda: None

    def _join(
        self, order: GroupOrder, samples: tuple[RolloutSample, ...], tally: GroupTally, *, seconds: float, surplus: int
    ) -> GroupResult:
        drop = self._too_few(sum(sample.is_scorable for sample in samples), tally)
        if not samples:
            assert drop is not None
            return GroupResult(outcome=tally.empty_outcome(seconds), drop=drop, episodes=tuple(tally.episodes))
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
        return GroupResult(group=group, outcome=outcome, drop=drop, episodes=tuple(tally.episodes))

    def _too_few(self, scorable: int, tally: GroupTally) -> DropReason | None:
        """A group with too few samples is invalid, but only filtered if the rollout function declined all the missing ones."""
        needed = min(self._config.min_samples, self._config.completions_per_prompt)
        if scorable >= needed:
            return None
        detail = f"{scorable} of {self._config.completions_per_prompt} samples scorable, min_samples is {needed}"
        if tally.declined:
            detail += f"; rollout returned None for {tally.declined}"
        if not tally.causes:
            return DropReason(DropKind.FILTERED, f"declined: {detail}")
        return DropReason(DropKind.INVALID, f"{detail} ({describe_causes(tally.causes)})")

    def _filtered(self, group: PromptGroup, tally: GroupTally) -> DropReason | None:
        try:
            reason = next((reason for check in self._filters if (reason := check(group)) is not None), None)
        except FilterError as error:
            # The group is neither kept nor filtered, and the circuit breaker counts the failure.
            cause = valid_text(str(error))
            tally.causes[cause[:CAUSE_CHARS]] += 1
            return DropReason(DropKind.INVALID, cause)
        return None if reason is None else DropReason(DropKind.FILTERED, valid_text(reason))


def _is_cancelled() -> bool:
    """Whether the running episode was cancelled from outside."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _with_times(sample: RolloutSample, began: float) -> RolloutSample:
    """The sample with the times of its episode, and of its turns if each was one request to the policy."""
    requests = [] if (episode := current_episode()) is None else episode.times
    turns = sample.turns
    if len(requests) == len(turns):
        turns = tuple(
            dataclasses.replace(
                turn,
                seconds=turn.seconds or round(request.queue_s + request.generate_s, 5),
                queue_s=round(request.queue_s, 5),
                act_s=round(request.act_s, 5),
            )
            for turn, request in zip(turns, requests, strict=True)
        )
    return dataclasses.replace(sample, turns=turns, started_at=began, ended_at=time.time())


def _select(samples: Sequence[RolloutSample], size: int) -> tuple[RolloutSample, ...]:
    """At most `size` samples in their order; scorable ones are preferred."""
    ranked = sorted(range(len(samples)), key=lambda i: not samples[i].is_scorable)
    return tuple(samples[i] for i in sorted(ranked[:size]))


async def _cancel_surplus(tally: GroupTally, episodes: Sequence[asyncio.Task[RolloutSample | None]]) -> None:
    """Cancel the remaining episodes once the group is full. Ends: when all episodes have ended."""
    all_done = asyncio.gather(*episodes, return_exceptions=True)
    all_done.add_done_callback(lambda _: tally.has_enough.set())
    await tally.has_enough.wait()
    for one in episodes:
        one.cancel("surplus")


def checked_sample(sample: object) -> RolloutSample | None:
    """The return value of a rollout function if it can be stored; otherwise `BadSampleError`."""
    if sample is None:
        return None
    if not isinstance(sample, RolloutSample):
        raise BadSampleError(f"rollout returned a {type(sample).__name__}; it must return a RolloutSample or None")
    try:
        # Checked here, so that one bad sample does not make its whole group impossible to encode.
        _ANNOTATIONS.decode(
            msgspec.msgpack.encode((sample.messages, sample.metrics, sample.facts, sample.invalid_cause))
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise BadSampleError(
            f"rollout returned a sample whose messages, metrics, facts or invalid_cause are not plain JSON: {error}"
        ) from error
    return sample
