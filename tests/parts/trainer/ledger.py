"""A trainer loop on a real ledger in memory, with fake replicas."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from rollbook.contracts.admission import LedgerStatus
from rollbook.contracts.batch import AckReceipt, EncodedBatch, EndOfRun, PassSplit, TrainerRole
from rollbook.contracts.errors import FencedError, TransientError
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.policy import NOT_SAMPLED, Publication, SamplerExactness
from rollbook.contracts.ports import BatchSource, Fence, WeightReceiver
from rollbook.ledger.records import PublicationRecord
from rollbook.ledger.service import Ledger
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.telemetry.spans import SpanRecorder
from rollbook.telemetry.token_records import TokenRecordWriter
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.planner import OpenSource
from rollbook.trainer.loop import LoopOutcome, TrainerLoop
from rollbook.trainer.metrics import TRAINER_METRICS
from rollbook.trainer.pipeline import BatchFeed, LoopReports, WeightTargets
from tests.parts.ledger.groups import RUN, settings, submission_of
from tests.parts.ledger.service import open_memory_ledger, read_batch
from tests.parts.trainer.batches import recorded_batch, tiny_model_dir

GROUPS = 3
"""Groups of a recorded batch."""


async def submit_batches(ledger: Ledger, steps: Iterable[int]) -> None:
    """Submit the groups of recorded batches as an external producer does: without a known sampling version."""
    for step in steps:
        for group in recorded_batch(step, groups=GROUPS).groups:
            plain = unversioned(group)
            await ledger.submit(RUN, submission_of(plain))


def unversioned(group: PromptGroup) -> PromptGroup:
    samples = tuple(
        replace(s, sequences=tuple(replace(r, versions=np.full_like(r.versions, NOT_SAMPLED)) for r in s.sequences))
        for s in group.samples
    )
    return replace(group, samples=samples)


class TrainerLedger:
    """A ledger with one run whose batches are `recorded_batch(step)`. Records the calls of its trainers in order."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.calls: list[str] = []

    async def create(self, *, max_steps: int, submitted: int | None = None) -> None:
        """Create the run and submit its first batches (default: all of them)."""
        await self.ledger.create_run(RUN, settings(per_step=GROUPS, max_steps=max_steps))
        await self.submit(*range(1, (max_steps if submitted is None else submitted) + 1))

    async def submit(self, *steps: int) -> None:
        await submit_batches(self.ledger, steps)

    def source(self) -> "LedgerSource":
        return LedgerSource(self)

    async def acknowledged(self) -> dict[int, str]:
        """The weights digest of each acknowledged step."""
        return {record.step: record.digest for record in await self.ledger.steps(RUN)}

    async def durable_step(self) -> int:
        return (await self.ledger.status(RUN)).durable_step

    async def is_ended(self) -> bool:
        return (await self.ledger.status(RUN)).ended

    async def publications(self) -> list[PublicationRecord]:
        return await self.ledger.publications(RUN)


@asynccontextmanager
async def open_trainer_ledger() -> AsyncIterator[TrainerLedger]:
    async with open_memory_ledger() as ledger:
        yield TrainerLedger(ledger)


