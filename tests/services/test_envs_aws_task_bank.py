"""Every task of the bank: its reference solution scores 1, doing nothing scores 0, with several seeds."""

import asyncio

import pytest

from rollbook.envs.builtin.awscli.environment import AwsCliPool
from rollbook.envs.builtin.awscli.tasks.task_bank import BANK, AwsTask, read_tasks
from tests.parts.envs.aws import aws_pool, one_environment, play, play_reference

SEEDS = (0, 1, 2)
pytestmark = pytest.mark.slow


async def verdict(environments: AwsCliPool, task: AwsTask, seed: int) -> str | None:
    """The problem of a task, or None."""
    async with one_environment(environments) as env:
        seen = await play_reference(env, {"id": task.id, "seed": seed})
        total = sum(observation.reward for observation in seen)
        if not seen[-1].solved or abs(total - 1.0) > 1e-9:
            return f"{task.id} (seed {seed}): the reference scores {total}: {dict(seen[-1].facts)}"
        idle = await play(env, {"id": task.id, "seed": seed}, ["aws sts get-caller-identity"] * task.step_limit)
        if any(observation.reward for observation in idle) or idle[-1].solved:
            return f"{task.id} (seed {seed}): doing nothing scores {[o.reward for o in idle]}"
    return None


@pytest.mark.parametrize("name", sorted(path.name for path in BANK.glob("*.yaml")))
async def test_every_reference_solution_scores_one_and_doing_nothing_scores_zero(name: str) -> None:
    tasks = read_tasks([BANK / name])
    async with aws_pool(2) as environments:
        verdicts = await asyncio.gather(
            *(verdict(environments, task, seed) for task in tasks.values() for seed in SEEDS)
        )
    assert [wrong for wrong in verdicts if wrong] == []
