"""`GroupPlayer`: failures of user code are isolated and retried; groups with too few samples are dropped."""

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.errors import EpisodeError, RunError, WeightsAwaitedError, WorkerError
from rollbook.contracts.group import DropKind, GroupId
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TurnMark
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.groups.player import GroupOrder, GroupPlayer, Score
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.policy import EpisodeTimeUpError, RequestTimes, current_episode, pause_episode_time
from rollbook.rollout.settings import score_key
from rollbook.rollout.workers.messages import encode
from tests.parts.rollout.guessing import completion

ORDER = GroupOrder(
    group_id=GroupId("t@0"),
    attempt=1,
    task_id=TaskId("t"),
    draw=0,
    row={"list": []},
    min_publication=5,
    deadline_s=60.0,
)
Outcome = RolloutSample | None | object | Exception


class HurriedClock(ManualClock):
    """Sleeping advances the clock at once."""

    async def sleep(self, seconds: float) -> None:
        self.jump(seconds)


def sample(reward: float | None = 1.0) -> RolloutSample:
    assembler = TrajectoryAssembler(SamplingParams())
    assembler.add_prompt([1])
    assembler.add_completion(completion([2]))
    return assembler.build(reward=reward, invalid_cause=None if reward is not None else "grader is down")


def scripted(*outcomes: Outcome) -> Callable[[dict[str, Any]], Awaitable[Any]]:
    """Returns or raises one outcome per call, in order."""
    left = list(outcomes)

    async def rollout(row: dict[str, Any]) -> Any:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return rollout


async def play(
    rollout: Callable[[dict[str, Any]], Awaitable[Any]],
    *,
    score: Score | None = None,
    **settings: Any,
) -> PlayedPart:
    config = RolloutConfig.model_validate({"completions_per_prompt": 4, "retry_budget": 0, "grace_s": 0.01, **settings})
    return await GroupPlayer(rollout, config, score=score, clock=HurriedClock()).play(ORDER)


async def test_a_complete_group_is_kept_with_its_outcome() -> None:
    result = await play(scripted(*(sample(r) for r in (0.0, 1.0, 0.0, 1.0))))
    assert result.drop is None
    assert result.group is not None
    assert (result.group.id, len(result.group.samples)) == ("t@0", 4)
    assert (result.outcome.num_scorable, result.outcome.reward_mean, result.outcome.invalid_causes) == (4, 0.5, {})


async def test_a_sample_has_the_times_of_its_episode_and_of_its_turns() -> None:
    async def rollout(row: dict[str, Any]) -> RolloutSample:
        episode = current_episode()
        assert episode is not None
        episode.times.append(RequestTimes(queue_s=0.5, generate_s=2.0, act_s=0.25, ended_at=1_000.0))
        return sample()

    result = await play(rollout, drop_constant_reward=False)
    group = result.group
    assert group is not None
    assert [episode.turns for episode in result.episodes] == [((997.5, 1_000.0),)] * len(result.episodes)
    first = group.samples[0]
    assert first.started_at is not None
    assert first.ended_at is not None
    assert first.started_at <= first.ended_at
    assert [(turn.seconds, turn.queue_s, turn.act_s) for turn in first.turns] == [(2.5, 0.5, 0.25)]


async def test_the_objects_of_a_finished_episode_are_freed_without_the_garbage_collector() -> None:
    times: list[weakref.ref[Any]] = []

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        episode = current_episode()
        assert episode is not None
        times.append(weakref.ref(episode.time))
        return sample()

    gc.disable()
    try:
        assert (await play(rollout, drop_constant_reward=False)).group is not None
        assert [time() for time in times] == [None] * 4
    finally:
        gc.enable()


def first_lines(causes: Mapping[str, int]) -> Counter[str]:
    """Causes without the tracebacks."""
    found: Counter[str] = Counter()
    for cause, count in causes.items():
        found[cause.splitlines()[0]] += count
    return found


