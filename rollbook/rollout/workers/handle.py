"""`AsyncRolloutWorker`: the dispatcher's handle on one worker process.

User code runs in a process of its own, spawned fresh: it cannot hold the dispatcher's interpreter, and its death loses only the
groups it was playing. The handle is opened with `async with`; it is ready when the block begins and gone when the block has ended.
"""

import asyncio
import os
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from rollbook.concurrency.exception_groups import STACK_SIGNAL
from rollbook.concurrency.process_state import process_state
from rollbook.concurrency.shield import finish
from rollbook.contracts.errors import RunError, WorkerError
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.workers.messages import (
    Beat,
    Cancel,
    Failed,
    Finished,
    FromWorker,
    Play,
    Ready,
    Stalled,
    Stop,
    ToWorker,
    frame,
    from_worker,
    read_frame,
)
from rollbook.rollout.workers.spec import WorkerRecipe
from rollbook.telemetry.events import EventLog

STDERR_LINES = 40
"""Last lines of a worker's output that are kept for the message when it dies."""

STACK_S = 0.5
"""How long a silent worker may take to write its stack down. Its signal handler does that, so it is a matter of milliseconds."""

CHUNK_BYTES = 1 << 16
"""A line longer than this is cut: nobody reads it, and it must not fill our memory."""

PACKAGE_ROOT: Final = str(Path(__file__).parents[3])


class WorkerDiedError(WorkerError):
    """A worker process ended, or fell silent, without being asked to."""


