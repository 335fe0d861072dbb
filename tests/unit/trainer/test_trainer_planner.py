"""A child process fetches and plans batches as this process does, and its errors and its death reach the training loop."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from rollbook.contracts.batch import EncodedBatch, TrainerRole
from rollbook.contracts.errors import FencedError
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.plugin import extend_search_path
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.run.ledger_clients import open_trainer_batches
from rollbook.telemetry.token_records import TokenRecordWriter, recorded_steps
from rollbook.trainer.data.minibatches import PlanSettings
from rollbook.trainer.data.planner import BatchRequest, OpenSource, Planner, open_planner
from rollbook.trainer.data.planning import PlannedBatch, UnplannableBatchError
from rollbook.trainer.loop import LoopEnd
from tests.parts.ledger.groups import RUN
from tests.parts.ledger.service import serving
from tests.parts.trainer.batches import VOCABULARY_SIZE, quick, recorded_batch
from tests.parts.trainer.encoded_source import open_encoded
from tests.parts.trainer.ledger import FakeReplicas, TinyLoop, TrainerLedger

SETTINGS = PlanSettings(config=quick(ppo_n_minibatches=2), is_packed=False, vocabulary_size=VOCABULARY_SIZE)
ROLE = TrainerRole(epoch=1, restored_step=0, last_decided=0, last_acknowledged=0, durable_step=0, last_confirmed=None)


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


@asynccontextmanager
async def planning(settings: PlanSettings = SETTINGS, *, in_child: bool, num_shown: int = 0) -> AsyncIterator[Planner]:
    batches = {step: encoded(step) for step in (1, 2)}
    async with (
        open_encoded(batches, ROLE) as source,
        open_planner(
            settings,
            source=source,
            role=ROLE,
            num_shown=num_shown,
            open_in_child=partial(open_encoded, batches) if in_child else None,
        ) as planner,
    ):
        yield planner


async def plan(planner: Planner, step: int, *, keeps_batch: bool = False) -> PlannedBatch:
    planned = await planner.plan(BatchRequest(step=step, wait_s=0.0, keeps_batch=keeps_batch))
    assert isinstance(planned, PlannedBatch)
    return planned


async def test_a_child_uses_the_advantage_of_a_user(tmp_path: Path) -> None:
    (tmp_path / "planned_advantage.py").write_text("def double(group, rewards):\n    return 2 * rewards\n")
    extend_search_path([tmp_path])
    own = replace(SETTINGS, config=quick(advantage="planned_advantage:double"))
    async with planning(own, in_child=True) as child, planning(own, in_child=False) as local:
        assert is_same(await plan(child, 1), await plan(local, 1))


async def test_a_child_plans_each_batch_as_this_process_does() -> None:
    async with planning(in_child=True, num_shown=3) as child, planning(in_child=False, num_shown=3) as local:
        for step in (1, 2):
            planned = await plan(child, step)
            assert is_same(planned, await plan(local, step))
            assert (planned.step, len(planned.shown), len(planned.minibatches)) == (step, 3, 2)
            assert planned.batch is None
        assert await child.plan(BatchRequest(step=3, wait_s=0.0)) is None, "not enough groups yet"


async def test_the_decoded_batch_comes_with_the_plan_on_request() -> None:
    async with planning(in_child=True) as planner:
        batch = (await plan(planner, 1, keeps_batch=True)).batch
    assert batch is not None
    assert [group.id for group in batch.groups] == [group.id for group in recorded_batch(1).groups]


def test_the_child_does_not_load_torch() -> None:
    """Neither to plan, nor to open the ledger of a run."""
    code = "import sys, rollbook.trainer.data.planner, rollbook.run.ledger_clients; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_a_batch_of_another_vocabulary_is_rejected_with_the_same_error_and_the_next_one_is_planned() -> None:
    async with planning(replace(SETTINGS, vocabulary_size=2), in_child=True) as planner:
        for step in (1, 2):
            with pytest.raises(UnplannableBatchError, match=rf"batch {step}: .* but the vocabulary has 2 tokens"):
                await plan(planner, step)


async def test_the_death_of_the_child_is_an_error_of_the_batch() -> None:
    async with planning(in_child=True) as planner:
        await plan(planner, 1)
        child = planning_process()
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ChildProcessError, match=r"the process that plans batches is lost \(was killed by signal 9"):
            await plan(planner, 2)


async def test_closing_leaves_no_process() -> None:
    async with planning(in_child=True):
        child = planning_process()
    assert not child.is_running()


@asynccontextmanager
async def open_served_run(directory: Path) -> AsyncIterator[tuple[LedgerClient, OpenSource]]:
    """A client of a ledger with three batches, and a function that opens another one in a child."""
    async with serving(directory) as (url, ledger):
        await TrainerLedger(ledger).create(max_steps=3)
        async with open_ledger_client(url, RUN, request_s=5.0) as client:
            yield client, partial(open_trainer_batches, url, RUN, request_s=5.0, token=None)


async def test_a_child_is_fenced_with_its_trainer(tmp_path: Path) -> None:
    async with open_served_run(tmp_path) as (client, open_in_child):
        role = await client.take_role(restored_step=0)
        async with open_planner(
            SETTINGS, source=client, role=role, num_shown=0, open_in_child=open_in_child
        ) as planner:
            assert (await plan(planner, 1)).step == 1
            await client.take_role(restored_step=0)
            with pytest.raises(FencedError):
                await plan(planner, 2)


async def test_a_loop_whose_child_fetches_and_plans_trains_the_same_weights_and_records_tokens(tmp_path: Path) -> None:
    digests = []
    for in_child in (False, True):
        directory = tmp_path / str(in_child)
        async with open_served_run(directory / "ledger") as (client, open_in_child):
            outcome = await TinyLoop(
                client,
                FakeReplicas(),
                directory,
                quick(),
                open_in_child=open_in_child if in_child else None,
                token_records=TokenRecordWriter(directory, every=2, kept=5),
            ).run()
        assert outcome.end is LoopEnd.ENDED
        assert recorded_steps(directory) == [2]
        digests.append(outcome.digest)
    assert digests[0] == digests[1] is not None
