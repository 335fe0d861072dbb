"""The parts of the training loop: what it is connected to, what its stages pass on, and how they run concurrently.

A batch is planned while the one before it trains, and a trained step is settled while the next one trains.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch import Tensor

from rollbook.contracts.batch import AckReceipt, PassSplit
from rollbook.contracts.errors import RunError
from rollbook.contracts.ports import BatchSource, WeightReceiver, WeightStage
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.telemetry.spans import SpanRecorder
from rollbook.telemetry.token_records import TokenRecordWriter
from rollbook.trainer.checkpoints.settings_history import FailedAttempt
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import with_lags
from rollbook.trainer.data.planner import OpenSource
from rollbook.trainer.data.planning import PlannedBatch, ShownSample
from rollbook.trainer.metrics import LagReport, time_metrics
from rollbook.trainer.model.flops import devices_peak_flops, peak_memory_gb
from rollbook.trainer.model.weights import device_digest, digest_of, to_host
from rollbook.trainer.step import TrainStep
from rollbook.trainer.step_report import StepReport
from rollbook.trainer.team import Learner

MASKED_TASKS = 5
"""Tasks in the event about masked tokens: those with the largest masked share."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFeed:
    """Where batches come from."""

    source: BatchSource
    max_head_offpolicy_versions: int
    """The staleness bound of the run. The ledger enforces it, and the loop checks it."""
    open_in_child: OpenSource | None = None
    """Opens the source in a child process that fetches and plans the batches. None: this process does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTargets:
    """Where weights are published."""

    receiver: WeightReceiver
    stage: WeightStage | None = None
    """None: weights are written to files in the run directory."""
    adapters_only: bool = False
    """With LoRA, push the adapters only; the replicas already have the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopReports:
    """What the loop reports, and to whom."""

    metrics: MetricRecorder
    spans: SpanRecorder
    log: EventLog
    doing: Callable[[str], None] = lambda text: None
    """Called with what the loop does or waits for, for the live view."""
    progressed: Callable[[], None] = lambda: None
    """Called after each new step that is acknowledged, and after each publication."""
    trained: Callable[[], None] = lambda: None
    """Called after each new step, before it is acknowledged."""
    on_trained: Callable[[int, Sequence[ShownSample]], None] | None = None
    """Called in a thread with each acknowledged step and `num_shown` of its samples."""
    on_split: Callable[[PassSplit], None] = lambda split: None
    """Called in a thread, before the first step, with a split other than that of the settings. Resumed runs begin with it."""
    num_shown: int = 0
    token_records: TokenRecordWriter | None = None
    """Records single tokens of some steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHosts:
    """`remote` of the trainer's ranks join from other machines, which reach this one at `host`."""

    remote: int = 0
    host: str = "127.0.0.1"
    end: Callable[[RunError], None] | None = None
    """See `Team.assemble`."""


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
    failed: Sequence[FailedAttempt] = ()
    """Attempts of the step that did not fit into memory."""


def train_and_copy(
    learner: Learner,
    planned: PlannedBatch,
    records: TokenRecordWriter | None,
    published: Mapping[int, int],
    *,
    on_gpu: bool,
    has_mixed: bool = True,
) -> tuple[StepReport, Mapping[str, Tensor]]:
    """Train the batch, and copy the weights: one copy per step, used for the digest, the publication and the checkpoint.

    `published`: the versions of this trainer's publications, by id. `on_gpu`: servers read the weights from the GPU. `has_mixed`:
    see `with_lags`.
    """
    if records is not None and planned.batch is not None and isinstance(learner, TrainStep):
        records.write(planned.step, learner.token_values(planned.batch, planned.split))
    minibatches = with_lags(planned.minibatches, published, step=planned.step, has_mixed=has_mixed)
    return learner.train(minibatches, step=planned.step, split=planned.split), learner.snapshot(on_gpu=on_gpu)


def report_step(
    trained: TrainedStep, receipt: AckReceipt, digest: str, reports: LoopReports, config: TrainerConfig
) -> None:
    """Record the metrics of an acknowledged step, and log what is unusual about it."""
    planned, report, masks = trained.planned, trained.report, trained.planned.masks
    measured = {
        **report.metrics,
        **trained.lags.metrics(),
        **planned.metrics,
        **time_metrics(
            wait_s=trained.wait_s,
            train_s=trained.train_s,
            num_tokens=report.num_tokens,
            flops=report.flops,
            peak_flops=devices_peak_flops(config),
        ),
        "perf/memory_gb": peak_memory_gb(config.device),
        "perf/pass_tokens": planned.split.max_tokens,
        "perf/checkpointing": float(planned.split.gradient_checkpointing),
        "perf/out_of_memory": len(trained.failed),
        "perf/failed_pass_tokens": trained.failed[0].failed.max_tokens if trained.failed else None,
        "train/diverged_steps": float(receipt is AckReceipt.DIVERGED),
    }
    for name, value in measured.items():
        reports.metrics.add(name, value)
    if masks.tokens:
        reports.log.info(
            "trainer.tokens_masked",
            step=planned.step,
            cut=planned.manifest.cut,
            tokens=masks.tokens,
            share_by_task=masks.by_task(most=MASKED_TASKS),
        )
    if planned.unusable:
        reports.log.warning("trainer.unusable_groups", step=planned.step, groups=dict(planned.unusable))
    if report.unequal is not None:
        reports.log.warning(
            "trainer.unequal_logprob",
            step=planned.step,
            share=report.metrics["train/inexact_share"],
            **asdict(report.unequal),
        )
    if receipt is AckReceipt.DIVERGED:
        reports.log.warning("trainer.diverged", step=planned.step, digest=digest)
    if report.skipped_steps:
        reports.log.warning(
            "trainer.gradient_not_finite",
            step=planned.step,
            skipped=report.skipped_steps,
            taken=report.optimizer_steps,
        )


def digested(weights: Mapping[str, Tensor], *, on_gpu: bool = False) -> tuple[Mapping[str, Tensor], str]:
    """The weights in main memory, or where they are if `on_gpu`, and their digest."""
    if on_gpu:
        return weights, device_digest(weights)
    copies = to_host(weights)
    return copies, digest_of(copies)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Do `work`, or give it up (None) as soon as `stop` is set. Work that is done by then counts."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work, name="trainer.interruptible")
        stopping = group.create_task(stop.wait(), name="trainer.stop_watch")
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        working.cancel()  # without effect on work that is done
    return None if working.cancelled() else working.result()


class Background:
    """Runs one coroutine at a time in a task group; an error ends the group."""

    def __init__(self, group: asyncio.TaskGroup, name: str) -> None:
        self._group = group
        self._name = name
        self._task: asyncio.Task[Any] | None = None

    async def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Wait for the previous work, then start `work` and return."""
        try:
            await self.wait()
        except BaseException:
            work.close()
            raise
        self._task = self._group.create_task(work, name=self._name)

    async def done_or(self, event: asyncio.Event) -> bool:
        """Wait for the running work or the event. Whether the work is done."""
        if self._task is None:
            return True
        waiting = asyncio.create_task(event.wait(), name=f"{self._name}.or")
        try:
            await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return self._task.done()

    async def wait(self) -> Any:
        """Wait for the running work; its result, or None without running work."""
        if self._task is None:
            return None
        # Shielded: cancelling this wait must not cancel the work.
        result = await asyncio.shield(self._task)
        self._task = None
        return result

    async def cancel(self) -> None:
        """Cancel the running work and wait for its end."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
