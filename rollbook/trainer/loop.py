"""The training loop: restore, replay the decided batches, publish, then train batch after batch until the run ends.

The ledger is the write-ahead log of the optimizer. After a crash the next trainer restores the last checkpoint and trains the
recorded batches again, so the order is fixed: train s, acknowledge s, publish s, and only then acknowledge s+1.

Batch s+1 is fetched and planned while batch s trains. Step s is settled (digest, acknowledgement, publication) and its checkpoint
written while batch s+1 trains, both from copies of the weights. Settling s begins before the loop waits for batch s+1: with a
staleness bound of 0, no episode of batch s+1 can start without version s.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from torch import Tensor

from rollbook.concurrency.clock import SystemClock
from rollbook.concurrency.tasks import first_error
from rollbook.contracts.batch import EndOfRun, TrainerRole
from rollbook.contracts.errors import FencedError, RunError
from rollbook.contracts.policy import SamplerExactness
from rollbook.contracts.weights import AdapterKind
from rollbook.numerics.machine import machine_of_bits
from rollbook.trainer.checkpoints.checkpoints import Checkpoint, Checkpoints
from rollbook.trainer.checkpoints.settings_history import PassSplits, SettingsHistory, check_and_record
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.planner import BatchRequest, LocalPlanner, Planner, open_planner
from rollbook.trainer.data.planning import PlannedBatch, UnplannableBatchError
from rollbook.trainer.exactness import why_inexact
from rollbook.trainer.files.step_chain import StepChainWriter
from rollbook.trainer.memory_errors import StepMemoryError
from rollbook.trainer.metrics import check_lag
from rollbook.trainer.pipeline import (
    Background,
    BatchFeed,
    LoopReports,
    RankHosts,
    TrainedStep,
    WeightTargets,
    digested,
    report_step,
    train_and_copy,
    unless,
)
from rollbook.trainer.publish import Publisher
from rollbook.trainer.step import LearnerSnapshot
from rollbook.trainer.step_report import StepReport
from rollbook.trainer.team import (
    Learner,
    RemoteRanks,
    StoppedBeforeAssemblyError,
    Team,
    fitting_split,
    restored_learner,
)

LONG_POLL_S = 20.0
"""How long the ledger may hold a request for a batch before it responds that there is none yet."""

REQUEST_POLL_S = 2.0
"""How often the trainer reads whether an operator requested a checkpoint. A step usually takes longer."""


class LoopEnd(StrEnum):
    ENDED = "ended"
    """There are no more batches, and the ledger recorded the end of the run."""
    STOPPED = "stopped"
    """A stop was requested: a checkpoint was written, and the run can be resumed."""
    FENCED = "fenced"
    """A newer trainer took over. This one wrote nothing after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOutcome:
    end: LoopEnd
    step: int
    """Batches trained."""
    digest: str | None
    """Digest of the weights at that step; None when fenced before any were loaded."""
    reason: EndOfRun | None = None


