"""What the stages of the training loop pass on: planned batches, trained steps, digested weights.

A batch is planned while the one before it trains, and a trained step is settled while the next one trains.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rollbook.contracts.batch import EncodedBatch
from rollbook.telemetry.token_records import TokenRecordWriter
from rollbook.trainer.data.planning import PlannedBatch
from rollbook.trainer.model.weights import digest_of, to_host
from rollbook.trainer.staleness import LagReport
from rollbook.trainer.step import StepReport, TrainStep
from rollbook.trainer.team import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedBatch:
    encoded: EncodedBatch
    planning: asyncio.Task[PlannedBatch]
    """Its error is raised where the batch is trained, not in the step before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A step that is trained and not settled yet."""

    planned: PlannedBatch
    lags: LagReport
    report: StepReport
    weights: Mapping[str, Tensor]
    wait_s: float
    train_s: float
    began: float
    """When the step before it was trained."""
    is_published: bool
    """False in a replay: replicas may have newer weights."""
    is_repeated: bool
    """An earlier trainer acknowledged it already."""


def train_and_copy(
    learner: Learner, encoded: EncodedBatch, planned: PlannedBatch, records: TokenRecordWriter | None
) -> tuple[StepReport, dict[str, Tensor]]:
    """One copy per step, used for the digest, the publication and the checkpoint."""
    step = encoded.step
    if records is not None and records.is_due(step) and isinstance(learner, TrainStep):
        records.write(step, learner.token_values(encoded.decode()))
    return learner.train(planned.minibatches, step=step), learner.snapshot()


def digested(weights: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], str]:
    """The weights in main memory, and their digest."""
    copies = to_host(weights)
    return copies, digest_of(copies)