async def test_the_cause_of_a_failed_episode_has_the_line_of_the_users_code() -> None:
    result = await play(scripted(sample(0.0), ValueError("no"), sample(1.0), sample(1.0)))
    (cause,) = result.outcome.invalid_causes
    assert f'File "{__file__}", line ' in cause


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (ValueError("no"), "rollout raised ValueError: no"),
        (EpisodeError("env: connection lost"), "env: connection lost"),
        (TimeoutError("mine"), "rollout raised TimeoutError: mine"),
        (42, "rollout returned a int; it must return a RolloutSample or None"),
        (sample(None), "grader is down"),
    ],
)
async def test_a_failed_episode_is_named_and_the_group_is_kept_with_enough_samples(
    outcome: Outcome, cause: str
) -> None:
    result = await play(scripted(sample(0.0), outcome, sample(1.0), sample(1.0)))
    assert result.drop is None
    assert result.group is not None
    assert len(result.group.scorable) == 3
    assert first_lines(result.outcome.invalid_causes) == {cause: 1}
    assert result.outcome.reward_mean == pytest.approx(2 / 3), "a failure is never reward 0"


async def test_failures_are_retried_within_the_retry_budget_of_the_group() -> None:
    no = ValueError("no")
    result = await play(scripted(no, no, no, no, sample(0.0), sample(1.0), no), retry_budget=3)
    assert result.outcome.retried_samples == 3
    assert result.outcome.num_scorable == 2
    assert first_lines(result.outcome.invalid_causes) == {"rollout raised ValueError: no": 5}
    assert result.drop is None


async def test_a_group_with_too_few_samples_is_dropped_as_invalid_with_its_causes() -> None:
    result = await play(scripted(sample(1.0), ValueError("no"), ValueError("no"), 42))
    assert result.drop is not None
    assert result.drop.kind is DropKind.INVALID
    assert (
        "1 of 4 samples scorable, min_samples is 2 (2 x rollout raised ValueError: no; 1 x rollout returned a int"
        in str(result.drop)
    )
    assert result.group is not None, "the samples are kept"


async def test_without_any_sample_there_is_a_drop_reason_and_no_group() -> None:
    result = await play(scripted(*[ValueError("no")] * 4))
    assert result.group is None
    assert result.drop is not None
    assert result.drop.kind is DropKind.INVALID
    assert result.outcome.num_samples == 0


async def test_declined_samples_are_counted_and_are_neither_retried_nor_failures() -> None:
    result = await play(scripted(None, sample(0.0), sample(1.0), None), retry_budget=4)
    assert (result.drop, result.outcome.declined_samples, result.outcome.retried_samples) == (None, 2, 0)
    result = await play(scripted(None, None, None, None), retry_budget=4)
    assert result.group is None
    assert str(result.drop).startswith("filtered: declined")


async def test_a_group_with_constant_rewards_is_dropped_as_filtered_with_its_outcome() -> None:
    result = await play(scripted(*(sample(0.5) for _ in range(4))))
    assert str(result.drop) == "filtered: constant_reward"
    assert result.group is not None
    kept = await play(scripted(*(sample(0.5) for _ in range(4))), drop_constant_reward=False)
    assert kept.drop is None


async def test_a_run_with_turn_credit_keeps_equal_rewards_that_were_earned_in_other_turns() -> None:
    marks = tuple(TurnMark(sequence=0, start=1, end=2) for _ in range(2))
    early, late = (replace(sample(0.5), turns=marks).with_turns(rewards=turns) for turns in ([0.5, 0], [0, 0.5]))
    assert (await play(scripted(early, late, late, late), turn_credit="rewards")).drop is None
    assert str((await play(scripted(*[late] * 4), turn_credit="rewards")).drop) == "filtered: constant_reward"
    assert str((await play(scripted(early, late, late, late))).drop) == "filtered: constant_reward"
    assert (await play(scripted(early, late, late, late), turn_credit="off")).drop is not None
    # With a discount, the same reward is worth less after more turns; without one it is not.
    short = replace(sample(0.5), turns=marks[:1]).with_turns(states=["start"])
    at_door = replace(sample(0.5), turns=marks).with_turns(rewards=[0, 0.5], states=["start", "door"])
    at_wall = replace(sample(0.5), turns=marks).with_turns(rewards=[0, 0.5], states=["start", "wall"])
    kept = {
        name: [
            (await play(scripted(first, at_door, at_door, at_door), turn_credit=name)).drop is None
            for first in (short, at_wall, at_door)
        ]
        for name in ("rewards", "lengths", "states")
    }
    assert kept == {
        "rewards": [False, False, False],
        "lengths": [True, False, False],
        "states": [True, True, False],
    }


