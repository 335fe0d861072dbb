"""Our worker, gate and ledger behind TRL's `AsyncGRPOTrainer` (trl 1.16).

    with open_run("run.toml", run_dir="runs/trl") as run:
        trainer = AsyncGRPOTrainer(
            model=run.facts.model_dir,
            args=AsyncGRPOConfig(max_steps=12, per_device_train_batch_size=run.facts.rows_per_step, token_budget=0, …),
            train_dataset=placeholder_dataset,  # TRL asks for one; tasks come from run.toml
            rollout_worker=RollbookRolloutWorker(run),
            weight_transfer=RollbookWeightTransfer(run),
            callbacks=[RollbookCallback(run)],
        )
        trainer.train(resume_from_checkpoint=run.last_checkpoint(args.output_dir))

TRL stays the trainer: model, optimizer, loss, checkpoints. Episodes are played in watched processes, admitted by the gate and kept
in the ledger; a step of TRL is a batch of the ledger.
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
from rollbook.integrations.trl_rows import FILLER, TrlRow, rows_of
from rollbook.integrations.trl_run import HostFacts, RollbookRun, open_run

__all__ = ["RollbookCallback", "RollbookRolloutWorker", "RollbookRun", "RollbookWeightTransfer", "open_run"]

STOP_S = 10.0


class RollbookRolloutWorker:
    """TRL's `rollout_worker`: hands it the rows of the ledger's batches, one batch for each of its steps."""

    def __init__(self, run: RollbookRun) -> None:
        self.rollout_buffer: queue.Queue[TrlRow] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._run = run
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.version = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._feed, name="rollbook.trl.feed", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def update_model_version(self, model_version: int) -> None:
        """TRL's count of its own; the ledger knows which weights sampled each token."""
        self.version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Called while TRL waits for rows. Waiting is no failure: who is late is named by the ledger's own deadlines."""
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
            raise RunError(f"there is no batch {step}: the run is over ({batch}). Set max_steps to {step - 1} at most")
        rows = rows_of(batch, rows_per_step=self._run.facts.rows_per_step, restored_step=self._run.restored_step)
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
    """TRL's `weight_transfer`: acknowledges the step in the ledger and publishes its weights. Engines need no pause for it."""

    def __init__(self, run: RollbookRun) -> None:
        self._run = run

    def init_weight_transfer(self) -> None:
        self._run.check_host()

    def pause(self) -> None:
        """Nothing: the policy server takes weights between two forwards, and each token tells which ones sampled it."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self._run.publish({name: tensor.detach().cpu().clone() for name, tensor in iterator})

    def resume(self) -> None:
        """Nothing was paused."""

    def destroy(self) -> None:
        """The run is closed by `open_run`."""


class RollbookCallback(TrainerCallback):
    """Tells the ledger where TRL starts from, which checkpoints are whole, and when it is done."""

    def __init__(self, run: RollbookRun) -> None:
        self._run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if args.world_size > 1:
            raise RunError(f"TRL runs {args.world_size} processes; this integration feeds one")
        faults = faults_of(args, self._run.facts)
        if faults:
            raise RunError("these settings do not fit the run: " + "; ".join(faults))
        self._run.begin(state.global_step)
        one_batch_at_a_time(more["train_dataloader"], args.device)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        kept = [int(path.name.removeprefix("checkpoint-")) for path in Path(args.output_dir).glob("checkpoint-*")]
        self._run.checkpointed(state.global_step, oldest_kept=min([state.global_step, *kept]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= args.max_steps:
            self._run.finish()


def faults_of(args: Any, facts: HostFacts) -> list[str]:
    """What would break the mapping of one step to one batch, or train on other logprobs than were sampled."""
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    faults = []
    if rows != facts.rows_per_step:
        faults.append(
            f"per_device_train_batch_size × gradient_accumulation_steps is {rows}, a batch of the run has "
            f"{facts.groups_per_step} × {facts.completions_per_prompt} = {facts.rows_per_step} rows"
        )
    if args.token_budget is None or args.token_budget > 0:
        faults.append(f"token_budget is {args.token_budget}; 0 makes a step a fixed number of rows")
    if args.weight_sync_steps != 1:
        faults.append(f"weight_sync_steps is {args.weight_sync_steps}; every step is a version here, set it to 1")
    if args.temperature != facts.temperature:
        faults.append(f"temperature is {args.temperature}, but the run samples at {facts.temperature}")
    if args.max_staleness < facts.max_head_offpolicy_versions:
        faults.append(
            f"max_staleness is {args.max_staleness}, the run's lag budget {facts.max_head_offpolicy_versions}"
        )
    if args.max_steps <= 0:
        faults.append("max_steps is not set")
    if facts.max_steps is not None and args.max_steps > facts.max_steps:
        faults.append(f"max_steps is {args.max_steps}, but the run ends after trainer.max_steps = {facts.max_steps}")
    return faults


def one_batch_at_a_time(loader: Any, device: Any) -> None:
    """Let the loader fetch a batch when it is asked for, not one ahead.

    One ahead costs a version of lag; and after a crash it waits for a batch that is decided only when the one in hand was trained.
    """
    kind = type(loader)

    def iterate(self: Any) -> Iterator[Any]:
        self.begin()
        self.set_epoch(self.iteration)
        for batch in self.base_dataloader:
            yield send_to_device(batch, device)
        self.iteration += 1
        self.end()

    # accelerate hides the class of its loaders behind a property; Python looks for __iter__ on the true one.
    vars(object)["__class__"].__set__(loader, type(kind.__name__, (kind,), {"__iter__": iterate}))
