"""Killed after any step, the resumed run ends with the weights, bit for bit, of one that was never killed."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollbook.contracts.batch import AckReceipt, TrainingBatch
from rollbook.trainer.loop import LoopEnd
from rollbook.trainer.replay import replay
from tests.parts.trainer.batches import quick, recorded_batch, tiny_model_dir
from tests.parts.trainer.ledger import MemoryBatchSource, MemoryLedger, MemoryReplicas, trainer_loop

STEPS = 6


class KilledError(BaseException):
    """Ends the process, as far as the loop can tell: nothing after it runs."""


class DyingSource(MemoryBatchSource):
    """Dies at one call, before or after the ledger hears it."""

    def __init__(self, ledger: MemoryLedger, call: str, step: int, *, is_heard: bool) -> None:
        super().__init__(ledger)
        self._dies = (call, step)
        self._is_heard = is_heard

    async def acknowledge(self, step: int, weights_digest: str) -> AckReceipt:
        if self._dies == ("acknowledge", step) and not self._is_heard:
            raise KilledError
        receipt = await super().acknowledge(step, weights_digest)
        if self._dies == ("acknowledge", step):
            raise KilledError
        return receipt

    async def checkpointed(self, step: int, *, oldest_kept: int) -> None:
        if self._dies == ("checkpointed", step) and not self._is_heard:
            raise KilledError
        await super().checkpointed(step, oldest_kept=oldest_kept)
        if self._dies == ("checkpointed", step):
            raise KilledError


EVERYWHERE = [("acknowledge", s, heard) for s in range(1, STEPS + 1) for heard in (False, True)] + [
    ("checkpointed", s, heard) for s in (2, 4, 6) for heard in (False, True)
]


@pytest.mark.parametrize(
    ("call", "step", "is_heard", "minibatches"),
    [(*where, 1) for where in EVERYWHERE] + [("acknowledge", 3, True, 3), ("acknowledge", 6, False, 3)],
)
async def test_a_run_killed_anywhere_ends_with_the_same_bits(
    tmp_path: Path, call: str, step: int, is_heard: bool, minibatches: int
) -> None:
    config = quick(ppo_n_minibatches=minibatches)
    ledger = MemoryLedger(recorded_batch, num_steps=STEPS)
    with pytest.raises(KilledError):
        await trainer_loop(DyingSource(ledger, call, step, is_heard=is_heard), MemoryReplicas(), tmp_path, config).run()
    outcome = await trainer_loop(ledger.source(), MemoryReplicas(), tmp_path, config).run()

    straight = await replay(
        (recorded_batch(s) for s in range(1, STEPS + 1)), model_dir=tmp_path / "model", config=config
    )
    assert outcome.end is LoopEnd.ENDED
    assert outcome.digest == straight.final_digest
    assert ledger.acknowledged == {s: straight.digests[s] for s in range(1, STEPS + 1)}
    assert len(set(straight.digests.values())) == STEPS + 1, "every step must have moved the weights"
    assert ledger.durable_step == STEPS


async def test_replay_stops_at_the_requested_step(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path / "model")
    batches = [recorded_batch(s) for s in (1, 2, 3)]

    async def stream() -> AsyncIterator[TrainingBatch]:
        for batch in batches:
            yield batch

    part = await replay(stream(), model_dir=model_dir, config=quick(), until=2)
    whole = await replay(batches, model_dir=model_dir, config=quick())
    assert set(part.digests) == {0, 1, 2}
    assert part.final_digest == whole.digests[2]