async def test_a_run_that_compares_reward_functions_keeps_equal_sums_of_other_scores() -> None:
    right, brief = (
        replace(sample(1.0), metrics={"reward/right": a, "reward/brief": 1.0 - a, "reward/seen": a}) for a in (0.0, 1.0)
    )
    names = ("right", "brief")
    assert (await play(scripted(right, brief, brief, brief), score_credit=names)).drop is None
    assert str((await play(scripted(*[brief] * 4), score_credit=names)).drop) == "filtered: constant_reward"
    assert str((await play(scripted(right, brief, brief, brief))).drop) == "filtered: constant_reward"
    other = await play(scripted(right, brief, brief, brief), score_credit=("other",))
    assert str(other.drop) == "filtered: constant_reward"


async def test_a_group_with_token_advantages_of_its_producer_is_kept_whatever_its_rewards_are() -> None:
    plain = sample(0.5)
    (tokens,) = plain.sequences
    own, zero = (replace(plain, sequences=(tokens.with_columns(advantages=[0.0, value]),)) for value in (-0.5, 0.0))
    assert (await play(scripted(own, plain, plain, plain))).drop is None
    assert (await play(scripted(own, None, None, None), min_samples=1)).drop is None
    assert str((await play(scripted(*[zero] * 4))).drop) == "filtered: constant_reward"


async def test_a_group_with_one_scorable_sample_is_filtered() -> None:
    result = await play(scripted(sample(1.0), None, None, None), min_samples=1, drop_constant_reward=False)
    assert str(result.drop) == "filtered: one_sample"


async def test_a_user_filter_drops_with_its_reason_and_its_failure_is_invalid() -> None:
    rewards = [sample(r) for r in (0.0, 1.0, 0.0, 1.0)]
    parts = "tests.parts.rollout.functions"
    assert str((await play(scripted(*rewards), filter=f"{parts}:drop_all")).drop) == "filtered: too_easy"
    broken = await play(scripted(*rewards), filter=f"{parts}:filter_raises")
    assert "invalid: filter tests.parts.rollout.functions:filter_raises raised KeyError" in str(broken.drop)
    assert broken.outcome.invalid_causes
    wrong = await play(scripted(*rewards), filter=f"{parts}:filter_wrong")
    assert "returned a bool" in str(wrong.drop)


async def test_each_call_gets_a_copy_of_the_row_and_the_context_of_its_group() -> None:
    seen = []

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        row["list"].append("changed")
        episode = current_episode()
        assert episode is not None
        seen.append((len(row["list"]), episode.group_id, episode.min_publication))
        return sample(float(len(seen)))

    await play(rollout)
    assert seen == [(1, "t@0", 5)] * 4


async def test_run_and_worker_errors_are_raised() -> None:
    for error in (RunError("licence"), WorkerError("leak")):
        with pytest.raises(type(error)):
            await play(scripted(error, *[sample(1.0)] * 3), retry_budget=2)


async def test_a_rollout_that_hangs_is_cancelled_and_its_location_is_reported() -> None:
    calls = 0

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.sleep(3600)
        return sample(float(calls))

    result = await play(rollout, max_seconds=0.05)
    assert result.drop is None
    (cause,) = result.outcome.invalid_causes
    assert cause.startswith(
        "rollout did not end within 0.05 s (max_seconds) and was cancelled in rollout (test_rollout"
    )
    assert "sleep" in cause, "the cause contains the location"


async def test_nothing_is_retried_after_the_deadline_of_the_group() -> None:
    clock = HurriedClock()

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        clock.jump(70)
        raise EpisodeError("slow and broken")

    config = RolloutConfig(completions_per_prompt=2, retry_budget=100)
    result = await GroupPlayer(rollout, config, clock=clock).play(ORDER)
    assert result.outcome.retried_samples == 0


async def test_an_episode_that_waits_for_weights_is_played_again_without_a_failure_or_a_retry() -> None:
    awaited = WeightsAwaitedError("this server has no weights")
    result = await play(scripted(*[awaited] * 9, *[sample(reward) for reward in (0, 1, 0, 1)]))
    assert (result.drop, result.outcome.num_scorable, result.outcome.retried_samples) == (None, 4, 0)
    assert result.outcome.invalid_causes == {}