class LedgerSource:
    """The connection of one trainer. The next `failures` calls fail as if the ledger were unreachable."""

    def __init__(self, run: TrainerLedger) -> None:
        self._ledger = run.ledger
        self._calls = run.calls
        self._epoch = 0
        self.failures = 0

    def _connect(self) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise TransientError("ledger: connection refused")

    async def take_role(self, *, restored_step: int) -> TrainerRole:
        self._connect()
        role = await self._ledger.take_role(RUN, restored_step=restored_step)
        self._epoch = role.epoch
        self._calls.append(f"role {restored_step}")
        return role

    async def encoded_batch(self, step: int, *, wait_s: float) -> EncodedBatch | EndOfRun | None:
        self._connect()
        return await read_batch(self._ledger, step, epoch=self._epoch, wait_s=wait_s)

    async def acknowledge(
        self,
        step: int,
        weights_digest: str,
        *,
        unusable: Mapping[GroupId, str] | None = None,
        split: PassSplit | None = None,
    ) -> AckReceipt:
        self._connect()
        receipt = await self._ledger.acknowledge(
            RUN, step, weights_digest, epoch=self._epoch, unusable=unusable, split=split
        )
        self._calls.append(f"acknowledge {step}" + ("" if receipt is AckReceipt.ACKNOWLEDGED else " again"))
        return receipt

    async def register(self, step: int, weights_digest: str) -> Publication:
        self._connect()
        return await self._ledger.register(RUN, step, weights_digest, epoch=self._epoch)

    async def confirm(self, publication: Publication) -> None:
        self._connect()
        await self._ledger.confirm(RUN, publication, epoch=self._epoch)
        self._calls.append(f"publish {publication.step}")

    async def status(self) -> LedgerStatus:
        self._connect()
        return await self._ledger.status(RUN)

    async def checkpointed(self, step: int, *, oldest_kept: int) -> None:
        self._connect()
        await self._ledger.checkpointed(RUN, step, oldest_kept=oldest_kept, epoch=self._epoch)
        self._calls.append(f"checkpoint {step}")

    async def finish(self, reason: EndOfRun) -> None:
        self._connect()
        await self._ledger.finish(RUN, reason, epoch=self._epoch)
        self._calls.append(f"finish {reason}")


class FakeReplicas:
    """Policy servers that record the publications they load. They reject older epochs, like the real ones."""

    def __init__(self, count: int = 2) -> None:
        self.loaded: list[Publication | None] = [None] * count
        self.locations: list[str] = []
        self.pushes: list[int] = []
        """The pushed steps, in order."""
        self.failures = 0
        """The number of attempts that will fail."""
        self.says = SamplerExactness(inexact_because="it has no model")

    async def receive(
        self, publication: Publication, location: str, *, within_s: float | None = None, fence: Fence | None = None
    ) -> None:
        """Like the real client, retry while replicas are unreachable. Each failed attempt counts as one second."""
        while self.failures > 0:
            self.failures -= 1
            if within_s is None or (within_s := within_s - 1) <= 0:
                raise TransientError("replica 0: connection refused")
            await asyncio.sleep(0.001)
        newest = max((held.epoch for held in self.loaded if held is not None), default=0)
        if publication.epoch < newest:
            raise FencedError(f"publication {publication.id} of epoch {publication.epoch}: epoch {newest} is loaded")
        self.loaded = [publication] * len(self.loaded)
        self.locations.append(location)
        self.pushes.append(publication.step)

    async def reported(self) -> Sequence[Publication | None]:
        return list(self.loaded)

    @property
    def exactness(self) -> SamplerExactness | None:
        return self.says if any(self.loaded) else None

    def restart(self, number: int) -> None:
        self.loaded[number] = None


class TinyLoop:
    """The real loop with a tiny model. Events, metrics and spans are written to the same files as in a run."""

    def __init__(
        self,
        source: BatchSource,
        receiver: WeightReceiver,
        directory: Path,
        config: TrainerConfig,
        *,
        max_head_offpolicy_versions: int = 0,
        open_in_child: OpenSource | None = None,
        token_records: TokenRecordWriter | None = None,
        probes: bool = False,
        on_split: Callable[[PassSplit], None] = lambda split: None,
    ) -> None:
        self._spans = SpanRecorder("trainer", directory / "spans.jsonl")
        self._log = EventLog("trainer", directory / "logs" / "trainer.jsonl")
        self._loop = TrainerLoop(
            batches=BatchFeed(
                source=source,
                max_head_offpolicy_versions=max_head_offpolicy_versions,
                open_in_child=open_in_child,
            ),
            targets=WeightTargets(receiver=receiver),
            config=config,
            model_dir=tiny_model_dir(directory / "model"),
            directory=directory,
            reports=LoopReports(
                metrics=MetricRecorder("trainer", TRAINER_METRICS, directory / "metrics.jsonl"),
                spans=self._spans,
                log=self._log,
                token_records=token_records,
                on_split=on_split,
            ),
            probes=probes,
        )

    def stop_after_step(self) -> None:
        self._loop.stop_after_step()

    async def run(self) -> LoopOutcome:
        try:
            return await self._loop.run()
        finally:
            self._spans.close()
            self._log.close()
