"""`Dispatcher`: requests groups from the ledger, plays them in worker processes, and stores their results.

The ledger holds all progress: a group that this process loses is granted again. So nothing is saved here, and a stop releases
nothing: the next dispatcher that joins under the same name takes over. Requests are not retried here either: the ledger's client
retries within one budget; when that is spent, this process ends and the supervisor decides.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.exception_groups import first_error
from rollbook.contracts.admission import GateState, Grant, OpenReply, OwnerId, Receipt
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import FreshnessRule
from rollbook.contracts.group import DropKind, DropReason, GroupId, group_id
from rollbook.contracts.group_checks import UnusableGroupError
from rollbook.contracts.ports import GroupSink, TaskSource
from rollbook.contracts.task import Draw
from rollbook.rollout.dispatch.failure_breaker import FailureBreaker
from rollbook.rollout.dispatch.monitor import DispatchMonitor
from rollbook.rollout.dispatch.reporter import GroupReporter
from rollbook.rollout.dispatch.slots import StalenessController
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.metrics import reward_names
from rollbook.rollout.workers.messages import Finished
from rollbook.rollout.workers.pool import WorkerPool
from rollbook.rollout.workers.spec import WorkerSpec
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.telemetry.spans import SpanRecorder

OPEN_WAIT_S = 20.0
"""How long the ledger may hold a request while the gate is closed. It responds as soon as it can grant a group."""
EMPTY_PAUSE_S = 0.05
"""Pause after a response without grants, in case the ledger does not hold requests."""
TICK_S = 1.0
SUBMITTERS = 8
"""Concurrent submissions: enough to hide the ledger's latency, few enough not to overload it."""
HISTORY_PAGE = 1000
"""Past draws in one response: some hundred kilobytes."""
FINAL_WAIT_S = 2.0
"""When the run is over: how long to wait for submissions in progress, so that they are counted."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """One grant being played. It ends once: finished, lost, or timed out."""

    grant: Grant
    started: float
    started_wall: float
    timer: asyncio.TimerHandle
    has_ended: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return (self.grant.group_id, self.grant.attempt)


@dataclass(frozen=True, slots=True)
class _EndedAttempt:
    """A result, or the cause why there is none."""

    attempt: _Attempt
    result: Finished | None = None
    cause: str = ""


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
        log_hint: str = "the events rollout.group_failed and rollout.worker_output in the run's logs",
    ) -> None:
        self._name = name
        self._tasks = tasks
        self._sink = sink
        self._config = config = spec.config
        self._log = log
        self._metrics = metrics
        self._clock = clock or SystemClock()
        self._slots = StalenessController(rule, slots=config.slots)
        self._reporter = GroupReporter(
            metrics=metrics,
            spans=spans,
            log=log,
            breaker=FailureBreaker(log_hint=log_hint),
            rewards=reward_names(config),
        )
        self._monitor = DispatchMonitor(config, self._slots, metrics=metrics, log=log, clock=self._clock)
        self._pool = WorkerPool(spec, listener=self, log=log, clock=self._clock)
        self._attempts: dict[tuple[str, int], _Attempt] = {}
        # An attempt ends once and keeps its slot until the ledger has settled it, so the queue never exceeds the slots.
        self._ended: asyncio.Queue[_EndedAttempt] = asyncio.Queue(maxsize=config.slots)
        self._slot_freed = asyncio.Event()
        self._max_attempts = max_attempts
        self._failed_attempts: Counter[GroupId] = Counter()
        self._is_run_over = False

    @property
    def doing(self) -> str:
        """What it does or waits for, in words."""
        if not self._pool.ready.is_set():
            return "starting workers"
        if self._attempts:
            return f"playing {len(self._attempts)} groups"
        return "waiting for the ledger to admit groups (the first weights, or free capacity)"

    async def run(self) -> None:
        """Play until the ledger reports the end of the run. Raises `RunError` where a person must act."""
        owner = await self._sink.join(self._name)
        self._tasks.rebuild(await self._sink.progress())
        if self._tasks.needs_history:
            await self._replay_history()
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(self._pool.run(), name="rollout.pool"),
                    group.create_task(self._heartbeat(owner), name="rollout.heartbeat"),
                    group.create_task(self._tick(), name="rollout.tick"),
                    *(
                        group.create_task(self._settle_attempts(), name=f"rollout.submit.{i}")
                        for i in range(SUBMITTERS)
                    ),
                ]
                await self._keep_groups_in_flight(owner)
                with suppress(TimeoutError):
                    async with asyncio.timeout(FINAL_WAIT_S):
                        await self._ended.join()
                self._log.info("rollout.run_ended", unfinished_groups=len(self._attempts))
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as errors:
            # A `RunError` ends the run, so it is the error to report.
            raise first_error(errors, prefer=RunError) from errors
        finally:
            for attempt in self._attempts.values():
                attempt.timer.cancel()
            self._record_metrics()

    async def _replay_history(self) -> None:
        """Pass past draws to the task source page by page, so that a long history is never in memory at once."""
        after = -1
        while past := await self._sink.outcomes(after=after, limit=HISTORY_PAGE):
            self._tasks.recall(past)
            after = past[-1].sequence

    async def _keep_groups_in_flight(self, owner: OwnerId) -> None:
        """Open groups whenever a slot is free.

        Takes:  draws, from the task source.
        Gives:  orders, to the pool.
        Waits:  for a ready worker, then for a free slot, then in the ledger for the gate.
        Woken:  by `_remove` through `self._slot_freed`.
        Ends:   when the run is over.
        """
        await self._pool.ready.wait()
        is_exhaustion_reported = False
        while True:
            while not self._is_run_over and self._slots.to_propose == 0:
                self._slot_freed.clear()
                await self._slot_freed.wait()
            if self._is_run_over:
                return
            count = self._slots.to_propose
            draws = self._tasks.propose(count)
            if self._tasks.is_exhausted and not is_exhaustion_reported:
                await self._sink.exhausted()
                is_exhaustion_reported = True
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
                # Another dispatcher plays it, or it was opened before: the task source must not wait for it.
                self._tasks.observe(group_id(draw.task_id, draw.number), draw.position, None)
        self._slots.opened(reply)
        for grant in reply.grants:
            self._start(grant)
        return reply

    def _start(self, grant: Grant) -> None:
        for older in [a for a in self._attempts.values() if a.grant.group_id == grant.group_id]:
            # The ledger has given up the older attempt, so its result would be ignored.
            if not older.has_ended:
                self._pool.cancel(*older.key)
                self._remove(older)
                self._slots.released()
        attempt = _Attempt(
            grant=grant,
            started=self._clock.now(),
            started_wall=self._clock.wall(),
            timer=asyncio.get_running_loop().call_later(grant.deadline_s, self._expire, grant),
        )
        self._attempts[attempt.key] = attempt
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

    def group_finished(self, order: GroupOrder, finished: Finished) -> None:
        self._end(order.group_id, order.attempt, result=finished)

    def group_lost(self, order: GroupOrder, cause: str) -> None:
        self._end(order.group_id, order.attempt, cause=cause)

    def worker_died(self, cause: str) -> None:
        self._metrics.add("rollout/worker_deaths", 1)

    def _expire(self, grant: Grant) -> None:
        self._pool.cancel(grant.group_id, grant.attempt, is_late=True)
        self._end(grant.group_id, grant.attempt, cause="deadline")

    def _end(self, group: GroupId, number: int, *, result: Finished | None = None, cause: str = "") -> None:
        attempt = self._attempts.get((group, number))
        if attempt is not None and not attempt.has_ended:
            attempt.has_ended = True
            attempt.timer.cancel()
            self._ended.put_nowait(_EndedAttempt(attempt, result, cause))

    async def _settle_attempts(self) -> None:
        """Report ended attempts to the ledger, one at a time.

        Takes:  ended attempts, from the pool's callbacks and the timers.
        Gives:  stored, closed and released groups, to the ledger; outcomes, to the task source.
        Waits:  for an ended attempt; then for the ledger.
        Ends:   on cancellation. Groups not stored by then are played again.
        """
        while True:
            ended = await self._ended.get()
            try:
                if ended.result is None:
                    await self._release(ended.attempt, ended.cause)
                else:
                    await self._settle(ended.attempt, ended.result)
            finally:
                self._ended.task_done()

    async def _release(self, attempt: _Attempt, cause: str) -> None:
        grant = attempt.grant
        self._metrics.add("rollout/groups_released", 1)
        self._log.info("rollout.group_released", group_id=grant.group_id, attempt=grant.attempt, cause=cause)
        await self._sink.release(grant.group_id, attempt=grant.attempt, cause=cause)
        self._monitor.group_released(grant, seconds=self._clock.now() - attempt.started)
        self._remove(attempt)
        self._slots.released()
        self._failed_attempts[grant.group_id] += 1
        if self._failed_attempts[grant.group_id] == self._max_attempts:
            # The ledger has dropped it and sends no message about it; the cursor would wait for it forever.
            self._tasks.observe(grant.group_id, grant.position, None)
            del self._failed_attempts[grant.group_id]

    async def _settle(self, attempt: _Attempt, result: Finished) -> None:
        grant = attempt.grant
        self._failed_attempts.pop(grant.group_id, None)
        result = await self._store(grant, result)
        seconds = self._clock.now() - attempt.started
        self._monitor.group_settled(grant, result, seconds=seconds)
        self._remove(attempt)
        self._slots.settled(is_accepted=result.drop is None)
        self._tasks.observe(grant.group_id, grant.position, result.outcome)
        # Last, because it may stop the run: everything else must be recorded before.
        self._reporter.report(grant, result, started_wall=attempt.started_wall, seconds=seconds)

    async def _store(self, grant: Grant, result: Finished) -> Finished:
        """Returns what was stored: a group that the trainer could not train is dropped as invalid."""
        receipt: Receipt | None = None
        if result.group is not None:
            try:
                receipt = await self._sink.submit(result.group, result.outcome, attempt=grant.attempt, drop=result.drop)
            except UnusableGroupError as error:
                result = _refused(result, str(error))
        if receipt is None:
            assert result.drop is not None
            receipt = await self._sink.close(grant.group_id, result.drop, outcome=result.outcome)
        if receipt is not Receipt.STORED:
            # Another attempt was faster, or an earlier try of this request arrived after all.
            self._log.info(
                "rollout.group_already_settled", group_id=grant.group_id, attempt=grant.attempt, receipt=receipt
            )
        return result

    def _remove(self, attempt: _Attempt) -> None:
        attempt.timer.cancel()
        self._attempts.pop(attempt.key, None)
        self._slot_freed.set()

    async def _heartbeat(self, owner: OwnerId) -> None:
        """Renew this owner's lease and read the run's status. Ends: when the run is over."""
        while True:
            await self._clock.sleep(self._config.heartbeat_s)
            await self._sink.heartbeat(owner)
            status = await self._sink.status()
            self._slots.update(status)
            await self._monitor.audit_selection(self._sink, status)
            if status.ended:
                self._is_run_over = True
                self._slot_freed.set()
                return

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            self._record_metrics()

    def _record_metrics(self) -> None:
        for name, value in (
            ("async/in_flight", len(self._attempts)),
            ("async/staleness_capacity", self._slots.capacity),
            ("rollout/accepted_groups", self._slots.accepted),
            ("rollout/rejected_groups", self._slots.rejected),
            ("rollout/concurrency_limit", self._slots.limit),
            ("rollout/worker_loop_lag", self._pool.loop_lag_s),
            ("rollout/continued_requests", self._pool.continued),
        ):
            self._metrics.add(name, value)
        self._metrics.tick()


def _refused(result: Finished, cause: str) -> Finished:
    """The result as a failure, so that a run whose groups are all refused stops with the cause."""
    outcome = replace(result.outcome, invalid_causes={**result.outcome.invalid_causes, cause: 1})
    return msgspec.structs.replace(result, group=None, drop=DropReason(DropKind.INVALID, cause), outcome=outcome)
