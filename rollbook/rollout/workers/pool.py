"""`WorkerPool`: several worker processes, watched and replaced. Groups go to whoever has the least to do.

A worker that dies takes its groups with it: the pool says which, and what becomes of them is the dispatcher's business. It is
replaced after a pause that grows; workers that die again and again without finishing anything stop the run with their last words.
"""

import asyncio
from collections import deque
from typing import Protocol

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.retry import backoff
from rollbook.contracts.errors import RunError
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.workers.handle import AsyncRolloutWorker, WorkerDiedError, open_worker
from rollbook.rollout.workers.messages import Finished
from rollbook.rollout.workers.spec import WorkerRecipe
from rollbook.telemetry.events import EventLog

MOST_BARREN_DEATHS = 5
"""Deaths in a row, over all seats, without one finished group in between. One bad group is dropped by the ledger before that."""


class WorkersDyingError(RunError):
    """Workers die faster than they can be of use."""


class PoolListener(Protocol):
    """Who is told. Called from the pool's own tasks; must not block."""

    def group_finished(self, order: GroupOrder, finished: Finished) -> None: ...

    def group_lost(self, order: GroupOrder, cause: str) -> None: ...

    def worker_died(self, cause: str) -> None: ...


class WorkerPool:
    def __init__(
        self,
        recipe: WorkerRecipe,
        config: RolloutConfig,
        *,
        listener: PoolListener,
        log: EventLog,
        clock: Clock | None = None,
    ) -> None:
        self._recipe = recipe
        self._config = config
        self._listener = listener
        self._log = log
        self._clock = clock or SystemClock()
        self._open: list[AsyncRolloutWorker] = []
        # Orders that no worker can take right now (one has just died). Never more than the dispatcher's slots.
        self._backlog: deque[GroupOrder] = deque()
        self._barren_deaths = 0
        self.ready = asyncio.Event()
        """Set once the first worker is ready."""

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._open)

    @property
    def in_flight(self) -> int:
        return len(self._backlog) + sum(len(worker.in_flight) for worker in self._open)

    @property
    def loop_lag_s(self) -> float:
        """How late the slowest worker's event loop last was: long, when user code computes in it."""
        return max((worker.loop_lag_s for worker in self._open), default=0.0)

    @property
    def continued(self) -> int:
        """Policy requests of the workers that live now that were aborted and went on from their tokens."""
        return sum(worker.continued for worker in self._open)

    async def run(self) -> None:
        """Keep every seat taken. Ends: on cancellation, when all workers are gone; by `RunError` when a person must act."""
        self._recipe.pickled()
        async with asyncio.TaskGroup() as seats:
            for seat in range(self._config.workers):
                seats.create_task(self._keep_seat(seat), name=f"rollout.seat.{seat}")

    def play(self, order: GroupOrder) -> None:
        """Hand a group to the least loaded worker; it waits for one where none can take it."""
        self._backlog.append(order)
        self._hand_out()

    def cancel(self, group_id: str, attempt: int, *, is_late: bool = False) -> None:
        """Forget a group: nothing will be said about it any more; of a late one, where it hangs is written to the log."""
        self._backlog = deque(o for o in self._backlog if (o.group_id, o.attempt) != (group_id, attempt))
        for worker in self._open:
            worker.cancel(group_id, attempt, is_late=is_late)

    def _hand_out(self) -> None:
        while self._backlog and self._open:
            worker = min(self._open, key=lambda w: len(w.in_flight))
            if len(worker.in_flight) >= self._config.groups_per_worker:
                return
            worker.play(self._backlog.popleft())

    async def _keep_seat(self, seat: int) -> None:
        """Open a worker, pass on what it finishes, and replace it when it dies.

        Takes:  orders, from `play`.
        Gives:  finished and lost groups, to the listener.
        Waits:  for results; after a death, for the backoff.
        Ends:   on cancellation; by `WorkersDyingError`.
        """
        waits = backoff(first_s=0.2, most_s=10.0)
        while True:
            lost: dict[tuple[str, int], GroupOrder] = {}
            try:
                async with open_worker(
                    self._recipe,
                    log=self._log,
                    start_s=self._config.worker_start_s,
                    silence_s=self._config.worker_silence_s,
                    stop_s=self._config.worker_stop_s,
                ) as worker:
                    lost = worker.in_flight
                    self._log.info("rollout.worker_ready", seat=seat, pid=worker.pid)
                    await self._serve(worker)
            except WorkerDiedError as error:
                self._bury(seat, list(lost.values()), str(error))
            await self._clock.sleep(next(waits))
            if self._barren_deaths == 0:
                waits = backoff(first_s=0.2, most_s=10.0)

    async def _serve(self, worker: AsyncRolloutWorker) -> None:
        self._open.append(worker)
        self.ready.set()
        try:
            self._hand_out()
            async for order, finished in worker.results():
                self._barren_deaths = 0
                self._listener.group_finished(order, finished)
                self._hand_out()
        finally:
            self._open.remove(worker)

    def _bury(self, seat: int, lost: list[GroupOrder], cause: str) -> None:
        self._barren_deaths += 1
        self._log.warning("rollout.worker_died", seat=seat, lost_groups=len(lost), cause=cause)
        self._listener.worker_died(cause)
        for order in lost:
            self._listener.group_lost(order, cause.splitlines()[0])
        if self._barren_deaths > MOST_BARREN_DEATHS:
            raise WorkersDyingError(
                f"{self._barren_deaths} rollout workers died in a row without finishing a group, so the run stops. "
                f"The last one: {cause}"
            )