class TrainerLoop:
    """Runs once. Writes below `directory`: `checkpoints/`, `weights/`, `trainer_state.json` and `steps.jsonl`."""

    def __init__(
        self,
        *,
        batches: BatchFeed,
        targets: WeightTargets,
        config: TrainerConfig,
        model_dir: Path,
        directory: Path,
        reports: LoopReports,
        ranks: RankHosts | None = None,
        shared_base: Path | None = None,
        probes: bool = False,
    ) -> None:
        """`shared_base`: the file with which the base of adapters is mapped, see `shared_weights`. `probes`: whether the pass size
        is tried before the first step."""
        self._directory = directory
        self._batches = batches
        self._source = batches.source
        self._ranks = ranks or RankHosts()
        self._reports = reports
        self._doing = reports.doing
        self._metrics, self._spans, self._log = reports.metrics, reports.spans, reports.log
        self._publishes_adapters = targets.adapters_only
        self._adapter_kind: AdapterKind | None = None
        self._config = config
        self._probes = probes
        self._clock = SystemClock()
        self._checkpoints = Checkpoints(
            directory / "checkpoints", model_dir=model_dir, config=config, shared_base=shared_base
        )
        self._history_path = directory / "trainer_state.json"
        self._chain = StepChainWriter(directory)
        self._epoch = 0
        self._publisher = Publisher(
            source=batches.source,
            receiver=targets.receiver,
            directory=directory / "weights",
            config=config,
            clock=self._clock,
            log=reports.log,
            spans=reports.spans,
            stage=targets.stage,
        )
        self._stopping = asyncio.Event()
        self._is_checkpoint_due = asyncio.Event()
        """An operator requested a checkpoint that the ledger does not have yet."""
        self._step = 0
        self._last_trained_at: float | None = None
        self._durable_step = 0
        self._checkpoint_step = 0
        """The last step whose checkpoint was begun by this process."""
        self._saved_step = -1
        """The step of the newest checkpoint; -1: there is none."""
        self._digest: str | None = None
        self._machine: Mapping[str, str] = {}
        self._sampler: SamplerExactness | None = None
        """What the policy servers said of their logprobs, also before a restart."""
        self._inexact_because: str | None = ""
        """Why logprobs are not compared to the bit; None: they are. Empty until the first step."""
        self._learner: Learner | None = None
        self._weights: Mapping[str, Tensor] = {}
        """A copy of the last step's weights: published and saved while the next step trains."""
        self._acknowledged: asyncio.Future[str]
        """The digest of the last trained step, once the ledger has it."""
        self._planner: Planner
        self._splits: PassSplits
        self._fetching: Background
        self._settling: Background
        self._checkpointing: Background

    @property
    def step(self) -> int:
        """Batches trained so far."""
        return self._step

    def stop_after_step(self) -> None:
        """Finish the current step, write a checkpoint and return. Waits for a batch or for replicas are cancelled."""
        self._stopping.set()

    async def run(self) -> LoopOutcome:
        """Train to the end of the run.

        Takes:  batches, from the ledger.
        Gives:  policy versions to the replicas; acknowledgements and checkpoint marks to the ledger.
        Waits:  for the next batch; for replicas to confirm a version; for an unreachable peer, within its retry budget.
        Ends:   at the end of the run, on `stop_after_step`, when a newer trainer took over, or with an error.
        """
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._publisher.run(), name="trainer.watch_replicas")
                requests = group.create_task(self._watch_requests(), name="trainer.watch_requests")
                self._fetching = Background(group, "trainer.fetch_batch")
                self._settling = Background(group, "trainer.settle")
                self._checkpointing = Background(group, "trainer.checkpoint")
                outcome = await self._train_until_end()
                watch.cancel()
                requests.cancel()
        except BaseExceptionGroup as failures:
            first = first_error(failures)
            if isinstance(first, FencedError):
                self._log.info("trainer.fenced", step=self._step, cause=str(first))
                return LoopOutcome(end=LoopEnd.FENCED, step=self._step, digest=self._digest)
            raise first from None
        finally:
            if self._learner is not None:
                self._learner.close()
        self._log.info("trainer.done", end=outcome.end, step=outcome.step, reason=outcome.reason, digest=outcome.digest)
        return outcome

    async def _train_until_end(self) -> LoopOutcome:
        try:
            learner = await self._restore()
        except StoppedBeforeAssemblyError:
            return LoopOutcome(end=LoopEnd.STOPPED, step=self._step, digest=None)
        self._doing("waiting for the ledger")
        role = await self._take_role(learner)
        async with open_planner(
            learner.plan_settings,
            source=self._source,
            role=role,
            num_shown=self._reports.num_shown,
            open_in_child=self._batches.open_in_child,
        ) as self._planner:
            return await self._train_batches(learner, role)

    async def _train_batches(self, learner: Learner, role: TrainerRole) -> LoopOutcome:
        await self._replay(learner, role)
        if self._stopping.is_set():
            return await self._stopped(learner)
        digest = await self._acknowledged
        await self._settling.start(self._publish(learner.step, self._weights, digest))
        if self._probes and learner.step == 0:
            await self._probe(learner)
        await self._fetching.start(self._next_batch(learner))
        while True:
            started = self._clock.now()
            self._doing(f"waiting for batch {learner.step + 1}")
            while not await self._fetching.done_or(self._is_checkpoint_due):
                await self._checkpoint(learner)
            planned = await self._fetched()
            if isinstance(planned, EndOfRun):
                return await self._ended(learner, planned)
            if planned is None:
                return await self._stopped(learner)
            await self._fetching.start(self._next_batch(learner, after=planned.step))
            await self._train(learner, planned, started=started)
            if self._stopping.is_set():
                return await self._stopped(learner)
            if learner.step % self._config.checkpoint_every == 0 or self._is_checkpoint_due.is_set():
                await self._checkpoint(learner)

    async def _watch_requests(self) -> None:
        """Read whether an operator requested a checkpoint.

        Takes:  the status of the ledger.
        Gives:  `_is_checkpoint_due`, to the loop. It writes one between two steps, or at once while it waits for a batch.
        Waits:  `REQUEST_POLL_S`.
        Ends:   on cancellation.
        """
        while True:
            await self._clock.sleep(REQUEST_POLL_S)
            requested = (await self._source.status()).checkpoint_requested
            if requested is not None and requested > self._checkpoint_step and not self._is_checkpoint_due.is_set():
                self._log.info("trainer.checkpoint_requested", step=requested)
                self._is_checkpoint_due.set()

    # Start -------------------------------------------------------------------------------------------------------------------

    async def _restore(self) -> Learner:
        with self._spans.span("trainer.restore") as fields:
            await asyncio.to_thread(self._checkpoints.clean)
            checkpoint = await asyncio.to_thread(self._checkpoints.latest)
            learner = await asyncio.to_thread(self._load_learner, checkpoint)
            if isinstance(learner, Team):
                learner.on_out_of_memory = self._record_failure
            self._learner = learner
            if self._publishes_adapters:
                self._adapter_kind = await asyncio.to_thread(learner.publish_adapters)
            snapshot = await asyncio.to_thread(learner.snapshot)
            self._weights, digest = await asyncio.to_thread(digested, snapshot)
            self._digest = digest
            self._acknowledged = asyncio.get_running_loop().create_future()
            self._acknowledged.set_result(digest)
            fields["step"] = self._step = learner.step
            self._saved_step = -1 if checkpoint is None else checkpoint.step
        self._log.info(
            "trainer.restored",
            step=learner.step,
            checkpoint=None if checkpoint is None else checkpoint.path.name,
            digest=self._digest,
            parameters=learner.num_parameters,
        )
        return learner

    def _load_learner(self, checkpoint: Checkpoint | None) -> Learner:
        remote = None
        if self._ranks.remote > 0:
            remote = RemoteRanks(
                count=self._ranks.remote,
                host=self._ranks.host,
                directory=self._directory,
                is_stopping=self._stopping.is_set,
                doing=self._doing,
            )
        return restored_learner(self._checkpoints, checkpoint, self._config, remote=remote, end=self._ranks.end)

    async def _take_role(self, learner: Learner) -> TrainerRole:
        """Become the trainer. Raises `RunError` when the checkpoint and the ledger contradict each other."""
        restored = learner.step
        role = await self._source.take_role(restored_step=restored)
        self._epoch = role.epoch
        self._log.info(
            "trainer.role_taken",
            epoch=role.epoch,
            restored=restored,
            decided=role.last_decided,
            acknowledged=role.last_acknowledged,
            durable=role.durable_step,
        )
        if learner.vocabulary_size < (role.limits.vocabulary_size or 0):
            raise RunError(
                f"the model has a vocabulary of {learner.vocabulary_size} tokens, but the ledger accepts token ids below"
                f" {role.limits.vocabulary_size}: the run was created for another model. Restore that model or start a new run."
            )
        self._machine = machine_of_bits(self._config.device)
        others = check_and_record(
            self._history_path,
            self._config.numeric_settings(),
            restored_step=restored,
            acknowledged_step=role.last_acknowledged,
            weights_digest=str(self._digest),
            machine=self._machine,
        )
        for difference in others:
            self._log.warning("trainer.other_machine", difference=difference)
        self._sampler = SettingsHistory.read(self._history_path).sampler
        self._splits = PassSplits(self._history_path, learner.plan_settings.split, on_default=self._reports.on_split)
        self._durable_step = role.durable_step
        # The previous trainer may have died after writing the checkpoint and before reporting it.
        await self._mark_durable(restored)
        return role

    async def _replay(self, learner: Learner, role: TrainerRole) -> None:
        """Train the decided batches again. Nothing is published during replay: replicas may be ahead of the restored weights."""
        if learner.step < role.last_decided:
            self._log.info("trainer.replaying", first=learner.step + 1, last=role.last_decided)
            await self._fetching.start(self._next_batch(learner))
        while learner.step < role.last_decided and not self._stopping.is_set():
            started = self._clock.now()
            step = learner.step + 1
            planned = await self._fetched()
            if isinstance(planned, EndOfRun):
                raise RunError(f"batch {step} cannot be replayed: the ledger decided it, but now returns {planned}")
            if planned is None:
                return
            if step < role.last_decided:
                await self._fetching.start(self._next_batch(learner, after=step))
            await self._train(learner, planned, started=started, replays=role)
            if step % self._config.checkpoint_every == 0 and step > role.durable_step:
                await self._checkpoint(learner)

    async def _probe(self, learner: Learner) -> None:
        """Find out before the first step whether the planned passes fit, while the first episodes are played. What fits is recorded
        like a setting: all steps, also those of a resumed run, are split by it."""
        planned = self._splits.of(1)
        self._doing(f"trying {planned}")
        with self._spans.span("trainer.probe") as fields:
            found = await asyncio.to_thread(fitting_split, learner, planned, self._record_failure)
            fields["tokens"] = found.max_tokens
        if found == planned and self._config.max_tokens_per_microbatch is None:
            # Measured when the model was loaded.
            await asyncio.to_thread(self._splits.begin_with, found)
        self._log.info("trainer.probed", planned=str(planned), found=str(found))

    # One step ----------------------------------------------------------------------------------------------------------------

    async def _fetched(self) -> PlannedBatch | EndOfRun | None:
        """The result of `_next_batch`."""
        found: PlannedBatch | EndOfRun | Exception | None = await self._fetching.wait()
        if isinstance(found, Exception):
            raise found
        return found

    async def _next_batch(
        self, learner: Learner, *, after: int | None = None
    ) -> PlannedBatch | EndOfRun | Exception | None:
        """The batch of the step after `after` (default: the learner's), or why there is none; None when a stop was requested during
        the wait.

        A failure of planning is returned: it must not interrupt the step before it.
        """
        step = 1 + (learner.step if after is None else after)
        if self._config.max_steps is not None and step > self._config.max_steps:
            return EndOfRun.MAX_STEPS
        with self._spans.span("trainer.wait_batch", step=step):
            return await unless(self._stopping, self._poll_batch(step))

    async def _poll_batch(self, step: int) -> PlannedBatch | EndOfRun | Exception:
        records = self._reports.token_records
        # Ranks compute only together, so they record no tokens.
        keeps_batch = records is not None and records.is_due(step) and self._config.ranks == 1
        split = self._splits.of(step)
        request = BatchRequest(step=step, wait_s=LONG_POLL_S, keeps_batch=keeps_batch, split=split)
        while True:
            try:
                planned = await self._planner.plan(request)
            except (UnplannableBatchError, ChildProcessError) as error:
                return error
            if planned is not None:
                return planned

    async def _train(
        self, learner: Learner, planned: PlannedBatch, *, started: float, replays: TrainerRole | None = None
    ) -> None:
        """Train, and begin to settle the step. `replays`: the role under which a decided batch is trained again."""
        step, manifest = planned.step, planned.manifest
        await self._expect_bits(learner)
        waited = self._clock.now() - started
        lags = check_lag(manifest, max_head_offpolicy_versions=self._batches.max_head_offpolicy_versions)
        began = self._clock.now()
        self._doing(f"training step {step}")
        with self._spans.span("trainer.train", step=step) as fields:
            fields["groups"] = len(manifest.entries) - len(planned.unusable)
            planned, report, weights = await self._train_fitting(learner, planned)
        trained = self._clock.now() - began
        if replays is None or step > replays.last_acknowledged:
            self._reports.trained()
        began = self._clock.now()
        self._doing("waiting for the policy servers to load the previous weights")
        await self._settling.wait()
        self._metrics.add("perf/publish_wait_time", self._clock.now() - began)
        self._step, self._weights = learner.step, weights
        self._acknowledged = asyncio.get_running_loop().create_future()
        trained_step = TrainedStep(
            planned=planned,
            lags=lags,
            report=report,
            weights=weights,
            wait_s=waited,
            train_s=trained,
            began=self._last_trained_at or started,
            is_published=replays is None,
            is_repeated=replays is not None and step <= replays.last_acknowledged,
            failed=self._splits.failed(step),
        )
        self._last_trained_at = self._clock.now()
        await self._settling.start(self._settle(trained_step, self._acknowledged))

    async def _expect_bits(self, learner: Learner) -> None:
        """Compare logprobs to the bit if sampler and trainer promise equal ones. Otherwise record why not, once."""
        said = self._publisher.exactness or self._sampler
        if said != self._sampler:
            self._sampler = said
            history = await asyncio.to_thread(SettingsHistory.read, self._history_path)
            await asyncio.to_thread(replace(history, sampler=said).write, self._history_path)
        reason = why_inexact(
            learner.inexact_because,
            said,
            self._machine,
            is_merged=self._config.lora is not None and not self._publishes_adapters,
        )
        learner.comparison.is_promised = reason is None
        if reason != self._inexact_because:
            self._inexact_because = reason
            is_expected = self._config.numeric_settings()["exactness"] == "bitwise"
            log = self._log.warning if is_expected and reason is not None else self._log.info
            log("trainer.exactness", is_exact=reason is None, cause=reason)

    async def _train_fitting(
        self, learner: Learner, planned: PlannedBatch
    ) -> tuple[PlannedBatch, StepReport, Mapping[str, Tensor]]:
        """Train the batch, with smaller passes if it does not fit into memory. Returns it as it was split.

        Each failed attempt is recorded before the next one.
        """
        step = planned.step
        last = await asyncio.to_thread(self._splits.take_last_failure, step)
        if last is not None:  # of a rank, which ended the trainer before this one
            raise RunError(last.cause)
        while True:
            split = self._splits.of(step, recorded=planned.recorded_split)
            if planned.split != split:
                planned = await self._planned_again(learner, planned, BatchRequest(step=step, wait_s=0, split=split))
            try:
                # In a thread, so that fetching, settling and checkpointing continue during the step.
                report, weights = await asyncio.to_thread(
                    train_and_copy,
                    learner,
                    planned,
                    self._reports.token_records,
                    self._publisher.versions,
                    on_gpu=self._publisher.takes_gpu_weights,
                    has_mixed=self._sampler is None or not self._sampler.recomputes,
                )
                return planned, report, weights
            except StepMemoryError as error:
                failure = error
            if failure.smaller is None:
                raise failure
            await asyncio.to_thread(self._record_failure, failure)
            self._doing(f"training step {step} again, with {failure.smaller}")
            if not failure.can_retry:
                raise ChildProcessError(f"{failure} The trainer is restarted, and trains it with {failure.smaller}.")

    def _record_failure(self, failure: StepMemoryError) -> None:
        self._splits.add(failure)
        self._log.warning(
            "trainer.out_of_memory",
            step=failure.step,
            failed=str(failure.failed),
            retried=None if failure.smaller is None else str(failure.smaller),
            cause=str(failure),
        )

    async def _planned_again(self, learner: Learner, planned: PlannedBatch, request: BatchRequest) -> PlannedBatch:
        """The batch with another split. Planned in this process: the child may wait for the next batch."""
        again = LocalPlanner(self._source, learner.plan_settings, num_shown=self._reports.num_shown)
        found = await again.plan(replace(request, keeps_batch=planned.batch is not None, ignores_record=True))
        if not isinstance(found, PlannedBatch):
            raise RunError(
                f"batch {request.step} cannot be split again: the ledger decided it, but now returns {found}"
            )
        return found

    async def _settle(self, trained: TrainedStep, acknowledged: asyncio.Future[str]) -> None:
        """Acknowledge a step and publish its weights."""
        began = self._clock.now()
        on_gpu = self._publisher.takes_gpu_weights
        weights, digest = await asyncio.to_thread(digested, trained.weights, on_gpu=on_gpu)
        self._metrics.add("perf/digest_time", self._clock.now() - began)
        self._digest = digest
        planned = trained.planned
        step = planned.step
        began = self._clock.now()
        receipt = await self._source.acknowledge(step, digest, unusable=planned.unusable, split=planned.split)
        self._metrics.add("perf/acknowledge_time", self._clock.now() - began)
        await asyncio.to_thread(
            self._chain.add, planned.manifest, epoch=self._epoch, weights=digest, unusable=planned.unusable
        )
        report_step(trained, receipt, digest, self._reports, self._config)
        self._metrics.add("perf/step_time", self._clock.now() - trained.began)
        unequal = trained.report.unequal
        found = {} if unequal is None else {"unequal": str(unequal)}
        self._metrics.tick(step=step, replay=trained.is_repeated, **found)
        acknowledged.set_result(digest)
        if not trained.is_repeated:
            self._reports.progressed()
        if trained.is_published and not self._stopping.is_set():
            await self._publish(step, weights, digest)
        if self._reports.on_trained is not None:
            await asyncio.to_thread(self._reports.on_trained, step, planned.shown)

    async def _publish(self, step: int, weights: Mapping[str, Tensor], digest: str) -> None:
        """Push the weights to all replicas, unless a stop is requested meanwhile."""
        began = self._clock.now()
        await unless(
            self._stopping, self._publisher.publish(weights, step=step, digest=digest, kind=self._adapter_kind)
        )
        self._metrics.add("perf/weight_sync_time", self._clock.now() - began)
        if not self._stopping.is_set():
            self._reports.progressed()

    async def _checkpoint(self, learner: Learner) -> None:
        """Copy the state now and write it during the next step. One checkpoint is written at a time."""
        self._is_checkpoint_due.clear()
        self._checkpoint_step = learner.step
        began = self._clock.now()
        await self._checkpointing.wait()
        # Ranks wait for each other when they write: none may begin a checkpoint that rank 0 does not write again.
        if learner.step == self._saved_step or 0 < learner.step <= self._durable_step:
            return
        snapshot = await asyncio.to_thread(learner.state_snapshot, self._weights)
        self._metrics.add("perf/checkpoint_wait_time", self._clock.now() - began)
        await self._checkpointing.start(self._write_checkpoint(snapshot, self._acknowledged))

    async def _write_checkpoint(self, snapshot: LearnerSnapshot, acknowledged: asyncio.Future[str]) -> None:
        """The ledger must have acknowledged the step before it learns of its checkpoint."""
        digest = await acknowledged
        began = self._clock.now()
        with self._spans.span("trainer.checkpoint", step=snapshot.step):
            saved = await asyncio.to_thread(self._checkpoints.write, snapshot, weights_digest=digest)
            self._saved_step = saved.step
            await self._mark_durable(saved.step)
        self._metrics.add("perf/checkpoint_time", self._clock.now() - began)
        self._log.info("trainer.checkpointed", step=saved.step, path=saved.path.name, digest=saved.weights_digest)

    async def _mark_durable(self, step: int) -> None:
        """Report the checkpoint to the ledger, once. Older checkpoints are removed before: the ledger may then delete their
        batches."""
        if step <= self._durable_step:
            return
        kept = await asyncio.to_thread(self._checkpoints.steps)
        oldest = min(kept, default=step)
        await self._source.checkpointed(step, oldest_kept=oldest)
        self._durable_step = step

    # End ---------------------------------------------------------------------------------------------------------------------

    async def _ended(self, learner: Learner, reason: EndOfRun) -> LoopOutcome:
        await self._settling.wait()
        await self._last_checkpoint(learner)
        await self._source.finish(reason)
        return LoopOutcome(end=LoopEnd.ENDED, step=learner.step, digest=self._digest, reason=reason)

    async def _stopped(self, learner: Learner) -> LoopOutcome:
        await self._fetching.cancel()
        await self._settling.wait()
        await self._last_checkpoint(learner)
        return LoopOutcome(end=LoopEnd.STOPPED, step=learner.step, digest=self._digest)

    async def _last_checkpoint(self, learner: Learner) -> None:
        await self._checkpoint(learner)
        await self._checkpointing.wait()