async def test_a_group_without_weights_fails_only_after_its_deadline() -> None:
    clock, last_calls = HurriedClock(), list[float]()

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        last_calls.append(clock.now())
        raise WeightsAwaitedError("this server has no weights")

    config = RolloutConfig(completions_per_prompt=1, retry_budget=0)
    began = clock.now()
    result = await GroupPlayer(rollout, config, clock=clock).play(ORDER)
    assert last_calls[-1] - began >= ORDER.deadline_s
    assert result.drop is not None
    assert "no weights" in str(result.drop)


async def test_cancelling_a_group_cancels_all_its_episodes() -> None:
    started = asyncio.Event()
    ended: list[int] = []

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(1)
        return sample(1.0)

    task = asyncio.create_task(play(rollout))
    await started.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(ended) == 4


async def test_an_episode_whose_clean_up_fails_at_its_cancellation_is_not_played_again() -> None:
    started = asyncio.Event()
    calls = 0

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        nonlocal calls
        calls += 1
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            raise RuntimeError("the connection cannot be closed")

    task = asyncio.create_task(play(rollout, retry_budget=4))
    await started.wait()
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=5)
    assert done
    assert task.cancelled()
    assert calls == 4


async def test_a_cancelled_error_raised_by_user_code_is_a_failure() -> None:
    async def rollout(row: dict[str, Any]) -> RolloutSample:
        raise asyncio.CancelledError

    result = await play(rollout)
    assert result.outcome.invalid_causes == {"rollout raised CancelledError without being cancelled": 4}


async def test_a_sample_whose_facts_cannot_be_encoded_fails_alone() -> None:
    invalid = TrajectoryAssembler(SamplingParams())
    invalid.add_prompt([1])
    invalid.add_completion(completion([2]))
    result = await play(
        scripted(invalid.build(reward=1.0, facts={"x": object()}), sample(0.0), sample(1.0), sample(1.0))
    )
    assert result.drop is None
    assert "not plain JSON" in next(iter(result.outcome.invalid_causes))


async def test_a_policy_cannot_void_an_episode_by_what_it_writes() -> None:
    deep: Any = 1
    for _ in range(2_000):
        deep = [deep]
    for written in ("half a character \ud83d", 2**64, -(2**63) - 1, 10**5_000, deep, float("nan"), float("inf")):
        chat = TrajectoryAssembler(SamplingParams())
        chat.add_prompt([1])
        chat.add_completion(completion([2]))
        call = {"function": {"name": "f", "arguments": {"x": written}}}
        odd = chat.build(
            reward=0.0, facts={"given": written}, messages=[{"role": "assistant", "content": "", "tool_calls": [call]}]
        )
        result = await play(scripted(odd, sample(0.0), sample(1.0), sample(1.0)))
        assert (result.drop, result.outcome.invalid_causes, result.outcome.num_scorable) == (None, {}, 4)
        assert len(encode(result)) > 0


async def test_a_failure_whose_text_is_not_valid_unicode_fails_alone() -> None:
    half = "half a character \ud83d"
    invalid = TrajectoryAssembler(SamplingParams())
    invalid.add_prompt([1])
    invalid.add_completion(completion([2]))
    result = await play(
        scripted(ValueError(half), invalid.build(reward=None, invalid_cause=half), sample(0.0), sample(1.0))
    )
    assert result.drop is None
    causes = first_lines(result.outcome.invalid_causes)
    assert causes["rollout raised ValueError: half a character \\ud83d"] == 1
    assert len(causes) == 2
    assert len(encode(result)) > 0


async def test_a_filter_may_name_a_reason_that_is_not_valid_unicode() -> None:
    config = RolloutConfig(completions_per_prompt=2, retry_budget=0)
    assembler = GroupPlayer(scripted(sample(0.0), sample(1.0)), config, filters=[lambda group: "bad \ud83d"])
    result = await assembler.play(ORDER)
    assert str(result.drop) == "filtered: bad \\ud83d"


async def test_an_episode_that_cannot_be_scored_is_kept_and_not_retried() -> None:
    calls = 0

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        nonlocal calls
        calls += 1
        return sample()

    async def score(row: Any, played: RolloutSample) -> RolloutSample:
        return sample(None)

    result = await play(rollout, score=score, completions_per_prompt=2, retry_budget=4)
    assert calls == 2
    assert result.group is not None
    assert len(result.group.samples) == 2
    assert result.outcome.num_scorable == 0
    assert result.outcome.invalid_causes == {"grader is down": 2}


