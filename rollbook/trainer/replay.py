"""Train recorded batches again and return the weight digests. Writes nothing.

On a CPU with the recorded thread count, the digests equal those of the recorded run, however often it was killed.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollbook.contracts.batch import TrainingBatch
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import flatten


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
    publishes_adapters: bool = False,
) -> ReplayResult:
    """Train the recorded batches in order from the initial weights in `model_dir`, up to step `until`.

    `publishes_adapters`: the run published adapters only, so its digests are digests of the adapters.
    """
    learner = await asyncio.to_thread(initial_learner, model_dir, config)
    if publishes_adapters:
        learner.publish_adapters()
    digests = {0: await asyncio.to_thread(learner.model.digest)}
    async for batch in _stream(batches):
        if until is not None and batch.step > until:
            break
        await asyncio.to_thread(learner.run, batch)
        digests[batch.step] = await asyncio.to_thread(learner.model.digest)
    return ReplayResult(final_digest=digests[learner.step], digests=digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterfactualStep:
    """One recorded batch under other settings. `gain` is measured before the batch is trained."""

    step: int
    gain: float | None
    metrics: Mapping[str, float | None]


async def retrain(
    batches: Iterable[TrainingBatch], *, model_dir: Path, config: TrainerConfig, judged_by: TrainerConfig
) -> tuple[list[CounterfactualStep], str]:
    """Train a recorded stream with the settings of `config`, without generation. Returns the steps and the final digest.

    Gains use the advantages of `judged_by`, on batches not trained yet, so that runs with different settings can be compared.
    """
    learner = await asyncio.to_thread(initial_learner, model_dir, config)
    steps: list[CounterfactualStep] = []
    for batch in batches:
        gain = await asyncio.to_thread(learner.gain, flatten(batch, judged_by))
        report = await asyncio.to_thread(learner.run, batch)
        steps.append(CounterfactualStep(step=batch.step, gain=gain, metrics=report.metrics))
    return steps, await asyncio.to_thread(learner.model.digest)


async def _stream(batches: Iterable[TrainingBatch] | AsyncIterable[TrainingBatch]) -> AsyncIterator[TrainingBatch]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch
