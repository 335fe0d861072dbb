"""Fetches batches and plans them while earlier ones are trained: in this process, or in a child process.

Decoding and splitting a batch takes tens of milliseconds of Python. A thread that launches GPU work releases the interpreter lock
at each operation, and then waits for it while another thread plans: next to a planning thread, a training step of a 135M model
takes six times as long. So on a GPU a child process, `python -m rollbook.trainer.data.planner`, reads the batches from the ledger
and plans them. The trainer receives only the plans.
"""

import asyncio
import pickle
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rollbook.concurrency.child_process.child import connect_to_parent, kill_with_parent
from rollbook.concurrency.child_process.frames import Frames
from rollbook.concurrency.child_process.process import ChildEndedError, ChildProcess, ChildSpec
from rollbook.contracts.batch import EncodedBatch, EndOfRun, PassSplit, TrainerRole
from rollbook.contracts.errors import RollbookError, RunError
from rollbook.contracts.plugin import extend_search_path, search_path
from rollbook.contracts.ports import BatchSource
from rollbook.trainer.data.minibatches import PlanSettings
from rollbook.trainer.data.planning import PlannedBatch, UnplannableBatchError

OpenSource: TypeAlias = Callable[[TrainerRole], AbstractAsyncContextManager[BatchSource]]
"""Connects to the ledger with the role of a trainer. It is pickled and called in the child process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    step: int
    wait_s: float
    """How long the ledger may wait for enough groups."""
    keeps_batch: bool = False
    """Return the decoded batch with the plan."""
    split: PassSplit | None = None
    """How to split a batch that was not acknowledged yet. None: by the settings."""
    ignores_record: bool = False
    """Use `split` for an acknowledged step too."""


class Planner(Protocol):
    async def plan(self, request: BatchRequest) -> PlannedBatch | EndOfRun | None:
        """The planned batch of a step. None: not enough groups yet; call again. One call at a time.

        Raises `UnplannableBatchError`, `ChildProcessError` if the planning process died, or an error of the ledger.
        """


class LocalPlanner:
    """Fetches batches in this event loop and plans them in a thread."""

    def __init__(self, source: BatchSource, settings: PlanSettings, *, num_shown: int) -> None:
        self._source = source
        self._settings = settings
        self._num_shown = num_shown

    async def plan(self, request: BatchRequest) -> PlannedBatch | EndOfRun | None:
        found = await self._source.encoded_batch(request.step, wait_s=request.wait_s)
        return await asyncio.to_thread(self._planned, found, request) if isinstance(found, EncodedBatch) else found

    def _planned(self, encoded: EncodedBatch, request: BatchRequest) -> PlannedBatch:
        try:
            return PlannedBatch.of(
                encoded,
                self._settings,
                split=request.split if request.ignores_record else encoded.split or request.split,
                num_shown=self._num_shown,
                keeps_batch=request.keeps_batch,
            )
        except RunError as error:
            raise UnplannableBatchError(str(error)) from error


class ChildPlanner:
    """A `LocalPlanner` in a child process with its own connection to the ledger."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child

    async def plan(self, request: BatchRequest) -> PlannedBatch | EndOfRun | None:
        self._child.send(pickle.dumps(request))
        try:
            answer: PlannedBatch | EndOfRun | Exception | None = pickle.loads(await self._child.receive())
        except ChildEndedError as error:
            raise ChildProcessError(
                f"the process that plans batches is lost ({error}); the trainer is restarted"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


@asynccontextmanager
async def open_planner(
    settings: PlanSettings,
    *,
    source: BatchSource,
    role: TrainerRole,
    num_shown: int,
    open_in_child: OpenSource | None = None,
) -> AsyncIterator[Planner]:
    """`num_shown`: samples of each batch that are shown to people. `open_in_child`: None to plan in this process."""
    if open_in_child is None:
        yield LocalPlanner(source, settings, num_shown=num_shown)
        return
    child = await ChildProcess.start(ChildSpec(module="rollbook.trainer.data.planner"))
    try:
        child.send(pickle.dumps((open_in_child, role, settings, num_shown, search_path())))
        yield ChildPlanner(child)
    finally:
        await child.kill()


async def main(channel_fd: int) -> None:
    """The child: answers each request with the plan, or with the error."""
    kill_with_parent()
    parent = await Frames.open(connect_to_parent(channel_fd))
    first = await parent.receive()
    if first is None:
        return
    open_source, role, settings, num_shown, directories = pickle.loads(first)
    extend_search_path(directories)
    async with open_source(role) as source:
        planner = LocalPlanner(source, settings, num_shown=num_shown)
        while (message := await parent.receive()) is not None:
            try:
                answer: PlannedBatch | EndOfRun | Exception | None = await planner.plan(pickle.loads(message))
            except RollbookError as error:
                answer = error
            except Exception:
                answer = RuntimeError(traceback.format_exc())
            # Protocol 5 writes arrays as raw bytes, without a copy of each.
            parent.send(pickle.dumps(answer, protocol=5))
            await parent.drain()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
