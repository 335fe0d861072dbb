"""`Dispatcher`: requests groups from the ledger, plays them in worker processes, and stores their results.

The ledger holds all progress: a group that this process loses is granted again. So nothing is saved here, and a stop releases
nothing: the next dispatcher that joins under the same name takes over. Requests are not retried here either: the ledger's client
retries within one budget; when that is spent, this process ends and the supervisor decides.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.tasks import first_error
from rollbook.contracts.admission import GateState, Grant, OpenReply, OwnerId
from rollbook.contracts.errors import NotFoundError, RunError
from rollbook.contracts.freshness import FreshnessRule
from rollbook.contracts.group import group_id
from rollbook.contracts.ports import GroupSink, TaskSource
from rollbook.contracts.task import Draw
from rollbook.rollout.dispatch.attempts import Attempt, Lost
from rollbook.rollout.dispatch.failure_breaker import FailureBreaker
from rollbook.rollout.dispatch.monitor import DispatchMonitor
from rollbook.rollout.dispatch.outcome_follower import OutcomeFollower
from rollbook.rollout.dispatch.reporter import GroupReporter
from rollbook.rollout.dispatch.settlement import Settlement
from rollbook.rollout.dispatch.slots import StalenessController
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.metrics import reward_names
from rollbook.rollout.workers.pool import WorkerPool
from rollbook.rollout.workers.spec import WorkerSpec
from rollbook.telemetry.cpu_time import record_cpu_time
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.telemetry.spans import SpanRecorder

OPEN_WAIT_S = 20.0
"""How long the ledger may hold a request while the gate is closed. It responds as soon as it can grant a group."""
EMPTY_PAUSE_S = 0.05
"""Pause after a response without grants, in case the ledger does not hold requests."""
MAX_EMPTY_PAUSE_S = 5.0
"""The pause doubles up to this: when all proposed tasks are in quarantine, each request drops their draws."""
TICK_S = 1.0
SUBMITTERS = 8
"""Concurrent submissions: enough to hide the ledger's latency, few enough not to overload it."""
FINAL_WAIT_S = 2.0
"""When the run is over: how long to wait for submissions in progress, so that they are counted."""


OPERATOR_GATES = {
    GateState.PAUSED: "an operator paused admission",
    GateState.DRAINING: "an operator drains the run",
}


class Dispatcher:
    def __init__(
        self,
        *,
        name: str,
        tasks: TaskSource,
        sink: GroupSink,
        spec: WorkerSpec,
        rule: FreshnessRule,
        log: EventLog,
        metrics: MetricRecorder,
        spans: SpanRecorder,
        clock: Clock | None = None,
        max_attempts: int | None = None,
        until_served: Callable[[], Awaitable[None]] | None = None,
        log_hint: str = "the events rollout.group_failed and rollout.worker_output in the run's logs",
    ) -> None:
        """`until_served` waits until a policy server has weights."""
        self._name = name
        self._tasks = tasks
        self._sink = sink
        self._config = config = spec.config
        self._log = log
        self._metrics = metrics
        self._spans = spans
        self._clock = clock or SystemClock()
        self._slots = StalenessController(rule, slots=config.slots)
        self._monitor = DispatchMonitor(config, self._slots, metrics=metrics, log=log, clock=self._clock)
        self._pool = WorkerPool(spec, listener=self, log=log, clock=self._clock)
        self._follower = OutcomeFollower(tasks, sink)
        self._settlement = Settlement(
            sink=sink,
            tasks=tasks,
            pool=self._pool,
            slots=self._slots,
            follower=self._follower,
            monitor=self._monitor,
            reporter=GroupReporter(
                metrics=metrics,
                spans=spans,
                log=log,
                breaker=FailureBreaker(log_hint=log_hint),
                rewards=reward_names(config),
            ),
            log=log,
            clock=self._clock,
            # With batch policy `parts`, a slot holds at most one attempt for each sample of a group.
            max_waiting=config.slots * rule.unit,
            max_attempts=max_attempts,
            compares_samples=config.rewards.see_groups,
        )
        self._until_served = until_served
        self._is_served = until_served is None
        """False: no group is opened before `until_served` returns."""
        self.has_joined = False
        """The ledger knows this dispatcher."""
        self._is_run_over = False
        self._is_leaving = False
        self._ending = asyncio.Event()
        """Set when the run is over, or by `leave`: no more groups are opened."""

    @property
    def doing(self) -> str:
        """What it does or waits for, in words."""
        num_playing = len(self._settlement)
        if not self._pool.ready.is_set():
            return "starting workers"
        if self._is_leaving:
            return f"finishing {num_playing} groups, then leaving"
        if not self._is_served and not num_playing:
            return "waiting until a policy server has weights"
        if self._slots.gate in OPERATOR_GATES:
            return f"{OPERATOR_GATES[self._slots.gate]}; {num_playing} groups are being played"
        if num_playing:
            return f"playing {num_playing} groups"
        return "waiting for the ledger to admit groups (the first weights, or free capacity)"

    def leave(self) -> None:
        """Open no more groups. `run` returns when those that it plays are settled."""
        self._is_leaving = True
        self._ending.set()
        self._settlement.slot_freed.set()

    async def run(self) -> None:
        """Play until the ledger reports the end of the run, or after `leave`. Raises `RunError` where a person must act."""
        owner = await self._sink.join(self._name)
        self.has_joined = True
        self._tasks.rebuild(await self._sink.progress())
        if self._tasks.needs_history:
            await self._follower.update()
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(self._pool.run(), name="rollout.pool"),
                    group.create_task(self._heartbeat(owner), name="rollout.heartbeat"),
                    group.create_task(self._tick(), name="rollout.tick"),
                    group.create_task(
                        record_cpu_time(self._spans, "worker", lambda: self._pool.pids), name="rollout.cpu_time"
                    ),
                    *(group.create_task(self._settlement.run(), name=f"rollout.submit.{i}") for i in range(SUBMITTERS)),
                ]
                await self._keep_groups_in_flight(owner)
                while self._is_leaving and self._settlement and not self._is_run_over:
                    self._settlement.slot_freed.clear()
                    await self._settlement.slot_freed.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(FINAL_WAIT_S):
                        await self._settlement.flush()
                self._log.info("rollout.run_ended", unfinished_groups=len(self._settlement))
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as errors:
            # A `RunError` ends the run, so it is the error to report.
            raise first_error(errors, prefer=RunError) from errors
        finally:
            for attempt in self._settlement:
                attempt.timer.cancel()
            self._record_metrics()

    async def _keep_groups_in_flight(self, owner: OwnerId) -> None:
        """Open groups whenever a slot is free.

        Takes:  draws, from the task source.
        Gives:  orders, to the pool.
        Waits:  for a ready worker, then for a free slot, for a policy server with weights, and in the ledger for the gate.
        Woken:  by the settlement through `slot_freed`; at the end through `self._ending`.
        Ends:   when the run is over, or after `leave`.
        """
        await self._pool.ready.wait()
        is_exhaustion_reported = False
        pause_s = EMPTY_PAUSE_S
        while True:
            while not self._ending.is_set() and self._slots.to_propose == 0:
                self._settlement.slot_freed.clear()
                await self._settlement.slot_freed.wait()
            if not self._ending.is_set() and not self._is_served and self._until_served is not None:
                await self._wait_until_served(self._until_served)
            if self._ending.is_set():
                return
            count = self._slots.to_propose
            draws = self._tasks.propose(count)
            if self._tasks.is_exhausted and not is_exhaustion_reported:
                await self._sink.exhausted()
                is_exhaustion_reported = True
            reply = await self._open(owner, draws, count)
            if reply.gate is GateState.ENDED:
                return
            if reply.grants:
                pause_s = EMPTY_PAUSE_S
                continue
            if reply.taken > reply.quarantined:
                # Other dispatchers have opened these draws. Continue where they are: a dispatcher that joins a long run, or
                # is slower than the others, would never get there draw by draw.
                self._tasks.catch_up(await self._sink.progress())
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_EMPTY_PAUSE_S) if reply.quarantined else EMPTY_PAUSE_S

    async def _wait_until_served(self, until_served: Callable[[], Awaitable[None]]) -> None:
        """Wait until a policy server has weights, or until this dispatcher ends."""

        async def wait_for_weights() -> None:
            await until_served()
            self._is_served = True

        async with asyncio.TaskGroup() as group:
            waits = (
                group.create_task(wait_for_weights(), name="rollout.until_served"),
                group.create_task(self._ending.wait(), name="rollout.ending"),
            )
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _open(self, owner: OwnerId, draws: Sequence[Draw], count: int) -> OpenReply:
        reply = await self._sink.open(owner, draws, limit=count, wait_s=OPEN_WAIT_S)
        self._tasks.taken(reply.taken)
        granted = {grant.position for grant in reply.grants}
        for draw in draws[: reply.taken]:
            if draw.position not in granted:
                # Another dispatcher plays it, or it was opened before: the task source must not wait for it.
                self._tasks.observe(group_id(draw.task_id, draw.number), draw.position, None)
        self._slots.opened(reply)
        for grant in reply.grants:
            self._start(grant, await self._first_part(grant))
        return reply

    async def _first_part(self, grant: Grant) -> bytes | None:
        """The stored first part, if reward functions of groups compare later samples with it."""
        if grant.part.number == 1 or not self._config.rewards.see_groups:
            return None
        try:
            return await self._sink.payload(group_id(grant.task_id, grant.draw))
        except NotFoundError:
            return None

    def _start(self, grant: Grant, first_part: bytes | None) -> None:
        self._settlement.begin(
            Attempt(
                grant=grant,
                started=self._clock.now(),
                started_wall=self._clock.wall(),
                timer=asyncio.get_running_loop().call_later(grant.deadline_s, self._expire, grant),
            )
        )
        self._pool.play(
            GroupOrder(
                group_id=grant.group_id,
                attempt=grant.attempt,
                task_id=grant.task_id,
                draw=grant.draw,
                row=self._tasks.task(grant.task_id).row,
                min_publication=grant.admission_publication,
                deadline_s=grant.deadline_s,
                part=grant.part.number,
                num_samples=grant.part.num_samples,
                baseline=grant.part.baseline,
                first_part=first_part,
            )
        )

    def group_played(self, played: PlayedPart) -> None:
        self._settlement.add((played.order_id, played.encoded.attempt), played)

    def group_lost(self, order: GroupOrder, cause: str) -> None:
        self._settlement.add((order.group_id, order.attempt), Lost(cause))

    def worker_died(self, cause: str) -> None:
        self._metrics.add("rollout/worker_deaths", 1)

    def _expire(self, grant: Grant) -> None:
        # Its policy server may have lost its weights.
        self._is_served = self._until_served is None
        self._pool.cancel(grant.group_id, grant.attempt, is_late=True)
        self._settlement.add((grant.group_id, grant.attempt), Lost("deadline"))

    async def _heartbeat(self, owner: OwnerId) -> None:
        """Renew this owner's lease and read the run's status. Ends: when the run is over."""
        while True:
            await self._clock.sleep(self._config.heartbeat_s)
            await self._sink.heartbeat(owner)
            status = await self._sink.status()
            self._slots.update(status)
            await self._monitor.audit_selection(self._sink, status)
            if self._tasks.needs_history:
                await self._follower.update()
            if status.ended:
                self._is_run_over = True
                self._ending.set()
                self._settlement.slot_freed.set()
                return

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            self._record_metrics()

    def _record_metrics(self) -> None:
        for name, value in (
            ("async/in_flight", len(self._settlement)),
            ("async/staleness_capacity", self._slots.capacity),
            ("rollout/accepted_groups", self._slots.accepted),
            ("rollout/rejected_groups", self._slots.rejected),
            ("rollout/concurrency_limit", self._slots.limit),
            ("rollout/worker_loop_lag", self._pool.loop_lag_s),
            ("rollout/continued_requests", self._pool.continued),
        ):
            self._metrics.add(name, value)
        self._metrics.tick()
