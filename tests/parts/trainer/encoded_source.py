"""A source of given batches for a planning process. Imports no torch, like that process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import cast

from rollbook.contracts.batch import EncodedBatch, EndOfRun, TrainerRole
from rollbook.contracts.ports import BatchSource


class EncodedSource:
    """Implements the one method of `BatchSource` that a planner calls."""

    def __init__(self, batches: Mapping[int, EncodedBatch]) -> None:
        self._batches = batches

    async def encoded_batch(self, step: int, *, wait_s: float) -> EncodedBatch | EndOfRun | None:
        return self._batches.get(step)


@asynccontextmanager
async def open_encoded(batches: Mapping[int, EncodedBatch], role: TrainerRole) -> AsyncIterator[BatchSource]:
    yield cast(BatchSource, EncodedSource(batches))