async def test_a_memory_error_is_raised_as_a_worker_error() -> None:
    async def rollout(row: dict[str, Any]) -> RolloutSample:
        raise MemoryError

    with pytest.raises(WorkerError, match="MemoryError"):
        await play(rollout)


async def test_an_episode_whose_time_is_up_is_not_retried() -> None:
    calls = 0

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        nonlocal calls
        calls += 1
        raise EpisodeTimeUpError("over")

    result = await play(rollout, completions_per_prompt=2, retry_budget=4)
    assert (calls, result.outcome.retried_samples) == (2, 0)


async def test_paused_time_neither_counts_nor_cancels_an_episode() -> None:
    used: list[float] = []

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        with pause_episode_time():
            await asyncio.sleep(0.3)
        episode = current_episode()
        assert episode is not None
        assert episode.time is not None
        used.append(episode.time.used_s)
        return sample(float(len(used)))

    result = await play(rollout, completions_per_prompt=2, max_seconds=0.1)
    assert result.outcome.num_scorable == 2
    assert used == [0.0, 0.0]


async def test_over_sampling_keeps_the_first_to_finish_and_counts_the_rest_as_surplus() -> None:
    started = 0

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        nonlocal started
        started += 1
        mine = started
        if mine <= 2:
            await asyncio.sleep(3600)
        return sample(float(mine))

    result = await play(rollout, completions_per_prompt=2, oversample=2)
    assert started == 4
    assert result.group is not None
    assert sorted(s.reward or 0 for s in result.group.samples) == [3.0, 4.0]
    assert result.outcome.surplus_samples == 2


async def test_over_sampling_compensates_failed_episodes() -> None:
    rewards = iter([None, 1.0, None, 2.0])

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        return sample(next(rewards))

    result = await play(rollout, completions_per_prompt=2, oversample=2)
    assert result.group is not None
    assert [s.reward for s in result.group.samples] == [1.0, 2.0]
    assert (result.outcome.surplus_samples, result.outcome.num_samples) == (2, 2)


async def test_a_group_of_one_sample_by_design_is_kept() -> None:
    async def rollout(row: dict[str, Any]) -> RolloutSample:
        return sample(1.0)

    result = await play(rollout, completions_per_prompt=1)
    assert result.drop is None
    assert result.group is not None
    assert len(result.group.samples) == 1


def test_reward_functions_of_the_config_need_a_scorer() -> None:
    async def rollout(row: dict[str, Any]) -> RolloutSample:
        return sample(1.0)

    config = RolloutConfig.model_validate({"rewards": {"functions": {"right": {"path": "m:f"}}}})
    with pytest.raises(ValueError, match="pass score="):
        GroupPlayer(rollout, config)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, [None, None, None, None]), ({"solved_at": 1.0}, [False, True, False, True])],
)
async def test_a_reward_may_decide_whether_a_sample_is_solved(
    settings: dict[str, Any], expected: list[bool | None]
) -> None:
    result = await play(scripted(*(sample(r) for r in (0.0, 1.0, 0.9, 1.5))), **settings)
    assert result.group is not None
    assert [one.solved for one in result.group.samples] == expected


@pytest.mark.parametrize(
    ("solved_at", "expected"), [(None, [False, True, False, True]), (0.5, [False, True, True, True])]
)
async def test_a_reward_function_may_decide_whether_a_sample_is_solved(
    solved_at: float | None, expected: list[bool]
) -> None:
    values = iter((0.0, 1.0, 0.5, 1.0))

    async def score(_: object, one: RolloutSample) -> RolloutSample:
        return replace(one, metrics={**one.metrics, score_key("correct"): next(values)})

    rewards = {"functions": {"correct": {"path": "rewards:correct", "weight": 0.1}}, "solved_by": "correct"}
    played = scripted(*(sample(r) for r in (0.2, 0.3, 0.25, 0.3)))
    result = await play(played, score=score, rewards=rewards, solved_at=solved_at)
    assert result.group is not None
    assert [one.solved for one in result.group.samples] == expected


def test_the_function_that_decides_must_exist() -> None:
    functions = {"correct": {"path": "rewards:correct"}}
    with pytest.raises(ValidationError, match="solved_by = 'corect' is no function; the functions are: correct"):
        RolloutConfig.model_validate({"rewards": {"functions": functions, "solved_by": "corect"}})
