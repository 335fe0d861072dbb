"""Supervised fine-tuning on demonstrations, with the same training step and checkpoints as reinforcement learning.

A demonstration is a row whose assistant tokens are trained with advantage 1, so the loss is their mean negative log-probability.
The rows of step s depend on (seed, s) only, so a killed and restarted run trains the same rows.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.contracts.batch import PassSplit
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.trajectory import TokenRow
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import Metric, MetricRecorder, Reduction
from rollbook.trainer.checkpoints.checkpoints import Checkpoint, Checkpoints
from rollbook.trainer.checkpoints.settings_history import PassSplits
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.rows import TrainRow
from rollbook.trainer.memory_errors import StepMemoryError
from rollbook.trainer.model.weights import digest_of
from rollbook.trainer.sft_config import SftConfig, sft_trainer
from rollbook.trainer.step_report import StepReport
from rollbook.trainer.team import Learner, Team, fitting_split, restored_learner

SFT_METRICS = (
    Metric("train/loss", "nats", "mean negative log-probability of the assistant's tokens in the step"),
    Metric("train/grad_norm", "", "norm of the gradient before it is scaled down"),
    Metric("train/lr", "", "learning rate"),
    Metric("train/entropy", "nats", "entropy of the model at trained tokens"),
    Metric("train/tokens", "tokens", "trained tokens", Reduction.SUM),
    Metric("train/epoch", "", "passes over the demonstrations, up to this step"),
    Metric("eval/loss", "nats", "mean negative log-probability of the assistant's tokens of the validation set"),
    Metric("perf/train_time", "s", "trained on the step", Reduction.SUM),
    Metric("perf/tokens_per_s", "tokens/s", "trained tokens per second of training"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOutcome:
    steps: int
    is_finished: bool
    """False: stopped on request. A checkpoint was written, and the same command resumes."""
    checkpoint: Checkpoint
    first_loss: float | None
    """Mean over the first tenth of the steps trained by this process; None when it had none to train."""
    last_loss: float | None
    eval_loss_before: float | None
    eval_loss: float | None


def demonstration_row(row: TokenRow, number: int) -> TrainRow:
    """A chat as a training row. The tokens were not sampled by a policy, so they have no sampling log-probability."""
    trained = np.flatnonzero(row.loss_mask)
    return TrainRow(
        group_id=GroupId(f"demonstration-{number}"),
        sample=number,
        inputs=row.token_ids[: trained[-1]],
        predicted_at=trained - 1,
        targets=row.token_ids[trained],
        sampled_logprobs=np.full(len(trained), np.nan, dtype=np.float32),
        advantage=1.0,
        temperature=1.0,
    )


def steps_of(num_demonstrations: int, config: SftConfig, *, max_steps: int | None) -> int:
    """Optimizer steps of the whole run."""
    by_epochs = config.epochs * math.ceil(num_demonstrations / config.examples_per_step)
    return by_epochs if max_steps is None else min(by_epochs, max_steps)


def numbers_of_step(step: int, num_demonstrations: int, config: SftConfig, *, seed: int) -> list[int]:
    """The demonstrations of step `step` (1, 2, …). Each epoch is shuffled separately, and its last step may be short."""
    steps_per_epoch = math.ceil(num_demonstrations / config.examples_per_step)
    epoch, at = divmod(step - 1, steps_per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(num_demonstrations)
    return [int(n) for n in order[at * config.examples_per_step : (at + 1) * config.examples_per_step]]


class SftLoop:
    """Runs once. Writes checkpoints below `directory`."""

    def __init__(
        self,
        *,
        config: SftConfig,
        trainer: TrainerConfig,
        model_dir: Path,
        directory: Path,
        demonstrations: Sequence[TokenRow],
        validation: Sequence[TokenRow],
        metrics: MetricRecorder,
        log: EventLog,
        on_metrics: Callable[[dict[str, Any]], None] = lambda row: None,
        on_split: Callable[[PassSplit], None] = lambda split: None,
        probes: bool = False,
        end: Callable[[RunError], None] | None = None,
    ) -> None:
        """`probes`: whether the pass size is tried before the first step. `on_split` is called with one that differs from that of
        the settings: a resumed training begins with it. `end`: see `Team.assemble`."""
        self._config = config
        self._directory = directory
        self._total = steps_of(len(demonstrations), config, max_steps=trainer.max_steps)
        # Schedules that decay to 0 need the last step, even if it follows from the epochs.
        self._trainer = sft_trainer(trainer.model_copy(update={"max_steps": self._total}))
        self._checkpoints = Checkpoints(directory / "checkpoints", model_dir=model_dir, config=self._trainer)
        self._rows = [demonstration_row(row, number) for number, row in enumerate(demonstrations)]
        self._validation = [demonstration_row(row, number) for number, row in enumerate(validation)]
        self._metrics = metrics
        self._log = log
        self._on_metrics = on_metrics
        self._on_split = on_split
        self._probes = probes
        self._end = end
        self._is_stopping = False
        self._saved: Checkpoint | None = None
        self.doing = ""
        """What the loop does, for the report of an error."""
        self._splits: PassSplits

    def stop_after_step(self) -> None:
        """Finish the current step, write a checkpoint and return. May be called from a signal handler."""
        self._is_stopping = True

    def run(self) -> SftOutcome:
        self.doing = "loading the model"
        self._checkpoints.clean()
        self._saved = self._checkpoints.latest()
        learner = restored_learner(self._checkpoints, self._saved, self._trainer, end=self._end)
        if isinstance(learner, Team):
            learner.on_out_of_memory = self._record_failure
        self._splits = PassSplits(
            self._directory / "trainer_state.json", learner.plan_settings.split, on_default=self._on_split
        )
        try:
            return self._train(learner)
        finally:
            learner.close()

    def _train(self, learner: Learner) -> SftOutcome:
        self._log.info("sft.started", step=learner.step, of=self._total, demonstrations=len(self._rows))
        if self._probes and learner.step == 0:
            self._probe(learner)
        before = measured = self._measure(learner)
        losses: list[float] = []
        while not self._is_finished(learner.step, measured) and not self._is_stopping:
            losses.append(self._step(learner))
            if learner.step % self._config.evaluate_every == 0 and learner.step < self._total:
                measured = self._measure(learner)
            if learner.step % self._trainer.checkpoint_every == 0:
                self._save(learner)
            self._tick(learner.step)
        is_finished = self._is_finished(learner.step, measured)
        if losses and learner.step >= self._total:
            measured = self._measure(learner)
            self._tick(learner.step)
        saved = self._save(learner)
        tenth = max(1, len(losses) // 10)
        return SftOutcome(
            steps=learner.step,
            is_finished=is_finished,
            checkpoint=saved,
            first_loss=float(np.mean(losses[:tenth])) if losses else None,
            last_loss=float(np.mean(losses[-tenth:])) if losses else None,
            eval_loss_before=before,
            eval_loss=measured,
        )

    def _probe(self, learner: Learner) -> None:
        """Find out whether the passes fit, and record the size that does."""
        planned = self._splits.of(1)
        self.doing = f"trying {planned}"
        found = fitting_split(learner, planned, self._record_failure)
        if found == planned and self._trainer.max_tokens_per_microbatch is None:
            # Measured when the model was loaded.
            self._splits.begin_with(found)
        self._log.info("sft.probed", planned=str(planned), found=str(found))

    def _record_failure(self, failure: StepMemoryError) -> None:
        """Before the next attempt."""
        self._splits.add(failure)
        self._log.warning("sft.out_of_memory", step=failure.step, retried=str(failure.smaller), cause=str(failure))

    def _is_finished(self, step: int, measured: float | None) -> bool:
        """Checked only at evaluation steps, so that a killed and resumed run ends at the same step as an uninterrupted one."""
        if step >= self._total:
            return True
        enough, is_judged = self._config.enough_loss, step % self._config.evaluate_every == 0
        return is_judged and enough is not None and measured is not None and measured <= enough

    def _step(self, learner: Learner) -> float:
        step = learner.step + 1
        self.doing = f"training step {step}"
        began = time.perf_counter()
        numbers = numbers_of_step(step, len(self._rows), self._config, seed=self._trainer.seed)
        report = self._train_fitting(learner, [self._rows[number] for number in numbers], step=step)
        seconds = time.perf_counter() - began
        loss = report.metrics["train/loss"]
        for name in ("train/loss", "train/grad_norm", "train/lr", "train/entropy", "train/tokens"):
            self._metrics.add(name, report.metrics[name])
        self._metrics.add("train/epoch", step * self._config.examples_per_step / len(self._rows))
        self._metrics.add("perf/train_time", seconds)
        self._metrics.add("perf/tokens_per_s", report.num_tokens / seconds)
        return float("nan") if loss is None else loss

    def _train_fitting(self, learner: Learner, rows: Sequence[TrainRow], *, step: int) -> StepReport:
        """Train the rows, with smaller passes if they do not fit into memory. Each failed attempt is recorded before the next."""
        while True:
            try:
                return learner.train_rows(rows, step=step, split=self._splits.of(step))
            except StepMemoryError as error:
                failure = error
            if failure.smaller is None or not failure.can_retry:
                raise failure
            self._record_failure(failure)

    def _measure(self, learner: Learner) -> float | None:
        """The validation loss."""
        if not self._validation:
            return None
        self.doing = "measuring the validation loss"
        loss = -learner.mean_logprob(self._validation)
        self._metrics.add("eval/loss", loss)
        self._log.info("sft.evaluated", step=learner.step, loss=loss)
        return loss

    def _save(self, learner: Learner) -> Checkpoint:
        if self._saved is not None and self._saved.step == learner.step:
            return self._saved
        self.doing = "writing a checkpoint"
        weights = learner.snapshot()
        self._saved = saved = self._checkpoints.write(
            learner.state_snapshot(weights), weights_digest=digest_of(weights)
        )
        self._log.info("sft.checkpointed", step=saved.step, digest=saved.weights_digest)
        return saved

    def _tick(self, step: int) -> None:
        self._on_metrics(self._metrics.tick(step=step))
