"""A Rollbook run behind someone else's trainer, such as TRL's. Its rollouts arrive in a queue with the interface of TRL's worker.

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

The ledger is the write-ahead log of the trainer's optimizer, as it is for Rollbook's own: a step is acknowledged with the digest of
its weights before they are published, batches that were formed before a crash are trained again, and older weights are never
published after newer ones.
"""

import asyncio
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rollbook.access.tokens import read_token
from rollbook.concurrency.blocking import LoopStoppedError, LoopThread
from rollbook.concurrency.child_process.process import end_process_blocking, python_environment
from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.admission import LedgerStatus, RunId
from rollbook.contracts.batch import AckReceipt, EndOfRun, TrainerRole, TrainingBatch
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import GroupId
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.integrations.trl_rows import FILLER, TrlRow, batch_rows
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.spans import SpanRecorder
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.model.weights import digest_of
from rollbook.trainer.publish import Publisher

READY_S = 300.0
LONG_POLL_S = 5.0
STOP_S = 20.0
STOP_WORKER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """The contents of `host.json`, written by `rollbook host`."""

    pid: int
    ledger_url: str
    policy_urls: list[str]
    token_file: str
    ledger_token_file: str | None
    run: str
    model_dir: str
    groups_per_step: int
    completions_per_prompt: int
    batch_policy: BatchPolicy
    max_head_offpolicy_versions: int
    max_steps: int | None
    temperature: float
    request_s: float

    @property
    def rows_per_step(self) -> int:
        """Rows of the largest batch. With policy `parts`, which never splits a part, it has up to n - 1 rows more."""
        surplus = self.completions_per_prompt - 1 if self.batch_policy is BatchPolicy.PARTS else 0
        return self.groups_per_step * self.completions_per_prompt + surplus


