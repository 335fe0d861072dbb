"""A trainer killed at random moments, with a real ledger: its weights equal, bit for bit, those of an uninterrupted one."""

import asyncio
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.group_codec import decode_group
from rollbook.ledger.service import Ledger
from rollbook.trainer.replay import replay
from tests.parts.ledger.groups import RUN, settings
from tests.parts.ledger.service import serving
from tests.parts.trainer import process as trainer_process
from tests.parts.trainer.batches import quick, tiny_model_dir
from tests.parts.trainer.ledger import GROUPS, submit_batches


async def decided_batches(ledger: Ledger, steps: int) -> list[TrainingBatch]:
    """The batches of the run, read from the ledger."""
    batches = []
    for step in range(1, steps + 1):
        manifest = await ledger.batch_manifest(RUN, step)
        assert manifest is not None
        groups = [decode_group(payload) async for payload in ledger.payloads(RUN, manifest)]
        batches.append(TrainingBatch(manifest=manifest, groups=tuple(groups)))
    return batches


async def until(process: multiprocessing.process.BaseProcess, condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while process.is_alive():
            if await condition():  # type: ignore[misc]  # an async condition
                return
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    ("kills", "steps", "seed"),
    [(2, 9, 0), pytest.param(20, 60, 1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
async def test_a_trainer_killed_at_random_moments_ends_with_the_same_bits(
    tmp_path: Path, kills: int, steps: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    config = {"lr": 1e-2, "checkpoint_every": 3, "ppo_n_minibatches": 2, "max_steps": steps, "keep_every": 6}
    targets = sorted(int(n) for n in rng.choice(np.arange(1, steps), size=kills, replace=False))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.parts.trainer.process"])
    model_dir = tiny_model_dir(tmp_path / "run" / "model")
    killed = 0
    async with serving(tmp_path / "ledger") as (url, ledger):
        await ledger.create_run(RUN, settings(per_step=GROUPS, max_steps=steps))
        await submit_batches(ledger, range(1, steps + 1))

        def start() -> multiprocessing.process.BaseProcess:
            process = context.Process(
                target=trainer_process.train, args=(url, RUN, str(tmp_path / "run"), config), daemon=True
            )
            process.start()
            return process

        for target in targets:
            process = start()

            async def is_acknowledged(target: int = target) -> bool:
                return (await ledger.status(RUN)).acknowledged_step >= target

            await until(process, is_acknowledged)
            # A random moment after the acknowledgement: in the push, the checkpoint or the next step.
            await asyncio.sleep(float(rng.uniform(0, 0.08)))
            killed += process.is_alive()
            process.kill()
            await asyncio.to_thread(process.join)
        process = start()
        await asyncio.to_thread(process.join)
        assert process.exitcode == 0
        batches = await decided_batches(ledger, steps)
        acknowledged = await ledger.steps(RUN)
        status = await ledger.status(RUN)
    assert killed >= kills - 1, "the last kill may come after the end"
    uninterrupted = await replay(batches, model_dir=model_dir, config=quick(**config))
    assert {step.step: step.digest for step in acknowledged} == {
        s: uninterrupted.digests[s] for s in range(1, steps + 1)
    }
    assert {step.receipt for step in acknowledged} <= {"acknowledged", "repeated"}, "no replay diverged"
    assert len(set(uninterrupted.digests.values())) == steps + 1, "every step must have moved the weights"
    assert (status.durable_step, status.acknowledged_step) == (steps, steps)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{s:06d}" for s in range(1, steps + 1) if s % 6 == 0 or (s > steps - 4 and s % 3 == 0)]


@pytest.mark.timeout(300)
async def test_a_trainer_killed_between_a_step_that_did_not_fit_and_its_second_attempt_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    """Also if there is more memory after the restart: the smaller passes were recorded before they were tried."""
    steps, large, small = 4, 10_000, 20
    config = {"lr": 1e-2, "checkpoint_every": 2, "max_steps": steps, "max_tokens_per_microbatch": 200}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.parts.trainer.process"])
    records = {}
    for name, lives in {"uninterrupted": [(small, False)], "killed": [(small, True), (large, False)]}.items():
        tiny_model_dir(tmp_path / name / "model")
        async with serving(tmp_path / f"ledger-{name}") as (url, ledger):
            await ledger.create_run(RUN, settings(per_step=GROUPS, max_steps=steps))
            await submit_batches(ledger, range(1, steps + 1))
            codes = []
            for max_tokens, is_killed in lives:
                process = context.Process(
                    target=trainer_process.train_on_a_small_device,
                    args=(url, RUN, str(tmp_path / name), config, (max_tokens, is_killed)),
                    daemon=True,
                )
                process.start()
                await asyncio.to_thread(process.join)
                codes.append(process.exitcode)
            assert codes == [-signal.SIGKILL if is_killed else 0 for _, is_killed in lives]
            records[name] = [(step.step, step.digest, step.split) for step in await ledger.steps(RUN)]
    assert records["killed"] == records["uninterrupted"]
    assert len({digest for _, digest, _ in records["killed"]}) == steps
    assert all(split is not None and split.max_tokens <= small for _, _, split in records["killed"])
