"""A blocking trainer plays groups of AWS tasks from a curriculum, with a policy that knows the solutions."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from rollbook.contracts.group import GroupOutcome
from rollbook.contracts.task import Observation, Task, TaskId
from rollbook.envs.client.group import BlockingSession, GroupRewards, MultiTurnEnvPool
from rollbook.tasks.curriculum import Curriculum
from tests.parts.envs.environments import AWS_ARGS, served

pytest.importorskip("ministack")
pytest.importorskip("awscli")

from rollbook.envs.builtin.awscli.solution import ReferencePolicy
from rollbook.envs.builtin.awscli.tasks.task_bank import TaskTier, task_bank

# Each environment is a simulator and a command line, whose start takes a second of a core each.
GROUP = 2
NUM_GROUPS = 3


def play_solution(row: Mapping[str, Any], session: BlockingSession, seen: Observation) -> float:
    policy, total = ReferencePolicy(row), 0.0
    while not seen.done and (line := policy.next_line(seen)) is not None:
        seen = session.step(line)
        total += seen.reward
    return total


def outcome_of(result: GroupRewards) -> GroupOutcome:
    return GroupOutcome(
        num_samples=len(result.rewards),
        num_scorable=len(result.scored),
        reward_mean=result.mean,
        reward_std=0.0,
        solved_rate=sum(reward > 0.99 for reward in result.scored) / len(result.scored),
        truncated_rate=0.0,
        mean_turns=1.0,
        mean_response_tokens=0.0,
        seconds=0.0,
    )


async def test_a_synchronous_loop_solves_its_tasks_and_reports_each_group_to_the_curriculum() -> None:
    creates = [task for task in task_bank().values() if task.tier is TaskTier.BEGINNER and not task.setup]
    curriculum = Curriculum(
        [Task(id=TaskId(task.id), row={"id": task.id, "seed": 7, "tier": task.tier.value}) for task in creates]
    )
    recorded: list[GroupRewards] = []

    def train(url: str) -> None:
        with MultiTurnEnvPool(url, size=GROUP, on_result=recorded.append) as pool:
            for _ in range(NUM_GROUPS):
                (draw,) = curriculum.propose(1)
                curriculum.taken(1)
                row = curriculum.task(draw.task_id).row_copy()
                rewards = pool.run_group(row, lambda session, first, row=row: play_solution(row, session, first))
                pool.record_group_result(row, rewards)
                curriculum.record_result(draw, outcome_of(recorded[-1]))

    async with served("aws", size=GROUP, args=AWS_ARGS) as server:
        await asyncio.to_thread(train, server.url)
        assert server.pool.health().busy == 0
    assert [result.rewards for result in recorded] == [pytest.approx((1.0,) * GROUP)] * NUM_GROUPS
    played = {TaskId(result.task["id"]) for result in recorded}
    assert len(played) == NUM_GROUPS  # new tasks come before solved ones
    assert all(curriculum.mastery(task_id).results == (1.0,) for task_id in played)