class AsyncRolloutWorker:
    """One worker process that is ready to play. Made by `open_worker`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        last_lines: deque[str],
        *,
        silence_s: float,
        log: EventLog,
    ) -> None:
        self._log = log
        self._process = process
        self._reader = reader
        self._writer = writer
        self._last_lines = last_lines
        self._silence_s = silence_s
        self.in_flight: dict[tuple[str, int], GroupOrder] = {}
        """What it plays, by group and attempt: lost if it dies."""
        self.loop_lag_s = 0.0
        self.continued = 0
        """Policy requests that were aborted and went on from their tokens, so far."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """How the process ended; negative for the signal that ended it, None while it lives."""
        return self._process.returncode

    def play(self, order: GroupOrder) -> None:
        self.in_flight[order.group_id, order.attempt] = order
        self._tell(Play.of(order))

    def cancel(self, group_id: str, attempt: int, *, is_late: bool = False) -> None:
        if self.in_flight.pop((group_id, attempt), None) is not None:
            self._tell(Cancel(group_id=group_id, attempt=attempt, is_late=is_late))

    async def results(self) -> AsyncIterator[tuple[GroupOrder, Finished]]:
        """What it finished, one by one. Raises `WorkerDiedError` when the process is gone or silent, `RunError` if it says so."""
        while True:
            message = await self._next(self._silence_s, "gave no sign of life")
            match message:
                case Finished(group_id=group_id, attempt=attempt):
                    # A result that crossed its own cancellation is no longer wanted.
                    if (order := self.in_flight.pop((group_id, attempt), None)) is not None:
                        yield order, message
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
                case Ready():
                    pass
                case Failed():
                    raise self._verdict(message)

    async def wait_ready(self, within_s: float) -> None:
        message = await self._next(within_s, "was not ready")
        if isinstance(message, Failed):
            raise self._verdict(message)

    async def stop(self, *, within_s: float) -> None:
        """Ask, then terminate, then kill. The process is gone when this returns."""
        if self._process.returncode is None:
            self._tell(Stop())
            for insist in (self._process.terminate, self._process.kill):
                if await _ends(self._process, within_s):
                    break
                with suppress(ProcessLookupError):
                    insist()
            await self._process.wait()
        self._writer.close()

    async def _next(self, within_s: float, complaint: str) -> FromWorker:
        try:
            async with asyncio.timeout(within_s):
                payload = await read_frame(self._reader)
        except TimeoutError:
            stack = await self._stack()
            self._log.warning(
                "rollout.worker_stalled", pid=self.pid, age_s=within_s, in_flight=len(self.in_flight), stack=stack
            )
            raise WorkerDiedError(f"worker {self.pid} {complaint} for {within_s:g} s; where it is:\n{stack}") from None
        if payload is None:
            await _ends(self._process, 1.0)
            raise WorkerDiedError(f"worker {self.pid} {_ending(self._process.returncode)}{self._tail()}")
        message: FromWorker = from_worker.decode(payload)
        return message

    async def _stack(self) -> str:
        """Where each of its threads is, in its own words; else what the kernel says of it."""
        said = len(self._last_lines)
        with suppress(ProcessLookupError):
            self._process.send_signal(STACK_SIGNAL)
        await asyncio.sleep(STACK_S)
        told = list(self._last_lines) if said == self._last_lines.maxlen else list(self._last_lines)[said:]
        return "\n".join(f"    {line}" for line in told) or f"    it cannot say ({process_state(self.pid)})"

    def _tell(self, message: ToWorker) -> None:
        # Orders are small and few (a worker has a bounded number of groups), so the buffer of the socket bounds nothing here.
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    def _verdict(self, failed: Failed) -> RunError | WorkerDiedError:
        if failed.stops_run:
            return RunError(failed.cause)
        return WorkerDiedError(f"worker {self.pid} failed: {failed.cause}{self._tail()}")

    def _tail(self) -> str:
        return "".join(f"\n    {line}" for line in self._last_lines)


@asynccontextmanager
async def open_worker(
    recipe: WorkerRecipe, *, log: EventLog, start_s: float, silence_s: float, stop_s: float
) -> AsyncIterator[AsyncRolloutWorker]:
    """Spawn a worker and wait until it is ready; stop it at the end of the block, whatever happened inside."""
    pickled = recipe.pickled()
    ours, theirs = socket.socketpair()
    # The child reads from the pipe and nobody writes: it ends when we do, whatever killed us.
    watch_read, watch_write = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollbook.rollout.workers.main",
            str(theirs.fileno()),
            str(watch_read),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(theirs.fileno(), watch_read),
            env={**os.environ, "PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"},
        )
    except BaseException:
        ours.close()
        os.close(watch_write)
        raise
    finally:
        theirs.close()
        os.close(watch_read)
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
        last_lines: deque[str] = deque(maxlen=STDERR_LINES)
        worker = AsyncRolloutWorker(process, reader, writer, last_lines, silence_s=silence_s, log=log)
        # Its scope is this block: a group would wrap what the block raises.
        output = asyncio.create_task(_follow_output(process, last_lines, log), name=f"worker.output.{process.pid}")
        try:
            writer.write(frame(pickled))
            await worker.wait_ready(start_s)
            yield worker
        finally:
            await finish(_stop(worker, output, stop_s), within_s=3 * stop_s, name=f"stop of worker {process.pid}")
    finally:
        os.close(watch_write)


async def _stop(worker: AsyncRolloutWorker, output: asyncio.Task[None], stop_s: float) -> None:
    await worker.stop(within_s=stop_s)
    # The pipe ends with the process, unless something the user's code spawned still holds it.
    await asyncio.wait({output}, timeout=1.0)
    output.cancel()


async def _follow_output(process: asyncio.subprocess.Process, last_lines: deque[str], log: EventLog) -> None:
    """Keep what user code prints: as events, and its end for the message when the worker dies."""
    assert process.stdout is not None
    rest = b""
    while chunk := await process.stdout.read(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > CHUNK_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            last_lines.append(text)
            log.info("rollout.worker_output", pid=process.pid, line=text)


async def _ends(process: asyncio.subprocess.Process, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "closed its connection"
    return f"was killed by signal {-returncode}" if returncode < 0 else f"exited with status {returncode}"


def _python_path() -> str:
    """The child finds this package as we did, installed or not, and nothing is put before it."""
    return os.pathsep.join(place for place in (PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")) if place)
