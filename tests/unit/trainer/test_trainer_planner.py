"""Batches are planned in a child process as in this one, and its errors and its death reach the training loop."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from rollbook.contracts.batch import EncodedBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.contracts.group_codec import encode_group
from rollbook.trainer.data.minibatches import PlanSettings
from rollbook.trainer.data.planner import open_planner
from rollbook.trainer.data.planning import PlannedBatch
from rollbook.trainer.loop import LoopEnd
from tests.parts.trainer.batches import VOCABULARY_SIZE, quick, recorded_batch
from tests.parts.trainer.ledger import FakeReplicas, TinyLoop, open_trainer_ledger

SETTINGS = PlanSettings(config=quick(ppo_n_minibatches=2), is_packed=False, vocabulary_size=VOCABULARY_SIZE)


def encoded(step: int) -> EncodedBatch:
    batch = recorded_batch(step)
    payloads = tuple(encode_group(group).payload for group in batch.groups)
    return EncodedBatch(manifest=batch.manifest, payloads=payloads, limits=TrainingLimits())


def planning_process() -> psutil.Process:
    """The child that plans: earlier tests of this process may have left others, such as multiprocessing's resource tracker."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.ZombieProcess):
            found += [child] if "rollbook.trainer.data.planner" in child.cmdline() else []
    (planner,) = found
    return planner


def is_same(one: PlannedBatch, other: PlannedBatch) -> bool:
    arrays = ("inputs_BT", "predicted_at_N", "targets_N", "sampled_logprobs_N", "advantages_N", "weights_N")
    passes = [
        (first, second)
        for mine, yours in zip(one.minibatches, other.minibatches, strict=True)
        for first, second in zip(mine.microbatches, yours.microbatches, strict=True)
    ]
    return (
        (one.manifest, one.unusable, one.metrics, one.masks)
        == (other.manifest, other.unusable, other.metrics, other.masks)
        and [(shown.group_id, shown.number, shown.advantage) for shown in one.shown]
        == [(shown.group_id, shown.number, shown.advantage) for shown in other.shown]
        and all(
            np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True) for a, b in passes for name in arrays
        )
    )


async def test_a_child_plans_each_batch_as_a_thread_does() -> None:
    async with (
        open_planner(SETTINGS, num_shown=3, in_child=True) as child,
        open_planner(SETTINGS, num_shown=3, in_child=False) as thread,
    ):
        for step in (1, 2):
            planned, expected = await child.start(encoded(step)), await thread.start(encoded(step))
            assert is_same(planned, expected)
            assert (planned.step, len(planned.shown), len(planned.minibatches)) == (step, 3, 2)


def test_the_child_does_not_load_torch() -> None:
    code = "import sys, rollbook.trainer.data.planner; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_batches_that_are_started_together_are_planned_in_order() -> None:
    async with open_planner(SETTINGS, num_shown=0, in_child=True) as planner:
        tasks = [planner.start(encoded(step)) for step in (1, 2, 3)]
        assert [planned.step for planned in await asyncio.gather(*tasks)] == [1, 2, 3]


async def test_a_batch_of_another_vocabulary_is_rejected_with_the_same_error_and_the_next_one_is_planned() -> None:
    async with open_planner(replace(SETTINGS, vocabulary_size=2), num_shown=0, in_child=True) as planner:
        for step in (1, 2):
            with pytest.raises(RunError, match=rf"batch {step}: .* but the vocabulary has 2 tokens"):
                await planner.start(encoded(step))


async def test_the_death_of_the_child_is_an_error_of_the_batch() -> None:
    async with open_planner(SETTINGS, num_shown=0, in_child=True) as planner:
        await planner.start(encoded(1))
        child = planning_process()
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ChildProcessError, match=r"the process that plans batches is lost \(was killed by signal 9"):
            await planner.start(encoded(2))


async def test_closing_leaves_no_process_and_drops_what_was_not_planned() -> None:
    async with open_planner(SETTINGS, num_shown=0, in_child=True) as planner:
        task = planner.start(encoded(1))
        child = planning_process()
    assert task.cancelled()
    assert not child.is_running()


async def test_a_loop_that_plans_in_a_child_trains_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for in_child in (False, True):
        monkeypatch.setattr("rollbook.trainer.loop.plans_in_child", lambda config, choice=in_child: choice)
        async with open_trainer_ledger() as run:
            await run.create(max_steps=3)
            outcome = await TinyLoop(run.source(), FakeReplicas(), tmp_path / str(in_child), quick()).run()
        assert outcome.end is LoopEnd.ENDED
        digests.append(outcome.digest)
    assert digests[0] == digests[1] is not None
