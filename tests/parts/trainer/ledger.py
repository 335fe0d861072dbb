"""An in-memory ledger and replicas that keep the promises of their ports, as far as the trainer can tell."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from rollbook.contracts.batch import AckReceipt, EndOfRun, TrainerRole, TrainingBatch
from rollbook.contracts.errors import FencedError, RunError, TransientError
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.contracts.ports import BatchSource, Fence, WeightReceiver
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.telemetry.spans import SpanRecorder
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.loop import LoopOutcome, TrainerLoop
from rollbook.trainer.metrics import TRAINER_METRICS
from tests.parts.trainer.batches import tiny_model_dir


class MemoryLedger:
    """The truth that outlives trainers. Batches come from `record`, which gives the same batch for a step every time."""

    def __init__(self, record: Callable[[int], TrainingBatch], *, num_steps: int, end: EndOfRun = EndOfRun.MAX_STEPS):
        self._record = record
        self.num_steps = num_steps
        self.end = end
        self.epoch = 0
        self.decided = 0
        self.acknowledged: dict[int, str] = {}
        self.durable_step = 0
        self.oldest_kept: int | None = None
        self.registered: list[Publication] = []
        self.confirmed: list[Publication] = []
        self.finished: EndOfRun | None = None
        self.told: list[str] = []
        """Every call that changes something, in order."""
        self.held_steps: set[int] = set()
        """Steps for which there are not enough groups yet."""

    @property
    def last_acknowledged(self) -> int:
        return max(self.acknowledged, default=0)

    def source(self) -> "MemoryBatchSource":
        return MemoryBatchSource(self)

    def record_of(self, step: int) -> TrainingBatch:
        return self._record(step)


class MemoryBatchSource:
    """One trainer's connection. `failures` makes the next calls fail as if the service were away."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._epoch = 0
        self.failures = 0

    def _enter(self, what: str) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise TransientError(f"{what}: connection refused")
        if self._epoch < self._ledger.epoch:
            raise FencedError(f"{what}: epoch {self._epoch} was replaced by {self._ledger.epoch}")

    async def take_role(self, *, restored_step: int) -> TrainerRole:
        self._epoch = self._ledger.epoch + 1
        self._enter("take_role")
        ledger = self._ledger
        ledger.epoch = self._epoch
        ledger.told.append(f"role {restored_step}")
        return TrainerRole(
            epoch=self._epoch,
            restored_step=restored_step,
            last_decided=ledger.decided,
            last_acknowledged=ledger.last_acknowledged,
            durable_step=ledger.durable_step,
            last_confirmed=ledger.confirmed[-1] if ledger.confirmed else None,
        )

    async def batch(self, step: int, *, wait_s: float) -> TrainingBatch | EndOfRun | None:
        self._enter(f"batch {step}")
        if step > self._ledger.num_steps:
            return self._ledger.end
        if step > self._ledger.decided + 1:
            raise RunError(f"batch {step} asked for before batch {self._ledger.decided + 1}")
        if step in self._ledger.held_steps:
            await asyncio.sleep(0.01)
            return None
        self._ledger.decided = max(self._ledger.decided, step)
        return self._ledger.record_of(step)

    async def acknowledge(self, step: int, weights_digest: str) -> AckReceipt:
        self._enter(f"acknowledge {step}")
        known = self._ledger.acknowledged.get(step)
        if known is None:
            assert step == self._ledger.last_acknowledged + 1, "acknowledgements come in order"
            self._ledger.acknowledged[step] = weights_digest
            self._ledger.told.append(f"acknowledge {step}")
            return AckReceipt.ACKNOWLEDGED
        self._ledger.told.append(f"acknowledge {step} again")
        return AckReceipt.REPEATED if known == weights_digest else AckReceipt.DIVERGED

    async def register(self, step: int, weights_digest: str) -> Publication:
        self._enter(f"register {step}")
        publication = Publication(
            id=PublicationId(len(self._ledger.registered) + 1), epoch=self._epoch, step=step, digest=weights_digest
        )
        self._ledger.registered.append(publication)
        return publication

    async def confirm(self, publication: Publication) -> None:
        self._enter(f"confirm {publication.id}")
        self._ledger.confirmed.append(publication)
        self._ledger.told.append(f"publish {publication.step}")

    async def checkpointed(self, step: int, *, oldest_kept: int) -> None:
        self._enter(f"checkpointed {step}")
        assert self._ledger.durable_step <= step <= self._ledger.last_acknowledged
        assert oldest_kept <= step
        self._ledger.durable_step = step
        self._ledger.oldest_kept = oldest_kept
        self._ledger.told.append(f"checkpoint {step}")

    async def finish(self, reason: EndOfRun) -> None:
        self._enter("finish")
        self._ledger.finished = reason
        self._ledger.told.append(f"finish {reason}")


class MemoryReplicas:
    """Policy servers that note what they were given. Fenced by epoch, as the real ones are."""

    def __init__(self, count: int = 2) -> None:
        self.has: list[Publication | None] = [None] * count
        self.locations: list[str] = []
        self.pushes: list[int] = []
        """Steps that were pushed, in order."""
        self.failures = 0

    async def receive(
        self, publication: Publication, location: str, *, within_s: float | None = None, fence: Fence | None = None
    ) -> None:
        """As the real client does, it tries again while replicas are away, a moment apart, for as long as it was told."""
        while self.failures > 0:
            self.failures -= 1
            if within_s is None or (within_s := within_s - 1) <= 0:
                raise TransientError("replica 0: connection refused")
            await asyncio.sleep(0.001)
        newest = max((held.epoch for held in self.has if held is not None), default=0)
        if publication.epoch < newest:
            raise FencedError(
                f"publication {publication.id} of epoch {publication.epoch}: epoch {newest} is in service"
            )
        self.has = [publication] * len(self.has)
        self.locations.append(location)
        self.pushes.append(publication.step)

    async def reported(self) -> Sequence[Publication | None]:
        return list(self.has)

    def restart(self, number: int) -> None:
        self.has[number] = None


class LoopInDirectory:
    """The real loop in a run directory with a tiny model; events, metrics and spans lie where a run has them."""

    def __init__(
        self,
        source: BatchSource,
        receiver: WeightReceiver,
        directory: Path,
        config: TrainerConfig,
        *,
        max_head_offpolicy_versions: int,
    ) -> None:
        self._spans = SpanRecorder("trainer", directory / "spans.jsonl")
        self._log = EventLog("trainer", directory / "logs" / "trainer.jsonl")
        self._loop = TrainerLoop(
            source=source,
            receiver=receiver,
            config=config,
            model_dir=tiny_model_dir(directory / "model"),
            directory=directory,
            max_head_offpolicy_versions=max_head_offpolicy_versions,
            metrics=MetricRecorder("trainer", TRAINER_METRICS, directory / "metrics.jsonl"),
            spans=self._spans,
            log=self._log,
        )

    def stop_after_step(self) -> None:
        self._loop.stop_after_step()

    async def run(self) -> LoopOutcome:
        try:
            return await self._loop.run()
        finally:
            self._spans.close()
            self._log.close()


def trainer_loop(
    source: BatchSource,
    receiver: WeightReceiver,
    directory: Path,
    config: TrainerConfig,
    *,
    max_head_offpolicy_versions: int = 0,
) -> LoopInDirectory:
    return LoopInDirectory(source, receiver, directory, config, max_head_offpolicy_versions=max_head_offpolicy_versions)
