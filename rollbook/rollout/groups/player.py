"""`GroupPlayer`: plays the episodes of one draw concurrently and joins their samples into a group.

Rollout functions are user code. An exception in one never affects the other episodes of its group; `failures.py` decides what it
means.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.retry import backoff
from rollbook.concurrency.tasks import first_error, where_cancelled
from rollbook.contracts.decoding import TOO_DEEP, msgpack_decoder, valid_text
from rollbook.contracts.errors import RollbookError, WeightsAwaitedError, WorkerError
from rollbook.contracts.freshness import SAME_MOMENT_S
from rollbook.contracts.group import DropKind, DropReason, GroupId, PromptGroup, group_id
from rollbook.contracts.group_codec import (
    EncodedGroup,
    decode_group,
    encode_group,
    is_record_too_deep,
    recordable_sample,
)
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
from rollbook.rollout.groups.results import CAUSE_CHARS, GroupTally, PlayedPart, times_of
from rollbook.rollout.metrics import reported_scores
from rollbook.rollout.policy import EpisodeContext, current_episode, enter_episode
from rollbook.rollout.settings import is_ready, quorum_of
from rollbook.rollout.stopwatch import EpisodeTime, MovableTimeout

LATE_S = 2.0
"""The dispatcher cancels a late group within this time."""
_ANNOTATIONS = msgpack_decoder(tuple[list[dict[str, Any]] | None, dict[str, float | bool], dict[str, Any], str | None])
"""Messages, metrics, facts and invalid cause of a sample."""

OnPart: TypeAlias = Callable[[PlayedPart], Awaitable[None]]

Score: TypeAlias = Callable[[Mapping[str, Any], RolloutSample], Awaitable[RolloutSample]]
"""Takes the row of the task and a finished sample; returns the sample with its reward."""


class GroupScorer(Protocol):
    """Calls the reward functions of groups. Implemented by `rewards.scorer.Scorer`."""

    async def score_group(self, row: Mapping[str, Any], samples: Sequence[RolloutSample]) -> list[RolloutSample]: ...

    async def score_late(
        self, row: Mapping[str, Any], sample: RolloutSample, quorum: Sequence[RolloutSample]
    ) -> RolloutSample: ...


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
    part: int = 1
    """Number of the part to play first."""
    num_samples: int | None = None
    """With batch policy `parts`: the samples that the group lacks, to be submitted in parts. None: the whole group at once."""
    baseline: tuple[float, ...] | None = None
    """The rewards of the quorum, for every part after the first."""
    first_part: bytes | None = None
    """The stored first part, for a later one and reward functions of groups."""


class GroupPlayer:
    def __init__(
        self,
        rollout: RolloutFn,
        config: RolloutConfig,
        *,
        filters: Sequence[GroupFilter] | None = None,
        score: Score | None = None,
        group_scorer: GroupScorer | None = None,
        on_failure: OnFailure | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`filters` replace those of the config. `score` calls its reward functions, and `group_scorer` those of groups."""
        is_unscored = bool(config.rewards.functions) and score is None
        if is_unscored or (config.rewards.see_groups and group_scorer is None):
            raise ValueError(
                "the config has reward functions, and a GroupPlayer does not start their processes; pass score= and, for "
                "functions of groups, group_scorer="
            )
        self._rollout = rollout
        self._score = score
        self._group_scorer = group_scorer if config.rewards.see_groups else None
        self._on_failure = on_failure
        self._config = config
        self._filters = tuple(load_filters(config) if filters is None else filters)
        self._clock = clock or SystemClock()

    async def play(self, order: GroupOrder, on_part: OnPart | None = None) -> PlayedPart:
        """Play the samples that the group lacks and join them. Returns the group, or its last part.

        With batch policy `parts`, `on_part` gets each part before the last one as soon as it is complete.
        """
        started = self._clock.now()
        parts = self._parts_of(order)
        tally = GroupTally(
            retries_left=self._config.retry_budget, until=started + order.deadline_s, wanted=parts.num_samples
        )
        running = parts.num_samples + parts.num_surplus
        task = Task(id=order.task_id, row=order.row)
        one_ended, all_ended = asyncio.Event(), asyncio.Event()

        async def play_one(number: int) -> None:
            nonlocal running
            sample = await self._sample(order, task, tally)
            if sample is None:
                tally.lost += 1
            else:
                parts.add(number, sample)
            running -= 1
            one_ended.set()
            if running == 0 or tally.has_enough:
                all_ended.set()

        try:
            async with asyncio.TaskGroup() as group:
                episodes = [
                    group.create_task(play_one(number), name=f"{episode_task_name(order.group_id)}.{number}")
                    for number in range(running)
                ]
                while not all_ended.is_set():
                    await one_ended.wait()
                    one_ended.clear()
                    if parts.is_complete and on_part is not None:
                        await self._wait_for_siblings(group, all_ended)
                        if not all_ended.is_set():
                            await self._score_in_group(task, parts, tally)
                        if not all_ended.is_set():
                            seconds = self._clock.now() - started
                            await on_part(self._next_part(order, parts, tally, seconds=seconds, is_last=False))
                for episode in episodes:
                    episode.cancel("surplus")
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        await self._score_in_group(task, parts, tally)
        return self._next_part(order, parts, tally, seconds=self._clock.now() - started, is_last=True)

    def _parts_of(self, order: GroupOrder) -> GroupParts:
        is_whole = order.num_samples is None
        return GroupParts(
            group_id=order.group_id if order.part == 1 else group_id(order.task_id, order.draw),
            task_id=order.task_id,
            draw=order.draw,
            num_samples=order.num_samples or self._config.completions_per_prompt,
            num_surplus=self._config.oversample if is_whole else 0,
            quorum=None if is_whole else self._config.quorum_size,
            number=order.part,
            baseline=order.baseline,
            compared=None if order.part == 1 else self._stored_quorum(order),
        )

    def _stored_quorum(self, order: GroupOrder) -> tuple[RolloutSample, ...]:
        if self._group_scorer is None or order.first_part is None:
            return ()
        return quorum_of(decode_group(order.first_part).samples)

    async def _score_in_group(self, task: Task, parts: GroupParts, tally: GroupTally) -> None:
        """Call the reward functions of groups for the samples that finished: once for the quorum, then once for each late one."""
        scorer = self._group_scorer
        if scorer is None:
            return
        scored: dict[int, RolloutSample] = {}
        if parts.compared is None and (together := parts.to_score()):
            found = await scorer.score_group(task.row_copy(), list(together.values()))
            scored = self._solved(dict(zip(together, found, strict=True)))
            parts.put_scored(scored)
            parts.compared = quorum_of(list(scored.values()))
        # Others may finish during the calls; a part has no sample that they have not scored.
        while parts.compared is not None and (late := parts.to_score()):
            quorum = parts.compared
            found = await asyncio.gather(*(scorer.score_late(task.row_copy(), one, quorum) for one in late.values()))
            more = self._solved(dict(zip(late, found, strict=True)))
            parts.put_scored(more)
            scored |= more
        for sample in scored.values():
            if sample.invalid_cause is not None:
                tally.causes[valid_text(sample.invalid_cause)[:CAUSE_CHARS]] += 1

    def _solved(self, samples: Mapping[int, RolloutSample]) -> dict[int, RolloutSample]:
        return {n: dataclasses.replace(one, solved=self._config.is_solved(one)) for n, one in samples.items()}

    async def _wait_for_siblings(self, group: asyncio.TaskGroup, all_ended: asyncio.Event) -> None:
        """Wait for more samples of the same part. Waits at most `SAME_MOMENT_S`."""
        waits = (
            group.create_task(self._clock.sleep(SAME_MOMENT_S), name="rollout.same_moment"),
            group.create_task(all_ended.wait(), name="rollout.all_ended"),
        )
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _next_part(
        self, order: GroupOrder, parts: GroupParts, tally: GroupTally, *, seconds: float, is_last: bool
    ) -> PlayedPart:
        is_first, part = parts.number == 1, parts.next_id
        group = parts.take(is_last=is_last)
        drop = self._why_dropped(group, tally, is_first=is_first)
        surplus = 0
        if parts.num_surplus and group is not None:
            surplus = parts.num_samples + parts.num_surplus - tally.lost - len(group.samples)
        outcome = tally.outcome(group, seconds=seconds, surplus=surplus)
        played = PlayedPart(
            order_id=order.group_id,
            encoded=EncodedGroup(id=part, attempt=order.attempt, outcome=outcome, drop=drop)
            if group is None
            else encode_group(group, attempt=order.attempt, outcome=outcome, drop=drop),
            episodes=tuple(tally.episodes),
            scores=() if group is None else reported_scores(group),
            is_last=is_last,
            missing=tally.missing if is_last and tally.lost else None,
            baseline=parts.baseline,
        )
        tally.begin_part()
        return played

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
                tally.scored += 1
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
            sample = dataclasses.replace(_with_times(sample, began), solved=self._config.is_solved(sample))
            if self._score is not None and not is_ready(sample):
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
        if not is_ready(sample):
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

    def _why_dropped(self, group: PromptGroup | None, tally: GroupTally, *, is_first: bool) -> DropReason | None:
        scorable = 0 if group is None else len(group.scorable)
        # Later parts have the baseline of the first one, so they may have any number of samples.
        if is_first and (drop := self._too_few(scorable, tally)) is not None:
            return drop
        if group is None:
            return tally.missing
        if not scorable:
            causes = describe_causes(tally.causes)
            return DropReason(DropKind.INVALID, f"no sample of the part is scorable ({causes})")
        return self._filtered(group, tally)

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


