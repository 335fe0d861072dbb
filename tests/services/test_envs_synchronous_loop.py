"""A trainer that cannot await plays groups of the AWS world with a policy that knows the solutions."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from rollbook.contracts.environment import Observation
from rollbook.envs.client_pools import BlockingSession, GroupResult, MultiTurnEnvPool
from tests.parts.envs_worlds import AWS_ARGS, served

pytest.importorskip("ministack")
pytest.importorskip("awscli")

from rollbook.envs.awscli.solution import ReferencePolicy
from rollbook.envs.awscli.task_bank import Tier, task_bank

GROUP = 4
NUM_TASKS = 3


def play_solution(row: Mapping[str, Any], session: BlockingSession, seen: Observation) -> float:
    policy, total = ReferencePolicy(row), 0.0
    while not seen.done and (line := policy.next_line(seen)) is not None:
        seen = session.step(line)
        total += seen.reward
    return total


async def test_a_synchronous_loop_solves_its_tasks_and_records_what_each_group_earned() -> None:
    creates = [task for task in task_bank().values() if task.tier is Tier.BEGINNER and not task.setup]
    rows = [{"id": task.id, "seed": 7} for task in creates[:NUM_TASKS]]
    recorded: list[GroupResult] = []

    def train(url: str) -> None:
        with MultiTurnEnvPool(url, size=GROUP, on_result=recorded.append) as pool:
            for row in rows:
                rewards = pool.run_group(row, lambda session, first, row=row: play_solution(row, session, first))
                pool.record_group_result(row, rewards)

    async with served("aws", size=GROUP, args=AWS_ARGS) as server:
        await asyncio.to_thread(train, server.url)
        assert server.worlds.health().busy == 0
    assert [result.task["id"] for result in recorded] == [row["id"] for row in rows]
    assert [result.rewards for result in recorded] == [pytest.approx((1.0,) * GROUP)] * NUM_TASKS
