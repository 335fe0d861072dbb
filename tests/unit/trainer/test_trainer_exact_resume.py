"""A run killed at any step and resumed ends with the same weights, bit for bit, as an uninterrupted run."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollbook.contracts.batch import AckReceipt, TrainingBatch
from rollbook.contracts.group import GroupId
from rollbook.trainer.loop import LoopEnd
from rollbook.trainer.replay import replay
from tests.parts.ledger.groups import RUN
from tests.parts.trainer.batches import quick, recorded_batch, tiny_model_dir
from tests.parts.trainer.ledger import FakeReplicas, LedgerSource, TinyLoop, TrainerLedger, open_trainer_ledger

STEPS = 6


class KilledError(BaseException):
    """Simulates SIGKILL: no handler for exceptions catches it."""


class KillingSource(LedgerSource):
    """Kills the trainer in one call, before or after the ledger receives the call."""

    def __init__(self, ledger: TrainerLedger, call: str, step: int, *, is_received: bool) -> None:
        super().__init__(ledger)
        self._kill_at = (call, step)
        self._is_received = is_received

    async def acknowledge(
        self, step: int, weights_digest: str, *, unusable: Mapping[GroupId, str] | None = None
    ) -> AckReceipt:
        if self._kill_at == ("acknowledge", step) and not self._is_received:
            raise KilledError
        receipt = await super().acknowledge(step, weights_digest, unusable=unusable)
        if self._kill_at == ("acknowledge", step):
            raise KilledError
        return receipt

    async def checkpointed(self, step: int, *, oldest_kept: int) -> None:
        if self._kill_at == ("checkpointed", step) and not self._is_received:
            raise KilledError
        await super().checkpointed(step, oldest_kept=oldest_kept)
        if self._kill_at == ("checkpointed", step):
            raise KilledError


CALLS = [("acknowledge", s, is_received) for s in range(1, STEPS + 1) for is_received in (False, True)] + [
    ("checkpointed", s, is_received) for s in (2, 4, 6) for is_received in (False, True)
]


@pytest.mark.parametrize(
    ("call", "step", "is_received", "minibatches"),
    [(*call, 1) for call in CALLS] + [("acknowledge", 3, True, 3), ("acknowledge", 6, False, 3)],
)
async def test_a_run_killed_anywhere_ends_with_the_same_bits(
    tmp_path: Path, call: str, step: int, is_received: bool, minibatches: int
) -> None:
    config = quick(ppo_n_minibatches=minibatches)
    async with open_trainer_ledger() as ledger:
        await ledger.create(max_steps=STEPS)
        source = KillingSource(ledger, call, step, is_received=is_received)
        # SIGKILL ends the threads of a process too. Here a checkpoint may still be written: wait until it is.
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor() as threads:
            loop.set_default_executor(threads)
            with pytest.raises(KilledError):
                await TinyLoop(source, FakeReplicas(), tmp_path, config).run()
        loop.set_default_executor(ThreadPoolExecutor())
        outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, config).run()
        acknowledged = await ledger.ledger.steps(RUN)
        durable_step = await ledger.durable_step()

    uninterrupted = await replay(
        (recorded_batch(s) for s in range(1, STEPS + 1)), model_dir=tmp_path / "model", config=config
    )
    assert outcome.end is LoopEnd.ENDED
    assert outcome.digest == uninterrupted.final_digest
    assert {record.step for record in acknowledged} == set(range(1, STEPS + 1))
    assert all(record.digest == uninterrupted.digests[record.step] for record in acknowledged)
    assert len(set(uninterrupted.digests.values())) == STEPS + 1, "every step must have moved the weights"
    assert durable_step == STEPS


async def test_replay_stops_at_the_requested_step(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path / "model")
    batches = [recorded_batch(s) for s in (1, 2, 3)]

    async def stream() -> AsyncIterator[TrainingBatch]:
        for batch in batches:
            yield batch

    part = await replay(stream(), model_dir=model_dir, config=quick(), until=2)
    uninterrupted = await replay(batches, model_dir=model_dir, config=quick())
    assert set(part.digests) == {0, 1, 2}
    assert part.final_digest == uninterrupted.digests[2]
