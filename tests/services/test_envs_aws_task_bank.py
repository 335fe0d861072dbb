"""Every task of the bank: its reference solution scores 1, doing nothing scores 0, with several seeds."""

import asyncio

import pytest

from rollbook.envs.builtin.awscli.environment import AwsWorlds
from rollbook.envs.builtin.awscli.solution import play_reference
from rollbook.envs.builtin.awscli.task_bank import BANK, AwsTask, read_tasks
from tests.parts.envs.aws import aws_worlds, one_world, play

SEEDS = (0, 1, 2)
pytestmark = pytest.mark.slow


async def verdict(worlds: AwsWorlds, task: AwsTask, seed: int) -> str | None:
    """What is wrong with a task, or None."""
    async with one_world(worlds) as world:
        seen = await play_reference(world, {"id": task.id, "seed": seed})
        total = sum(observation.reward for observation in seen)
        if not seen[-1].solved or abs(total - 1.0) > 1e-9:
            return f"{task.id} (seed {seed}): the reference scores {total}: {dict(seen[-1].facts)}"
        idle = await play(world, {"id": task.id, "seed": seed}, ["aws sts get-caller-identity"] * task.step_limit)
        if any(observation.reward for observation in idle) or idle[-1].solved:
            return f"{task.id} (seed {seed}): doing nothing scores {[o.reward for o in idle]}"
    return None


@pytest.mark.parametrize("name", sorted(path.name for path in BANK.glob("*.yaml")))
async def test_every_reference_scores_one_and_doing_nothing_scores_nothing(name: str) -> None:
    tasks = read_tasks([BANK / name])
    async with aws_worlds(2) as worlds:
        verdicts = await asyncio.gather(*(verdict(worlds, task, seed) for task in tasks.values() for seed in SEEDS))
    assert [wrong for wrong in verdicts if wrong] == []
