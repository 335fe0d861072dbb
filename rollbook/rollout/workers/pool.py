"""`WorkerPool`: several worker processes, supervised and replaced. A group goes to the worker with the fewest groups.

When a worker dies, the pool reports its groups as lost; the dispatcher decides what happens to them. The worker is replaced after a
growing delay. Workers that die repeatedly without finishing a group stop the run with the last cause.
"""

import asyncio
from collections import deque
from typing import Protocol

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.retry import backoff
from rollbook.contracts.errors import RunError
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.workers.handle import WorkerDiedError, WorkerHandle, WorkerStartHangsError, open_worker
from rollbook.rollout.workers.spec import WorkerSpec
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.waits import WAITS

MAX_BARREN_DEATHS = 5
"""Worker deaths in a row, over all workers, without a finished group. A single bad group is dropped by the ledger before that."""


MAX_FAILED_STARTS = 1
"""Worker deaths before any worker was ready: more starts would not help."""
DEATHS = "a rollout worker that finishes a group"


class WorkersDyingError(RunError):
    """Workers die repeatedly without finishing a group, or none of them starts."""


class PoolListener(Protocol):
    """Receives the events of a pool. Called from the pool's tasks; must not block."""

    def group_played(self, played: PlayedPart) -> None: ...

    def group_lost(self, order: GroupOrder, cause: str) -> None: ...

    def worker_died(self, cause: str) -> None: ...


class WorkerPool:
    def __init__(self, spec: WorkerSpec, *, listener: PoolListener, log: EventLog, clock: Clock | None = None) -> None:
        self._spec = spec
        self._config = spec.config
        self._listener = listener
        self._log = log
        self._clock = clock or SystemClock()
        self._open: list[WorkerHandle] = []
        # Orders that no worker can take now (one has just died). Bounded by the dispatcher's slots.
        self._backlog: deque[GroupOrder] = deque()
        self._barren_deaths = 0
        self.ready = asyncio.Event()
        """Set when the first worker is ready."""

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._open)

    @property
    def in_flight(self) -> int:
        return len(self._backlog) + sum(len(worker.in_flight) for worker in self._open)

    @property
    def loop_lag_s(self) -> float:
        """The last event loop lag of the slowest worker. It is high when user code blocks the loop."""
        return max((worker.loop_lag_s for worker in self._open), default=0.0)

    @property
    def continued(self) -> int:
        """Aborted policy requests that the current workers continued from their partial tokens."""
        return sum(worker.continued for worker in self._open)

    async def run(self) -> None:
        """Keep all workers running. Ends: on cancellation, when all workers are gone; by `RunError`."""
        self._spec.pickled()
        async with asyncio.TaskGroup() as group:
            for number in range(self._config.workers):
                group.create_task(self._keep_worker(number), name=f"rollout.worker.{number}")

    def play(self, order: GroupOrder) -> None:
        """Give a group to the least loaded worker, or queue it until a worker can take it."""
        self._backlog.append(order)
        self._assign()

    def cancel(self, group_id: str, attempt: int, *, is_late: bool = False) -> None:
        """Cancel a group: no result is reported for it. The worker logs the stacks of a late one."""
        self._backlog = deque(o for o in self._backlog if (o.group_id, o.attempt) != (group_id, attempt))
        for worker in self._open:
            worker.cancel(group_id, attempt, is_late=is_late)

    def _assign(self) -> None:
        while self._backlog and self._open:
            worker = min(self._open, key=lambda w: w.load)
            if worker.load >= self._config.groups_per_worker:
                return
            worker.play(self._backlog.popleft())

    async def _keep_worker(self, number: int) -> None:
        """Open a worker, report its results, and replace it when it dies.

        Takes:  orders, from `play`.
        Gives:  played and lost groups, to the listener.
        Waits:  for results; after a death, for the backoff.
        Ends:   on cancellation; by `WorkersDyingError`.
        """
        waits = backoff(first_s=0.2, max_s=10.0)
        while True:
            lost: dict[tuple[str, int], GroupOrder] = {}
            try:
                async with open_worker(
                    self._spec,
                    log=self._log,
                    start_s=self._config.worker_start_s,
                    silence_s=self._config.worker_silence_s,
                    stop_s=self._config.worker_stop_s,
                ) as worker:
                    lost = worker.in_flight
                    self._log.info("rollout.worker_ready", worker=number, pid=worker.pid)
                    await self._report_results(worker)
            except WorkerDiedError as error:
                self._on_worker_death(number, list(lost.values()), error)
            await self._clock.sleep(next(waits))
            if self._barren_deaths == 0:
                waits = backoff(first_s=0.2, max_s=10.0)

    async def _report_results(self, worker: WorkerHandle) -> None:
        self._open.append(worker)
        self.ready.set()
        try:
            self._assign()
            async for played in worker.results():
                self._barren_deaths = 0
                WAITS.recovered(DEATHS)
                self._listener.group_played(played)
                self._assign()
        finally:
            self._open.remove(worker)

    def _on_worker_death(self, number: int, lost: list[GroupOrder], error: WorkerDiedError) -> None:
        cause = str(error)
        self._barren_deaths += 1
        WAITS.failing(DEATHS, cause, at_once=True)
        self._log.warning("rollout.worker_died", worker=number, lost_groups=len(lost), cause=cause)
        self._listener.worker_died(cause)
        for order in lost:
            self._listener.group_lost(order, cause.splitlines()[0])
        if not self.ready.is_set() and (
            isinstance(error, WorkerStartHangsError) or self._barren_deaths > MAX_FAILED_STARTS
        ):
            raise WorkersDyingError(f"no rollout worker could be started. The last one: {cause}")
        if self._barren_deaths > MAX_BARREN_DEATHS:
            raise WorkersDyingError(
                f"{self._barren_deaths} rollout workers died in a row without finishing a group. The last one: {cause}"
            )
