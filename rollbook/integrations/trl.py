"""Rollbook's workers, admission gate and ledger behind TRL's `AsyncGRPOTrainer` (trl 1.16).

    with open_run("run.toml", run_dir="runs/trl") as run:
        trainer = AsyncGRPOTrainer(
            model=run.info.model_dir,
            args=AsyncGRPOConfig(max_steps=12, per_device_train_batch_size=run.info.rows_per_step, token_budget=0, …),
            train_dataset=placeholder_dataset,  # required by TRL; tasks come from run.toml
            rollout_worker=RollbookRolloutWorker(run),
            weight_transfer=RollbookWeightTransfer(run),
            callbacks=[RollbookCallback(run)],
        )
        trainer.train(resume_from_checkpoint=run.last_checkpoint(args.output_dir))

TRL owns the model, the optimizer, the loss and the checkpoints. Rollbook plays the episodes in supervised processes, admits them by
staleness and stores them in the ledger. One step of TRL is one batch of the ledger.
"""

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import send_to_device
from torch import Tensor
from transformers import TrainerCallback

from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.errors import RunError
from rollbook.integrations.trl_rows import FILLER, TrlRow, batch_rows
from rollbook.integrations.trl_run import HostInfo, RollbookRun, open_run

__all__ = ["RollbookCallback", "RollbookRolloutWorker", "RollbookRun", "RollbookWeightTransfer", "open_run"]

STOP_S = 10.0


class RollbookRolloutWorker:
    """TRL's `rollout_worker`: puts the rows of one ledger batch per step into TRL's queue."""

    def __init__(self, run: RollbookRun) -> None:
        self.rollout_buffer: queue.Queue[TrlRow] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._run = run
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._feed, name="rollbook.trl.feed", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def update_model_version(self, model_version: int) -> None:
        """Part of TRL's interface. Not needed: the ledger knows which weights sampled each token."""

    def check_health(self, stale_after_s: float) -> None:
        """Called while TRL waits for rows. Waiting is not a failure: the ledger's deadlines detect stalled producers."""
        if self._failure is not None:
            raise self._failure
        self._run.check_host()

    def _feed(self) -> None:
        try:
            step = self._run.step + 1
            while self._feed_step(step):
                step += 1
        except Exception as error:
            self._failure = error

    def _feed_step(self, step: int) -> bool:
        began = time.monotonic()
        batch = self._run.batch(step, self._stopping)
        if batch is None:
            return False
        if isinstance(batch, EndOfRun):
            raise RunError(
                f"there is no batch {step}: the run has ended ({batch}). Set max_steps to {step - 1} at most"
            )
        rows = batch_rows(batch, rows_per_step=self._run.info.rows_per_step, restored_step=self._run.restored_step)
        self.metrics_queue.put(
            {
                "rollbook/batch_wait_s": time.monotonic() - began,
                "rollbook/filler_rows_total": float(sum(FILLER in row.metrics for row in rows)),
            }
        )
        for row in rows:
            self.rollout_buffer.put(row)
        return True


class RollbookWeightTransfer:
    """TRL's `weight_transfer`: acknowledges the step in the ledger and publishes its weights."""

    def __init__(self, run: RollbookRun) -> None:
        self._run = run

    def init_weight_transfer(self) -> None:
        self._run.check_host()

    def pause(self) -> None:
        """Not needed: the policy server applies weights between two forwards, and each token has its version."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self._run.publish({name: tensor.detach().cpu().clone() for name, tensor in iterator})

    def resume(self) -> None:
        """Not needed."""

    def destroy(self) -> None:
        """Not needed: `open_run` closes the run."""


class RollbookCallback(TrainerCallback):
    """Reports the first step, the complete checkpoints and the end of training to the ledger."""

    def __init__(self, run: RollbookRun) -> None:
        self._run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        if args.world_size > 1:
            raise RunError(f"TRL runs {args.world_size} processes; this integration supports one")
        if problems := setting_problems(args, self._run.info):
            raise RunError("these settings do not match the run: " + "; ".join(problems))
        self._run.begin(state.global_step)
        disable_prefetch(context["train_dataloader"], args.device)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        kept = [int(path.name.removeprefix("checkpoint-")) for path in Path(args.output_dir).glob("checkpoint-*")]
        self._run.checkpointed(state.global_step, oldest_kept=min([state.global_step, *kept]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= args.max_steps:
            self._run.finish()


def setting_problems(args: Any, info: HostInfo) -> list[str]:
    """Settings that break the mapping of one step to one batch, or that train on other logprobs than those sampled."""
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    problems = []
    if rows != info.rows_per_step:
        problems.append(
            f"per_device_train_batch_size × gradient_accumulation_steps is {rows}, a batch of the run has "
            f"{info.rows_per_step} rows ({info.groups_per_step} groups of {info.completions_per_prompt}, batch policy "
            f"{info.batch_policy})"
        )
    if args.token_budget is None or args.token_budget > 0:
        problems.append(f"token_budget is {args.token_budget}; 0 makes a step a fixed number of rows")
    if args.weight_sync_steps != 1:
        problems.append(f"weight_sync_steps is {args.weight_sync_steps}; every step is a version, set it to 1")
    if args.temperature != info.temperature:
        problems.append(f"temperature is {args.temperature}, but the run samples at {info.temperature}")
    if args.max_staleness < info.max_head_offpolicy_versions:
        problems.append(
            f"max_staleness is {args.max_staleness}, but the run's max_head_offpolicy_versions is "
            f"{info.max_head_offpolicy_versions}"
        )
    if args.max_steps <= 0:
        problems.append("max_steps is not set")
    if info.max_steps is not None and args.max_steps > info.max_steps:
        problems.append(f"max_steps is {args.max_steps}, but the run ends after trainer.max_steps = {info.max_steps}")
    return problems


def disable_prefetch(loader: Any, device: Any) -> None:
    """Make the loader fetch a batch only when it is requested.

    Prefetching adds a version of lag. After a crash it would also wait for a batch that is formed only after the current one was
    trained.
    """
    kind = type(loader)

    def iterate(self: Any) -> Iterator[Any]:
        self.begin()
        self.set_epoch(self.iteration)
        for batch in self.base_dataloader:
            yield send_to_device(batch, device)
        self.iteration += 1
        self.end()

    # accelerate overrides `__class__` of its loaders; Python looks up `__iter__` on the real class, so that one is replaced.
    vars(object)["__class__"].__set__(loader, type(kind.__name__, (kind,), {"__iter__": iterate}))
