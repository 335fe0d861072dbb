"""Train again from the record and say which weights come out. Reads batches, writes nothing.

On a CPU with the recorded thread count the digests are those of the run that was recorded, however often it was killed.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollbook.contracts.batch import TrainingBatch
from rollbook.trainer.checkpoint import initial_learner
from rollbook.trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    final_digest: str
    digests: Mapping[int, str]
    """Digest of the weights after each step; step 0 is the initial weights."""


async def replay(
    batches: Iterable[TrainingBatch] | AsyncIterable[TrainingBatch],
    *,
    model_dir: Path,
    config: TrainerConfig,
    until: int | None = None,
) -> ReplayResult:
    """Train the recorded batches in order from the initial weights in `model_dir`, up to step `until`."""
    learner = await asyncio.to_thread(initial_learner, model_dir, config)
    digests = {0: await asyncio.to_thread(learner.model.digest)}
    async for batch in _stream(batches):
        if until is not None and batch.step > until:
            break
        await asyncio.to_thread(learner.run, batch)
        digests[batch.step] = await asyncio.to_thread(learner.model.digest)
    return ReplayResult(final_digest=digests[learner.step], digests=digests)


async def _stream(batches: Iterable[TrainingBatch] | AsyncIterable[TrainingBatch]) -> AsyncIterator[TrainingBatch]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch
