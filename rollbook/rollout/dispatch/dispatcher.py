"""`Dispatcher`: keeps groups in flight, stores what came of them, and reports outcomes.

The ledger is the truth: it grants groups, and a group this process loses is granted again. So nothing here is saved, and a stop
releases nothing: whoever joins under the same name next takes over at once. Nothing is tried again here either: the ledger's client
does that, once, within one budget; when it is spent this process ends and the supervisor decides.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.contracts.admission import GateState, Grant, OpenReply, OwnerId, Receipt
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import FreshnessRule
from rollbook.contracts.group import GroupId, group_id
from rollbook.contracts.ports import GroupSink, TaskSource
from rollbook.contracts.task import Draw
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.dispatch.failure_breaker import CircuitBreaker
from rollbook.rollout.dispatch.monitor import Steering
from rollbook.rollout.dispatch.reporter import GroupTeller
from rollbook.rollout.dispatch.slots import StalenessController
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.metrics import reward_names
from rollbook.rollout.workers.messages import Finished
from rollbook.rollout.workers.pool import WorkerPool
from rollbook.rollout.workers.spec import WorkerRecipe
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.telemetry.spans import SpanRecorder

OPEN_WAIT_S = 20.0
"""How long the ledger may hold a request to open when the gate is closed; it answers the moment there is something to grant."""
EMPTY_PAUSE_S = 0.05
"""After a reply that granted nothing: a ledger that does not hold requests must not be asked in a tight loop."""
TICK_S = 1.0
SUBMITTERS = 8
"""Groups on their way to the ledger at the same time: enough to hide its latency, few enough not to crowd it."""
HISTORY_PAGE = 1000
"""Past draws in one answer: some hundred kilobytes."""
LAST_LANDINGS_S = 2.0
"""When the run is over: how long groups that are just being stored are waited for, so that they are counted too."""


@dataclass(slots=True, eq=False)
class _Flight:
    """One grant being played. It lands once: finished, lost, or over its time."""

    grant: Grant
    started: float
    started_wall: float
    timer: asyncio.TimerHandle
    is_landing: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return (self.grant.group_id, self.grant.attempt)


@dataclass(frozen=True, slots=True)
class _Landing:
    """What became of a flight: a result, or the cause why there is none."""

    flight: _Flight
    result: Finished | None = None
    cause: str = ""


class Dispatcher:
    def __init__(
        self,
        *,
        name: str,
        tasks: TaskSource,
        sink: GroupSink,
        recipe: WorkerRecipe,
        config: RolloutConfig,
        rule: FreshnessRule,
        log: EventLog,
        metrics: MetricRecorder,
        spans: SpanRecorder,
        clock: Clock | None = None,
        max_attempts: int | None = None,
        look_at: str = "the events rollout.group_failed and rollout.worker_output in the run's logs",
    ) -> None:
        self._name = name
        self._tasks = tasks
        self._sink = sink
        self._config = config
        self._log = log
        self._metrics = metrics
        self._clock = clock or SystemClock()
        self._controller = StalenessController(rule, slots=config.slots)
        self._teller = GroupTeller(
            metrics=metrics,
            spans=spans,
            log=log,
            breaker=CircuitBreaker(look_at=look_at),
            rewards=reward_names(config),
        )
        self._steering = Steering(config, self._controller, metrics=metrics, log=log, clock=self._clock)
        self._pool = WorkerPool(recipe, config, listener=self, log=log, clock=self._clock)
        self._flights: dict[tuple[str, int], _Flight] = {}
        # A flight lands once and keeps its slot until the ledger has it, so there are never more landings than slots.
        self._landings: asyncio.Queue[_Landing] = asyncio.Queue(maxsize=config.slots)
        self._freed = asyncio.Event()
        self._max_attempts = max_attempts
        self._failed_attempts: Counter[GroupId] = Counter()
        self._is_ended = False

    async def run(self) -> None:
        """Play until the ledger says that the run is over. Raises `RunError` where a person must act."""
        owner = await self._sink.join(self._name)
        self._tasks.rebuild(await self._sink.progress())
        if self._tasks.needs_history:
            await self._recall()
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(self._pool.run(), name="rollout.pool"),
                    group.create_task(self._stay_alive(owner), name="rollout.heartbeat"),
                    group.create_task(self._tick(), name="rollout.tick"),
                    *(group.create_task(self._land(), name=f"rollout.submit.{i}") for i in range(SUBMITTERS)),
                ]
                await self._keep_groups_in_flight(owner)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_LANDINGS_S):
                        await self._landings.join()
                self._log.info("rollout.run_ended", unfinished_groups=len(self._flights))
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as escaped:
            raise _most_telling(escaped) from escaped
        finally:
            for flight in self._flights.values():
                flight.timer.cancel()
            self._measure()

    async def _recall(self) -> None:
        """Tell the task source its past, page by page: a long one is never held at once."""
        after = -1
        while past := await self._sink.outcomes(after=after, limit=HISTORY_PAGE):
            self._tasks.recall(past)
            after = past[-1].sequence

    async def _keep_groups_in_flight(self, owner: OwnerId) -> None:
        """Open groups whenever there is a slot for them.

        Takes:  draws, from the task source.
        Gives:  orders, to the pool.
        Waits:  for a ready worker, then for a free slot, then in the ledger for the gate.
        Woken:  by `_leave` through `self._freed`.
        Ends:   when the run is over.
        """
        await self._pool.ready.wait()
        was_told = False
        while True:
            while not self._is_ended and self._controller.to_propose == 0:
                self._freed.clear()
                await self._freed.wait()
            if self._is_ended:
                return
            count = self._controller.to_propose
            draws = self._tasks.propose(count)
            if self._tasks.is_exhausted and not was_told:
                await self._sink.exhausted()
                was_told = True
            reply = await self._open(owner, draws, count)
            if reply.gate is GateState.ENDED:
                return
            if not reply.grants and not reply.taken:
                await self._clock.sleep(EMPTY_PAUSE_S)

    async def _open(self, owner: OwnerId, draws: Sequence[Draw], count: int) -> OpenReply:
        reply = await self._sink.open(owner, draws, limit=count, wait_s=OPEN_WAIT_S)
        self._tasks.taken(reply.taken)
        granted = {grant.position for grant in reply.grants}
        for draw in draws[: reply.taken]:
            if draw.position not in granted:
                # Another dispatcher has it, or had it before: it is no longer ours to wait for.
                self._tasks.observe(group_id(draw.task_id, draw.number), draw.position, None)
        self._controller.opened(reply)
        for grant in reply.grants:
            self._take_off(grant)
        return reply

    def _take_off(self, grant: Grant) -> None:
        for flight in [f for f in self._flights.values() if f.grant.group_id == grant.group_id]:
            # The ledger took the older attempt for lost, so its end is nobody's business any more.
            if not flight.is_landing:
                self._pool.cancel(*flight.key)
                self._leave(flight)
                self._controller.given_back()
        flight = _Flight(
            grant=grant,
            started=self._clock.now(),
            started_wall=self._clock.wall(),
            timer=asyncio.get_running_loop().call_later(grant.deadline_s, self._expire, grant),
        )
        self._flights[flight.key] = flight
        self._pool.play(
            GroupOrder(
                group_id=grant.group_id,
                attempt=grant.attempt,
                task_id=grant.task_id,
                draw=grant.draw,
                row=self._tasks.task(grant.task_id).row,
                min_publication=grant.admission_publication,
                deadline_s=grant.deadline_s,
            )
        )

    def group_finished(self, order: GroupOrder, result: Finished) -> None:
        self._begin_landing(order.group_id, order.attempt, result=result)

    def group_lost(self, order: GroupOrder, cause: str) -> None:
        self._begin_landing(order.group_id, order.attempt, cause=cause)

    def worker_died(self, cause: str) -> None:
        self._metrics.add("rollout/worker_deaths", 1)

    def _expire(self, grant: Grant) -> None:
        self._pool.cancel(grant.group_id, grant.attempt, is_late=True)
        self._begin_landing(grant.group_id, grant.attempt, cause="deadline")

    def _begin_landing(self, group: GroupId, attempt: int, *, result: Finished | None = None, cause: str = "") -> None:
        flight = self._flights.get((group, attempt))
        if flight is not None and not flight.is_landing:
            flight.is_landing = True
            flight.timer.cancel()
            self._landings.put_nowait(_Landing(flight, result, cause))

    async def _land(self) -> None:
        """Bring what ended to the ledger, one at a time.

        Takes:  landings, from the pool's callbacks and the timers.
        Gives:  stored, closed and released groups, to the ledger; outcomes, to the task source.
        Waits:  for a landing; then for the ledger.
        Ends:   on cancellation: what is not stored by then is played again.
        """
        while True:
            landing = await self._landings.get()
            try:
                await self._settle(landing.flight, landing.result, landing.cause)
            finally:
                self._landings.task_done()

    async def _settle(self, flight: _Flight, result: Finished | None, cause: str) -> None:
        grant = flight.grant
        if result is None:
            await self._give_back(grant, cause)
            self._steering.given_up(grant, seconds=self._clock.now() - flight.started)
            self._leave(flight)
            self._controller.given_back()
            self._failed_attempts[grant.group_id] += 1
            if self._failed_attempts[grant.group_id] == self._max_attempts:
                # The ledger dropped it with this: nobody else will say so, and the cursor would wait for it for ever.
                self._tasks.observe(grant.group_id, grant.position, None)
                del self._failed_attempts[grant.group_id]
            return
        self._failed_attempts.pop(grant.group_id, None)
        await self._store(grant, result)
        self._steering.finished(grant, result, seconds=self._clock.now() - flight.started)
        self._leave(flight)
        self._controller.finished(is_accepted=result.drop is None)
        self._tasks.observe(grant.group_id, grant.position, result.outcome)
        # Last, because the breaker in it may stop the run: by then everything is on record.
        self._teller.tell(grant, result, started_wall=flight.started_wall, seconds=self._clock.now() - flight.started)

    async def _give_back(self, grant: Grant, cause: str) -> None:
        self._metrics.add("rollout/groups_released", 1)
        self._log.info("rollout.group_released", group_id=grant.group_id, attempt=grant.attempt, cause=cause)
        await self._sink.release(grant.group_id, attempt=grant.attempt, cause=cause)

    async def _store(self, grant: Grant, result: Finished) -> None:
        group, drop = result.group, result.drop
        if group is not None:
            receipt = await self._sink.submit(group, result.outcome, attempt=grant.attempt, drop=drop)
        else:
            assert drop is not None
            receipt = await self._sink.close(grant.group_id, drop, outcome=result.outcome)
        if receipt is not Receipt.STORED:
            # Another attempt was faster, or our own first request arrived after all: the first one won.
            self._log.info("rollout.group_known", group_id=grant.group_id, attempt=grant.attempt, receipt=receipt)

    def _leave(self, flight: _Flight) -> None:
        flight.timer.cancel()
        self._flights.pop(flight.key, None)
        self._freed.set()

    async def _stay_alive(self, owner: OwnerId) -> None:
        """Tell the ledger that we live, and hear from it where the run stands. Ends: when the run is over."""
        while True:
            await self._clock.sleep(self._config.heartbeat_s)
            await self._sink.heartbeat(owner)
            status = await self._sink.status()
            self._controller.heard(status)
            await self._steering.look(self._sink, status)
            if status.ended:
                self._is_ended = True
                self._freed.set()
                return

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            self._measure()

    def _measure(self) -> None:
        self._metrics.add("async/in_flight", len(self._flights))
        self._metrics.add("async/staleness_capacity", self._controller.capacity)
        self._metrics.add("rollout/accepted_groups", self._controller.accepted)
        self._metrics.add("rollout/rejected_groups", self._controller.rejected)
        self._metrics.add("rollout/worker_loop_lag", self._pool.loop_lag_s)
        self._metrics.add("rollout/continued_requests", self._pool.continued)
        self._steering.measure()
        self._metrics.tick()


def _most_telling(escaped: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of several errors the one a person must see: a verdict on the run before anything else."""
    flat: list[BaseException] = []
    pending: list[BaseException] = [escaped]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, RunError)), flat[0])