def checked_sample(sample: object) -> RolloutSample | None:
    """The return value of a rollout function if it can be stored; otherwise `BadSampleError`.

    What a policy wrote is data: values of its JSON that no record can hold (lone surrogates, integers of more than 64 bits, deep
    nesting) are replaced, and the episode is scored and trained. As a failure, they would let a policy void an episode.
    """
    if sample is None:
        return None
    if not isinstance(sample, RolloutSample):
        raise BadSampleError(f"rollout returned a {type(sample).__name__}; it must return a RolloutSample or None")
    try:
        # A guard: encoded here once more, so that one bad sample does not make its whole group impossible to encode
        # (`test_a_sample_whose_facts_cannot_be_encoded_fails_alone`).
        try:
            if is_record_too_deep(sample):
                raise OverflowError(TOO_DEEP)
            encoded = msgspec.msgpack.encode((sample.messages, sample.metrics, sample.facts, sample.invalid_cause))
        except (OverflowError, UnicodeEncodeError):
            sample = recordable_sample(sample)
            encoded = msgspec.msgpack.encode((sample.messages, sample.metrics, sample.facts, sample.invalid_cause))
        _ANNOTATIONS.decode(encoded)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadSampleError(
            f"rollout returned a sample whose messages, metrics, facts or invalid_cause are not plain JSON: {error}"
        ) from error
    return sample
