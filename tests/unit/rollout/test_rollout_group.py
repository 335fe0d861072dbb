"""`GroupAssembler`: foreign code is fenced, failures are played again within the budget, and the floor decides."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.errors import EpisodeError, RunError, WorkerError
from rollbook.contracts.group import DropKind, GroupId
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.groups.failures import describe_causes
from rollbook.rollout.groups.filters import load_filters
from rollbook.rollout.groups.player import GroupAssembler, GroupOrder, GroupResult
from rollbook.rollout.policy import current_episode
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
    """Nobody waits between retries."""

    async def sleep(self, seconds: float) -> None:
        self.jump(seconds)


def sample(reward: float | None) -> RolloutSample:
    assembler = TrajectoryAssembler(SamplingParams())
    assembler.add_prompt([1])
    assembler.add_completion(completion([2]))
    return assembler.build(reward=reward, invalid_cause=None if reward is not None else "grader is down")


def scripted(*outcomes: Outcome) -> Callable[[dict[str, Any]], Awaitable[Any]]:
    """One outcome a call, in the order of the calls."""
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
    size: int = 4,
    floor: int = 2,
    retries: int = 0,
    filter_path: str | None = None,
    drop_constant_reward: bool = True,
    order: GroupOrder = ORDER,
    max_seconds: float = 120.0,
) -> GroupResult:
    rules = RolloutConfig(
        completions_per_prompt=size, min_samples=floor, retry_budget=retries, max_seconds=max_seconds, grace_s=0.01
    )
    filters = load_filters(filter_path, drop_constant_reward=drop_constant_reward)
    return await GroupAssembler(rollout, rules, filters=filters, clock=HurriedClock()).play(order)


async def test_a_whole_group_is_kept_with_its_outcome() -> None:
    result = await play(scripted(*(sample(r) for r in (0.0, 1.0, 0.0, 1.0))))
    assert result.drop is None
    assert result.group is not None
    assert (result.group.id, len(result.group.samples)) == ("t@0", 4)
    assert (result.outcome.num_scorable, result.outcome.reward_mean, result.outcome.invalid_causes) == (4, 0.5, {})


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
async def test_a_failed_sibling_is_named_and_the_group_is_kept_when_the_floor_is_met(
    outcome: Outcome, cause: str
) -> None:
    result = await play(scripted(sample(0.0), outcome, sample(1.0), sample(1.0)))
    assert result.drop is None
    assert result.group is not None
    assert len(result.group.scorable) == 3
    assert result.outcome.invalid_causes == {cause: 1}
    assert result.outcome.reward_mean == pytest.approx(2 / 3), "a failure is never reward 0"


async def test_failures_are_played_again_while_the_groups_budget_lasts() -> None:
    no = ValueError("no")
    result = await play(scripted(no, no, no, no, sample(0.0), sample(1.0), no), retries=3)
    assert result.outcome.retried_samples == 3
    assert result.outcome.num_scorable == 2
    assert result.outcome.invalid_causes == {"rollout raised ValueError: no": 5}
    assert result.drop is None


async def test_below_the_floor_a_group_is_dropped_as_invalid_with_its_causes() -> None:
    result = await play(scripted(sample(1.0), ValueError("no"), ValueError("no"), 42))
    assert result.drop is not None
    assert result.drop.kind is DropKind.INVALID
    assert (
        "1 of 4 samples scorable, min_samples is 2 (2 x rollout raised ValueError: no; 1 x rollout returned a int"
        in str(result.drop)
    )
    assert result.group is not None, "what was played is kept for the record"


async def test_without_any_sample_there_is_a_reason_and_no_group() -> None:
    result = await play(scripted(*[ValueError("no")] * 4))
    assert result.group is None
    assert result.drop is not None
    assert result.drop.kind is DropKind.INVALID
    assert result.outcome.num_samples == 0


async def test_declined_samples_are_counted_and_are_neither_retried_nor_failures() -> None:
    result = await play(scripted(None, sample(0.0), sample(1.0), None), retries=4)
    assert (result.drop, result.outcome.declined_samples, result.outcome.retried_samples) == (None, 2, 0)
    result = await play(scripted(None, None, None, None), retries=4)
    assert result.group is None
    assert str(result.drop).startswith("filtered: declined")


async def test_constant_rewards_are_dropped_as_filtered_and_kept_with_their_outcome() -> None:
    result = await play(scripted(*(sample(0.5) for _ in range(4))))
    assert str(result.drop) == "filtered: constant_reward"
    assert result.group is not None
    kept = await play(scripted(*(sample(0.5) for _ in range(4))), drop_constant_reward=False)
    assert kept.drop is None


async def test_one_scorable_sample_alone_teaches_nothing() -> None:
    result = await play(scripted(sample(1.0), None, None, None), floor=1, drop_constant_reward=False)
    assert str(result.drop) == "filtered: one_sample"


async def test_a_filter_of_the_users_drops_with_its_own_reason() -> None:
    rewards = [sample(r) for r in (0.0, 1.0, 0.0, 1.0)]
    parts = "tests.parts.rollout.functions"
    assert str((await play(scripted(*rewards), filter_path=f"{parts}:drop_all")).drop) == "filtered: too_easy"
    broken = await play(scripted(*rewards), filter_path=f"{parts}:filter_raises")
    assert "invalid: filter tests.parts.rollout.functions:filter_raises raised KeyError" in str(broken.drop)
    assert broken.outcome.invalid_causes
    wrong = await play(scripted(*rewards), filter_path=f"{parts}:filter_wrong")
    assert "returned a bool" in str(wrong.drop)


async def test_each_call_gets_its_own_copy_of_the_row_and_its_groups_context() -> None:
    seen = []

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        row["list"].append("poison")
        episode = current_episode()
        assert episode is not None
        seen.append((len(row["list"]), episode.group_id, episode.min_publication))
        return sample(float(len(seen)))

    await play(rollout)
    assert seen == [(1, "t@0", 5)] * 4


async def test_a_verdict_on_the_run_or_the_worker_is_not_swallowed() -> None:
    for verdict in (RunError("licence"), WorkerError("leak")):
        with pytest.raises(type(verdict)):
            await play(scripted(verdict, *[sample(1.0)] * 3), retries=2)


async def test_a_rollout_that_does_not_end_is_cancelled_and_named() -> None:
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
    assert "sleep" in cause, "where it was is part of the cause"


async def test_nothing_is_played_again_after_the_groups_deadline() -> None:
    clock = HurriedClock()

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        clock.jump(70)
        raise EpisodeError("slow and broken")

    rules = RolloutConfig(completions_per_prompt=2, retry_budget=100)
    result = await GroupAssembler(rollout, rules, clock=clock).play(ORDER)
    assert result.outcome.retried_samples == 0


async def test_cancelling_the_group_cancels_every_sibling() -> None:
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


async def test_a_cancellation_that_leaks_out_of_user_code_is_a_failure_and_no_stop() -> None:
    async def rollout(row: dict[str, Any]) -> RolloutSample:
        raise asyncio.CancelledError

    result = await play(rollout)
    assert result.outcome.invalid_causes == {"rollout raised CancelledError without being cancelled": 4}


async def test_facts_that_cannot_be_stored_are_the_samples_failure_and_not_the_groups() -> None:
    odd = TrajectoryAssembler(SamplingParams())
    odd.add_prompt([1])
    odd.add_completion(completion([2]))
    result = await play(scripted(odd.build(reward=1.0, facts={"x": object()}), sample(0.0), sample(1.0), sample(1.0)))
    assert result.drop is None
    assert "not plain JSON" in next(iter(result.outcome.invalid_causes))


def test_causes_are_told_commonest_first_and_not_without_end() -> None:
    assert describe_causes({"a": 1, "b": 5, "c": 2, "d": 1}) == "5 x b; 2 x c; 1 x a; and 1 further causes"
