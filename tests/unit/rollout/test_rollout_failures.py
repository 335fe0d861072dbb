"""The failure table, and what a group makes of it."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.errors import EpisodeError, FencedError, RollbookError, RunError, TransientError, WorkerError
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.episodes.env_calls import EnvironmentTimeoutError, with_timeouts
from rollbook.rollout.groups.failures import (
    FAILURES,
    OUTCOMES,
    Action,
    BadSampleError,
    RolloutHangsError,
    UnscorableError,
    action_on,
)
from rollbook.rollout.groups.filters import FilterError
from rollbook.rollout.groups.player import GroupAssembler, GroupOrder, GroupResult
from rollbook.rollout.policy import (
    EpisodeContext,
    EpisodePolicy,
    EpisodeTimeUpError,
    current_episode,
    enter_episode,
    pause_episode_time,
)
from rollbook.rollout.stopwatch import EpisodeTime
from rollbook.rollout.workers.handle import WorkerDiedError
from tests.parts.rollout.guessing import completion, open_guessing


@pytest.mark.parametrize(
    ("error", "action"),
    [
        (RunError("x"), Action.STOP_RUN),
        (FencedError("x"), Action.STOP_RUN),
        (WorkerError("x"), Action.REPLACE_WORKER),
        (WorkerDiedError("x"), Action.REPLACE_WORKER),
        (MemoryError(), Action.REPLACE_WORKER),
        (FilterError("x"), Action.FAIL_GROUP),
        (UnscorableError("x"), Action.DROP_SAMPLE),
        (EpisodeTimeUpError("x"), Action.DROP_SAMPLE),
        (RolloutHangsError("x"), Action.RETRY_SAMPLE),
        (BadSampleError("x"), Action.RETRY_SAMPLE),
        (TransientError("x"), Action.RETRY_SAMPLE),
        (EpisodeError("x"), Action.RETRY_SAMPLE),
        (TimeoutError(), Action.RETRY_SAMPLE),
        (ValueError(), Action.RETRY_SAMPLE),
    ],
)
def test_every_class_of_error_has_one_verdict(error: Exception, action: Action) -> None:
    assert action_on(error) is action


def test_the_table_answers_for_every_error_and_no_row_is_hidden_by_an_earlier_one() -> None:
    for number, row in enumerate(FAILURES):
        assert not any(issubclass(row.error, earlier.error) for earlier in FAILURES[:number]), row
    assert issubclass(RollbookError, FAILURES[-1].error)
    assert set(OUTCOMES) == set(EndReason)
    assert {row.action for row in FAILURES} == set(Action)


def sample(reward: float | None = 1.0) -> RolloutSample:
    assembler = TrajectoryAssembler(SamplingParams())
    assembler.add_prompt([1])
    assembler.add_completion(completion([2]))
    return assembler.build(reward=reward, invalid_cause=None if reward is not None else "grader is down")


def order(deadline_s: float = 60.0) -> GroupOrder:
    return GroupOrder(
        group_id=GroupId("t@0"),
        attempt=1,
        task_id=TaskId("t"),
        draw=0,
        row={},
        min_publication=0,
        deadline_s=deadline_s,
    )


async def play(rollout: Any, *, score: Any = None, **rules: Any) -> GroupResult:
    made = RolloutConfig(**{"completions_per_prompt": 2, "retry_budget": 4, **rules})
    return await GroupAssembler(rollout, made, score=score).play(order())


async def test_an_episode_that_cannot_be_scored_is_kept_unscored_and_not_played_again() -> None:
    calls = 0

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        nonlocal calls
        calls += 1
        return sample()

    async def score(row: Any, played: RolloutSample) -> RolloutSample:
        return sample(None)

    result = await play(rollout, score=score)
    assert calls == 2
    assert result.group is not None
    assert len(result.group.samples) == 2
    assert result.outcome.num_scorable == 0
    assert result.outcome.invalid_causes == {"grader is down": 2}


async def test_a_worker_that_is_out_of_memory_is_given_up() -> None:
    async def rollout(row: dict[str, Any]) -> RolloutSample:
        raise MemoryError

    with pytest.raises(WorkerError, match="MemoryError"):
        await play(rollout)


async def test_a_function_that_lets_its_time_run_out_is_not_played_again() -> None:
    calls = 0

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        nonlocal calls
        calls += 1
        raise EpisodeTimeUpError("over")

    result = await play(rollout)
    assert (calls, result.outcome.retried_samples) == (2, 0)


async def test_waiting_for_a_sandbox_is_not_the_episodes_time() -> None:
    used: list[float] = []

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        with pause_episode_time():
            await asyncio.sleep(0.6)
        episode = current_episode()
        assert episode is not None
        assert episode.time is not None
        used.append(episode.time.used_s)
        return sample(float(len(used)))

    result = await play(rollout, max_seconds=0.3)
    assert result.outcome.num_scorable == 2
    assert all(seconds < 0.3 for seconds in used)


def test_the_clock_of_an_episode_stands_still_in_waits_apart_from_what_is_charged() -> None:
    clock = ManualClock()
    time = EpisodeTime(30, clock=clock)
    clock.jump(5)
    with time.waiting():
        clock.jump(100)
        assert (time.used_s, time.is_stopped) == (5, True)
        with time.waiting() as inner:
            clock.jump(10)
            inner.charge(7)
    assert (time.used_s, time.left_s, time.waited_s) == (12, 18, 103)
    clock.jump(18)
    assert time.is_over


class Engine:
    """Answers after a queue, and says how long it sampled."""

    def __init__(self, clock: ManualClock, *, queue_s: float, sampling_s: float, is_telling: bool = True) -> None:
        self.clock, self.queue_s, self.sampling_s, self.is_telling = clock, queue_s, sampling_s, is_telling

    async def complete(
        self, prompt_ids: Any, sampling: SamplingParams, *, min_publication: int = 0, timeout_s: float | None = None
    ) -> Completion:
        self.clock.jump(self.queue_s + self.sampling_s)
        return Completion(
            token_ids=np.array([1], dtype=np.int32),
            logprobs=np.array([-0.5], dtype=np.float32),
            versions=np.array([1], dtype=np.int32),
            finish_reason=FinishReason.STOP,
            generation_s=self.sampling_s if self.is_telling else None,
        )


@pytest.mark.parametrize(("is_telling", "used"), [(True, 2.0), (False, 52.0)])
async def test_the_engines_queue_is_not_the_episodes_time_where_the_engine_tells(is_telling: bool, used: float) -> None:
    clock = ManualClock()
    time = EpisodeTime(30, clock=clock)
    enter_episode(EpisodeContext(group_id=GroupId("g"), min_publication=0, until=clock.now() + 600, time=time))
    engine = Engine(clock, queue_s=50, sampling_s=2, is_telling=is_telling)
    await EpisodePolicy(engine, SamplingParams(), clock=clock).complete([1])
    assert time.used_s == used


class Aborting:
    """Gives a few tokens at a time, each time under newer weights, and says that it was aborted."""

    def __init__(self, *portions: int) -> None:
        self.portions = list(portions)
        self.asked: list[tuple[list[int], int]] = []

    async def complete(
        self, prompt_ids: Any, sampling: SamplingParams, *, min_publication: int = 0, timeout_s: float | None = None
    ) -> Completion:
        self.asked.append((list(prompt_ids), sampling.max_tokens))
        count, version = self.portions.pop(0), len(self.asked)
        return Completion(
            token_ids=np.arange(10 * version, 10 * version + count, dtype=np.int32),
            logprobs=np.full(count, -0.1 * version, dtype=np.float32),
            versions=np.full(count, version, dtype=np.int32),
            finish_reason=FinishReason.ABORT if self.portions else FinishReason.STOP,
        )


async def test_an_aborted_request_is_continued_from_its_tokens_and_each_keeps_its_version() -> None:
    engine = Aborting(3, 0, 2)
    policy = EpisodePolicy(engine, SamplingParams(max_tokens=8))
    answer = await policy.complete([1, 2])
    assert answer.token_ids.tolist() == [10, 11, 12, 30, 31]
    assert answer.versions.tolist() == [1, 1, 1, 3, 3]
    assert answer.logprobs.tolist() == pytest.approx([-0.1] * 3 + [-0.3] * 2)
    assert answer.finish_reason is FinishReason.STOP
    assert engine.asked == [([1, 2], 8), ([1, 2, 10, 11, 12], 5), ([1, 2, 10, 11, 12], 5)]
    assert policy.continued == 2


async def test_a_request_that_was_aborted_at_its_last_token_is_whole() -> None:
    answer = await EpisodePolicy(Aborting(4, 1), SamplingParams(max_tokens=4)).complete([1])
    assert (len(answer.token_ids), answer.finish_reason) == (4, FinishReason.LENGTH)


async def test_a_server_that_only_aborts_is_a_failure_and_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbook.rollout.policy.MAX_EMPTY_ABORTS", 2)
    with pytest.raises(TransientError, match="aborted a request 3 times without sampling"):
        await EpisodePolicy(Aborting(*[0] * 50), SamplingParams()).complete([1])


async def test_an_environment_that_does_not_answer_is_named_with_its_step() -> None:
    async with with_timeouts(open_guessing, step_s=0.05, open_s=30)() as env:
        await env.reset({"secret": 3})
        await env.step("1")
        env.__dict__["_env"].step = lambda action: asyncio.sleep(3600)
        with pytest.raises(
            EnvironmentTimeoutError, match=r"step 2 of the environment GuessingEnvironment .* 0.05 s \(rollout.step_s\)"
        ):
            await env.step("2")


async def test_over_sampling_keeps_the_first_to_finish_and_drops_the_rest_as_surplus() -> None:
    started = 0

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        nonlocal started
        started += 1
        mine = started
        if mine <= 2:
            await asyncio.sleep(3600)
        return sample(float(mine))

    result = await play(rollout, oversample=2)
    assert started == 4
    assert result.group is not None
    assert sorted(s.reward or 0 for s in result.group.samples) == [3.0, 4.0]
    assert result.outcome.surplus_samples == 2


async def test_over_sampling_makes_up_for_failed_siblings() -> None:
    rewards = iter([None, 1.0, None, 2.0])

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        return sample(next(rewards))

    result = await play(rollout, oversample=2, retry_budget=0)
    assert result.group is not None
    assert [s.reward for s in result.group.samples] == [1.0, 2.0]
    assert (result.outcome.surplus_samples, result.outcome.num_samples) == (2, 2)
