"""`AsyncRolloutWorker`: the rollouts of a run in a queue, for someone else's trainer. Its interface is that of TRL's class.

    with open_host("run.toml", run_dir="runs/mine") as run:
        run.begin(0)
        run.publish(weights)                        # the initial weights; episodes start with them
        worker = AsyncRolloutWorker(run)
        worker.start()
        for step in range(steps):
            rows = [worker.rollout_buffer.get() for _ in range(run.info.rows_per_step)]
            ...                                     # the trainer's own step
            run.publish(weights)                    # acknowledges the step in the ledger and publishes its weights
        worker.stop()

The queue holds the rows of one batch: the next batch is requested when the weights of this one are published.
"""

import queue
import threading
import time

from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.errors import RunError
from rollbook.integrations.trl_rows import FILLER, TrlRow, batch_rows
from rollbook.integrations.trl_run import RollbookRun

STOP_S = 10.0


class AsyncRolloutWorker:
    """Puts the rows of one batch of the ledger per step into `rollout_buffer`, from a thread. Episodes run in other processes."""

    def __init__(self, run: RollbookRun) -> None:
        self.rollout_buffer: queue.Queue[TrlRow] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._run = run
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self) -> None:
        """Call it after the initial weights were published. A second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._feed, name="rollbook.rollout_worker", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Request no further batch. Rows in the queue stay there; the ledger delivers their batch again to the next trainer."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def update_model_version(self, model_version: int) -> None:
        """Part of TRL's interface. Not needed: the ledger knows which weights sampled each token."""

    def check_health(self, stale_after_s: float = 0.0) -> None:
        """Raise what ended the worker. Waiting is not a failure: the ledger's deadlines detect stalled producers."""
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
