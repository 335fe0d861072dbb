"""`WorkerHandle`: the dispatcher's handle on one worker process.

User code runs in the worker: it cannot block the dispatcher's interpreter, and its death loses only the groups in flight there. The
handle is opened with `async with`; the worker is ready when the block begins and gone when it has ended.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollbook.concurrency.child_process.process import (
    ChildEndedError,
    ChildProcess,
    ChildSpec,
    innermost_frame,
    python_environment,
)
from rollbook.concurrency.deadline import Deadline, finish
from rollbook.contracts.errors import RunError, WorkerError
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.workers.messages import (
    Beat,
    Cancel,
    Failed,
    FromWorker,
    Play,
    Ready,
    Stalled,
    Stop,
    Waiting,
    encode,
    from_worker,
)
from rollbook.rollout.workers.spec import WorkerSpec
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.waits import WAITS

FORCED_STOP_S = 10.0
"""For the kernel to end a killed worker, and for the rest of its output."""


SLOW_START_S = 10.0
"""A worker that is not ready after this time is reported, with what it does."""
START = "a rollout worker to start"


class WorkerDiedError(WorkerError):
    """A worker process ended or became silent unexpectedly."""


class WorkerStartHangsError(WorkerDiedError):
    """A worker was not ready in time. The next one would import the same modules."""


class WorkerHandle:
    """One worker process that is ready to play. Made by `open_worker`."""

    def __init__(self, child: ChildProcess, *, silence_s: float, log: EventLog) -> None:
        self._child = child
        self._silence_s = silence_s
        self._log = log
        self.in_flight: dict[tuple[str, int], GroupOrder] = {}
        """The groups it plays, by group and attempt; they are lost if it dies."""
        self._open_shares: dict[tuple[str, int], float] = {}
        self.loop_lag_s = 0.0
        self.continued = 0
        """Policy requests that were aborted and continued from their tokens, so far."""

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it is alive; negative: the signal that ended it."""
        return self._child.exit_code

    @property
    def load(self) -> float:
        """Groups in flight. One that is submitted in parts counts less with each part."""
        return sum(self._open_shares.values())

    def play(self, order: GroupOrder) -> None:
        self.in_flight[order.group_id, order.attempt] = order
        self._open_shares[order.group_id, order.attempt] = 1.0
        self._child.send(encode(Play(order)))

    def cancel(self, group_id: str, attempt: int, *, is_late: bool = False) -> None:
        if self.in_flight.pop((group_id, attempt), None) is not None:
            del self._open_shares[group_id, attempt]
            self._child.send(encode(Cancel(group_id=group_id, attempt=attempt, is_late=is_late)))

    def _settle(self, order: GroupOrder, played: PlayedPart) -> None:
        key = (order.group_id, order.attempt)
        if played.is_last:
            del self.in_flight[key], self._open_shares[key]
        elif order.num_samples is not None:
            self._open_shares[key] -= played.outcome.num_samples / order.num_samples

    async def results(self) -> AsyncIterator[PlayedPart]:
        """Played groups and parts. Raises `WorkerDiedError` when the process is gone or silent, `RunError` if it reports so."""
        while True:
            message = await self._receive(self._silence_s, "sent no heartbeat")
            match message:
                case PlayedPart() as played:
                    # A cancellation may cross the result; then it is ignored.
                    if (order := self.in_flight.get((played.order_id, played.encoded.attempt))) is not None:
                        self._settle(order, played)
                        yield played
                case Beat(loop_lag_s=lag_s, continued=continued):
                    self.loop_lag_s = lag_s
                    self.continued = continued
                case Stalled() as stalled:
                    self._log.warning(
                        "rollout.group_stalled",
                        group_id=stalled.group_id,
                        attempt=stalled.attempt,
                        age_s=stalled.age_s,
                        pid=self.pid,
                        stack=stalled.stack,
                    )
                case Failed():
                    raise self._error(message)
                case Waiting() as waiting:
                    self._relay(waiting)
                case Ready():
                    pass

    async def wait_ready(self, within_s: float) -> None:
        deadline = Deadline(within_s, "the start of a worker")
        reporting = asyncio.create_task(self._report_slow_start(), name="rollout.slow_start")
        try:
            while not isinstance(message := await self._receive(deadline.remaining_s(), "was not ready"), Ready):
                if isinstance(message, Failed):
                    raise self._error(message)
                if isinstance(message, Waiting):
                    reporting.cancel()  # it reports itself what it waits for
                    self._relay(message)
        except WorkerDiedError as error:
            if not deadline.is_over:
                raise
            raise WorkerStartHangsError(
                f"worker {self.pid} was not ready within {within_s:g} s (rollout.worker_start_s). {error}"
            ) from error
        finally:
            reporting.cancel()
            await asyncio.wait({reporting})
        WAITS.recovered(START)

    async def _report_slow_start(self) -> None:
        """An import that hangs blocks the worker, so it cannot report itself."""
        await asyncio.sleep(SLOW_START_S)
        stack = await self._child.stack()
        WAITS.failing(
            START,
            f"worker {self.pid} is not ready after {SLOW_START_S:g} s; it is at {innermost_frame(stack)}",
            at_once=True,
        )

    def _relay(self, waiting: Waiting) -> None:
        """Once for all workers: they use the same servers."""
        if waiting.cause:
            WAITS.failing(waiting.awaited, waiting.cause, at_once=True)
        else:
            WAITS.recovered(waiting.awaited)

    async def stop(self, *, grace_s: float) -> None:
        await self._child.stop(request=encode(Stop()), grace_s=grace_s)

    async def _receive(self, within_s: float, complaint: str) -> FromWorker:
        try:
            async with asyncio.timeout(within_s):
                message: FromWorker = from_worker.decode(await self._child.receive())
                return message
        except TimeoutError:
            stack = _indented(await self._child.stack())
            self._log.warning(
                "rollout.worker_stalled", pid=self.pid, age_s=within_s, in_flight=len(self.in_flight), stack=stack
            )
            raise WorkerDiedError(f"worker {self.pid} {complaint} for {within_s:g} s; its stacks:\n{stack}") from None
        except ChildEndedError as error:
            raise WorkerDiedError(f"worker {self.pid} {error}\n{_indented(self._child.last_output())}") from error

    def _error(self, failed: Failed) -> RunError | WorkerDiedError:
        if failed.stops_run:
            return RunError(failed.cause)
        # What a worker prints explains errors of other kinds only: their tracebacks.
        output = "" if failed.is_explained else self._child.last_output()
        return WorkerDiedError(
            f"worker {self.pid} failed: {failed.cause}" + (f"\n{_indented(output)}" if output else "")
        )


@asynccontextmanager
async def open_worker(
    spec: WorkerSpec, *, log: EventLog, start_s: float, silence_s: float, stop_s: float
) -> AsyncIterator[WorkerHandle]:
    """Start a worker and wait until it is ready; stop it at the end of the block, even after an error."""
    pickled = spec.pickled()
    command = ChildSpec(
        module="rollbook.rollout.workers.main",
        environment=python_environment(),
        may_fork=True,
        output=lambda pid, line: log.info("rollout.worker_output", pid=pid, line=line),
    )
    child = await ChildProcess.start(command)
    worker = WorkerHandle(child, silence_s=silence_s, log=log)
    try:
        child.send(pickled)
        await worker.wait_ready(start_s)
        yield worker
    finally:
        await finish(
            worker.stop(grace_s=stop_s), within_s=2 * stop_s + FORCED_STOP_S, name=f"stop of worker {child.pid}"
        )


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
