"""Plans batches while earlier ones are trained: in a thread, or in a child process.

Decoding and splitting a batch takes tens of milliseconds of Python. A thread that launches GPU work releases the interpreter lock
at each operation, and then waits for it while another thread plans: next to a planning thread, a training step of a 135M model
takes six times as long. So on a GPU batches are planned in a child process, `python -m rollbook.trainer.data.planner`.
"""

import asyncio
import pickle
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from rollbook.concurrency.child_process.child import connect_to_parent, kill_with_parent
from rollbook.concurrency.child_process.frames import BlockingFrames
from rollbook.concurrency.child_process.process import ChildEndedError, ChildProcess, ChildSpec
from rollbook.contracts.batch import EncodedBatch
from rollbook.contracts.errors import RunError
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import PlanSettings
from rollbook.trainer.data.planning import PlannedBatch


class Planner:
    """Plans batches in the background, in the order in which they are started."""

    def __init__(self, plan: Callable[[EncodedBatch], Awaitable[PlannedBatch]]) -> None:
        self._plan = plan
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[PlannedBatch]] = set()

    def start(self, batch: EncodedBatch) -> asyncio.Task[PlannedBatch]:
        """The task raises `RunError` if the batch cannot be trained with this model."""
        task = asyncio.create_task(self._planned(batch), name=f"trainer.plan.{batch.step}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Batches that were not planned yet are dropped: the loop ended before it needed them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _planned(self, batch: EncodedBatch) -> PlannedBatch:
        async with self._turn:
            return await self._plan(batch)


def plans_in_child(config: TrainerConfig) -> bool:
    return config.device == "cuda"


@asynccontextmanager
async def open_planner(settings: PlanSettings, *, num_shown: int, in_child: bool) -> AsyncIterator[Planner]:
    """`num_shown`: samples of each batch that are shown to people."""
    if in_child:
        child = await ChildProcess.start(ChildSpec(module="rollbook.trainer.data.planner"))
        child.send(pickle.dumps((settings, num_shown)))
        planner = Planner(partial(_plan_in_child, child))
    else:
        child = None
        plan = partial(PlannedBatch.of, settings=settings, num_shown=num_shown)
        planner = Planner(partial(asyncio.to_thread, plan))
    try:
        yield planner
    finally:
        await planner.close()
        if child is not None:
            await child.kill()


async def _plan_in_child(child: ChildProcess, batch: EncodedBatch) -> PlannedBatch:
    child.send(pickle.dumps(batch))
    try:
        answer = pickle.loads(await child.receive())
    except ChildEndedError as error:
        raise ChildProcessError(
            f"the process that plans batches is lost ({error}); the trainer is restarted"
        ) from error
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, PlannedBatch)
    return answer


def main(channel_fd: int) -> None:
    """The child: answers each batch with its plan, or with the error."""
    kill_with_parent()
    parent = BlockingFrames(connect_to_parent(channel_fd))
    first = parent.receive()
    if first is None:
        return
    settings, num_shown = pickle.loads(first)
    while (message := parent.receive()) is not None:
        try:
            answer: PlannedBatch | Exception = PlannedBatch.of(pickle.loads(message), settings, num_shown=num_shown)
        except RunError as error:
            answer = error
        except Exception:
            answer = RuntimeError(traceback.format_exc())
        parent.send(pickle.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