class RollbookRun:
    """Made by `open_host`. Methods may be called from any thread.

    With several training processes, that of rank 0 is the leader: it takes the trainer role, gets the rows and publishes. The
    others only read; `begin`, `checkpointed` and `finish` do nothing there.
    """

    def __init__(
        self, info: HostInfo, directory: Path, process: subprocess.Popen[bytes] | None, *, is_leader: bool = True
    ) -> None:
        self.info = info
        self.directory = directory
        self.is_leader = is_leader
        self._process = process
        name = "trl" if is_leader else f"trl-{os.environ['RANK']}"
        self._log = EventLog(name, directory / "logs" / f"{name}.jsonl")
        self._spans = SpanRecorder(name, directory / "spans" / f"{name}.jsonl")
        self._loop = LoopThread("rollbook.trl")
        self._ledger: LedgerClient
        self._publisher: Publisher
        self._receiver: WeightTransferClient
        self._watch: asyncio.Task[None] | None = None
        self._role: TrainerRole | None = None
        self._trained = threading.Condition()
        self._step = 0
        self._unusable: dict[int, Mapping[GroupId, str]] = {}
        """Groups of batches that are not acknowledged yet, by step."""
        self._has_initial_weights = False
        """Whether the initial weights were published. They belong to no step."""
        self.divergences = 0
        """Steps whose weights differed when they were trained again after a crash."""

    @property
    def step(self) -> int:
        """The number of trained batches."""
        return self._step

    @property
    def restored_step(self) -> int:
        return self.role.restored_step

    @property
    def role(self) -> TrainerRole:
        if self._role is None:
            raise RunError("this trainer has no role yet: pass `RollbookCallback(run)` to AsyncGRPOTrainer's callbacks")
        return self._role

    def status(self) -> LedgerStatus:
        return self._loop.run(self._ledger.status())

    def begin(self, restored_step: int) -> None:
        """Take the trainer role with the weights of `restored_step`."""
        if not self.is_leader:
            return
        self._role = self._loop.run(self._ledger.take_role(restored_step=restored_step))
        self._step = restored_step
        self._log.info(
            "trl.role_taken", epoch=self._role.epoch, restored=restored_step, decided=self._role.last_decided
        )

    def batch(self, step: int, stopping: threading.Event) -> TrainingBatch | EndOfRun | None:
        """Wait until the previous batch was trained, then for the batch of `step`. None: `stopping` was set."""
        with self._trained:
            while self._step < step - 1:
                if stopping.is_set():
                    return None
                self._trained.wait(0.2)
        while not stopping.is_set():
            try:
                found = self._loop.run(self._ledger.batch(step, wait_s=LONG_POLL_S))
            except LoopStoppedError:
                return None
            if isinstance(found, TrainingBatch) and found.unusable:
                self._unusable[step] = found.unusable
                self._log.warning("trl.unusable_groups", step=step, groups=dict(found.unusable))
            if found is not None:
                return found
        return None

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Publish the weights after a step, or the initial ones."""
        digest = digest_of(weights)
        if self._has_initial_weights:
            self._acknowledge(self._step + 1, digest)
        self._has_initial_weights = True
        confirmed = self.role.last_confirmed
        # While old batches are trained again, rollouts keep using the newer weights.
        if confirmed is None or self._step >= confirmed.step:
            self._loop.run(self._publisher.publish(weights, step=self._step, digest=digest))
        with self._trained:
            self._trained.notify_all()

    def pause(self) -> None:
        """Suspend generation at all policy servers, until `resume`."""
        self._loop.run(self._receiver.pause())

    def resume(self) -> None:
        self._loop.run(self._receiver.resume())

    def disconnect(self) -> None:
        """Resume the policy servers and close the connections to them: nothing can be published any more."""
        self._loop.run(self._disconnect())

    async def _disconnect(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self._receiver.destroy()

    def _acknowledge(self, step: int, digest: str) -> None:
        receipt = self._loop.run(self._ledger.acknowledge(step, digest, unusable=self._unusable.pop(step, None)))
        if receipt is AckReceipt.DIVERGED:
            self.divergences += 1
            self._log.warning("trl.diverged", step=step, digest=digest)
        with self._trained:
            self._step = step

    def checkpointed(self, step: int, *, oldest_kept: int) -> None:
        if not self.is_leader:
            return
        self._loop.run(self._ledger.checkpointed(step, oldest_kept=oldest_kept))

    def finish(self) -> None:
        """End the run: open groups are dropped and the rollout processes stop."""
        if not self.is_leader:
            return
        self._loop.run(self._ledger.finish(EndOfRun.MAX_STEPS))

    def last_checkpoint(self, output_dir: str | Path) -> str | None:
        """The newest checkpoint that the ledger knows to be complete, for `train(resume_from_checkpoint=…)`."""
        durable = self.status().durable_step
        found = Path(output_dir) / f"checkpoint-{durable}"
        if durable and not found.is_dir():
            raise RunError(f"the ledger reports checkpoint {durable} as durable, but {found} does not exist")
        return str(found) if durable else None

    def check_host(self) -> None:
        """Raise if `rollbook host` has ended or another trainer has taken the role."""
        if self._watch is not None and self._watch.done() and not self._watch.cancelled():
            failure = self._watch.exception()
            if failure is not None:
                raise failure
        if self._process is not None and (code := self._process.poll()) is not None:
            raise RunError(f"`rollbook host` ended with code {code}; see {self.directory / 'logs'}")

    def open(self) -> None:
        self._loop.enter(self._connection())

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[None]:
        info, token = self.info, read_token(Path(self.info.token_file))
        ledger_token = None if info.ledger_token_file is None else read_token(Path(info.ledger_token_file))
        async with (
            open_ledger_client(
                info.ledger_url, RunId(info.run), request_s=info.request_s, log=self._log, token=ledger_token
            ) as self._ledger,
            WeightTransferClient(info.policy_urls, request_s=info.request_s, api_key=token, log=self._log) as receiver,
        ):
            self._receiver = receiver
            self._publisher = Publisher(
                source=self._ledger,
                receiver=receiver,
                directory=self.directory / "weights",
                config=TrainerConfig(),
                clock=SystemClock(),
                log=self._log,
                spans=self._spans,
            )
            if not self.is_leader:
                yield
                return
            self._watch = asyncio.create_task(self._publisher.run(), name="trl.watch_replicas")
            try:
                yield
            finally:
                self._watch.cancel()
                await asyncio.gather(self._watch, return_exceptions=True)

    def close(self) -> None:
        with suppress(TransientError):
            self._loop.stop(within_s=STOP_S)
        self._spans.close()
        self._log.close()
        if self._process is not None:
            end_process_blocking(self._process, grace_s=STOP_S)


@contextmanager
def open_host(
    config: str | Path, *, run_dir: str | Path, overrides: Sequence[str] = (), python: str | None = None
) -> Iterator[RollbookRun]:
    """Start `rollbook host` and connect to it. Call it again to resume. The host ends with this process, even when it is killed.

    With several training processes on one machine (`accelerate launch`, `torchrun`) every process calls it: rank 0 starts the host,
    and the others get a run that only reads. `python` runs the host; None: the interpreter of this process.
    """
    directory = Path(run_dir).resolve()
    if int(os.environ.get("RANK", "0")) > 0:
        with _open_follower(directory) as follower:
            yield follower
        return
    parent_read, parent_write = os.pipe()
    command = [python or sys.executable, "-P", "-m", "rollbook", "host", str(config), "--run-dir", str(directory)]
    command += ["--parent-fd", str(parent_read), *(part for text in overrides for part in ("--set", text))]
    # Another interpreter finds its own installation of this package.
    environment = python_environment() if python in (None, sys.executable) else None
    process = subprocess.Popen(command, env=environment, pass_fds=(parent_read,), start_new_session=True)
    os.close(parent_read)
    run: RollbookRun | None = None
    try:
        info = _host_info(directory, process)
        run = RollbookRun(info, directory, process)
        run.open()
        yield run
    finally:
        if run is not None:
            run.close()
        else:
            end_process_blocking(process, grace_s=STOP_S)
        os.close(parent_write)


@contextmanager
def _open_follower(directory: Path) -> Iterator[RollbookRun]:
    """The run of a training process other than rank 0."""
    run = RollbookRun(_host_info(directory, None), directory, None, is_leader=False)
    try:
        run.open()
        yield run
    finally:
        run.close()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _host_info(directory: Path, process: subprocess.Popen[bytes] | None) -> HostInfo:
    """`process`: the host that was started; None: any that is running, which rank 0 started."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if process is not None and (code := process.poll()) is not None:
            raise RunError(
                f"`rollbook host` ended with code {code} before it was ready: its error is printed above, its log is in "
                f"{directory / 'logs'}"
            )
        with suppress(OSError, ValueError):
            info = json_decoder(HostInfo).decode((directory / "host.json").read_bytes())
            # The file of a host that was killed has the id of a process that has ended.
            if info.pid == process.pid if process is not None else _is_running(info.pid):
                return info
        time.sleep(0.05)
    raise RunError(f"`rollbook host` was not ready within {READY_S:g} s; see {directory / 'logs'}")


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
        """Request no more batches. Rows in the queue stay there; the ledger delivers their batch again to the next trainer."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_WORKER_S)

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
