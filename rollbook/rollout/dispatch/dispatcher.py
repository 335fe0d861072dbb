"""`Dispatcher`: requests groups from the ledger, plays them in worker processes, and stores their results.

The ledger holds all progress: a group that this process loses is granted again. So nothing is saved here, and a stop releases
nothing: the next dispatcher that joins under the same name takes over. Requests are not retried here either: the ledger's client
retries within one budget; when that is spent, this process ends and the supervisor decides.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.exception_groups import first_error
from rollbook.contracts.admission import GateState, Grant, OpenReply, OwnerId, PartReceipt, Receipt
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import FreshnessRule
from rollbook.contracts.group import DropKind, DropReason, GroupId, group_id
from rollbook.contracts.group_checks import UnusableGroupError
from rollbook.contracts.ports import GroupSink, TaskSource
from rollbook.contracts.task import Draw
from rollbook.rollout.dispatch.attempts import Attempt, Lost
from rollbook.rollout.dispatch.failure_breaker import FailureBreaker
from rollbook.rollout.dispatch.monitor import DispatchMonitor
from rollbook.rollout.dispatch.outcome_follower import OutcomeFollower
from rollbook.rollout.dispatch.reporter import GroupReporter
from rollbook.rollout.dispatch.slots import StalenessController
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.metrics import reward_names
from rollbook.rollout.workers.messages import Finished
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
        self._reporter = GroupReporter(
            metrics=metrics,
            spans=spans,
            log=log,
            breaker=FailureBreaker(log_hint=log_hint),
            rewards=reward_names(config),
        )
        self._monitor = DispatchMonitor(config, self._slots, metrics=metrics, log=log, clock=self._clock)
        self._pool = WorkerPool(spec, listener=self, log=log, clock=self._clock)
        self._attempts: dict[tuple[str, int], Attempt] = {}
        # An attempt is at most once in this queue and keeps its slot until the ledger has settled it, so the queue never exceeds
        # the slots; with batch policy `parts`, a slot holds at most one attempt for each sample of a group.
        self._with_results: asyncio.Queue[Attempt] = asyncio.Queue(maxsize=config.slots * rule.unit)
        self._slot_freed = asyncio.Event()
        self._max_attempts = max_attempts
        self._until_served = until_served
        self._is_served = until_served is None
        """False: no group is opened before `until_served` returns."""
        self._follower = OutcomeFollower(tasks, sink)
        self._failed_attempts: Counter[GroupId] = Counter()
        self._is_run_over = False
        self._is_leaving = False
        self._ending = asyncio.Event()
        """Set when the run is over, or by `leave`: no further group is opened."""

    @property
    def doing(self) -> str:
        """What it does or waits for, in words."""
        if not self._pool.ready.is_set():
            return "starting workers"
        if self._is_leaving:
            return f"finishing {len(self._attempts)} groups, then leaving"
        if not self._is_served and not self._attempts:
            return "waiting until a policy server has weights"
        if self._slots.gate in OPERATOR_GATES:
            return f"{OPERATOR_GATES[self._slots.gate]}; {len(self._attempts)} groups are being played"
        if self._attempts:
            return f"playing {len(self._attempts)} groups"
        return "waiting for the ledger to admit groups (the first weights, or free capacity)"

    def leave(self) -> None:
        """Open no more groups. `run` returns when those that it plays are settled."""
        self._is_leaving = True
        self._ending.set()
        self._slot_freed.set()

    async def run(self) -> None:
        """Play until the ledger reports the end of the run, or after `leave`. Raises `RunError` where a person must act."""
        owner = await self._sink.join(self._name)
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
                    *(
                        group.create_task(self._settle_attempts(), name=f"rollout.submit.{i}")
                        for i in range(SUBMITTERS)
                    ),
                ]
                await self._keep_groups_in_flight(owner)
                while self._is_leaving and self._attempts and not self._is_run_over:
                    self._slot_freed.clear()
                    await self._slot_freed.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(FINAL_WAIT_S):
                        await self._with_results.join()
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

    async def _keep_groups_in_flight(self, owner: OwnerId) -> None:
        """Open groups whenever a slot is free.

        Takes:  draws, from the task source.
        Gives:  orders, to the pool.
        Waits:  for a ready worker, then for a free slot, for a policy server with weights, and in the ledger for the gate.
        Woken:  by `_remove` through `self._slot_freed`; at the end through `self._ending`.
        Ends:   when the run is over, or after `leave`.
        """
        await self._pool.ready.wait()
        is_exhaustion_reported = False
        pause_s = EMPTY_PAUSE_S
        while True:
            while not self._ending.is_set() and self._slots.to_propose == 0:
                self._slot_freed.clear()
                await self._slot_freed.wait()
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
            self._start(grant)
        return reply

    def _start(self, grant: Grant) -> None:
        draw_id = group_id(grant.task_id, grant.draw)
        for older in [a for a in self._attempts.values() if a.draw_id == draw_id]:
            # The ledger has given up the older attempt, so its result would be ignored.
            if not older.has_ended:
                self._abandon(older)
        attempt = Attempt(
            grant=grant,
            started=self._clock.now(),
            started_wall=self._clock.wall(),
            timer=asyncio.get_running_loop().call_later(grant.deadline_s, self._expire, grant),
        )
        self._attempts[attempt.key] = attempt
        self._follower.started(draw_id)
        self._pool.play(
            GroupOrder(
                group_id=grant.group_id,
                attempt=grant.attempt,
                task_id=grant.task_id,
                draw=grant.draw,
                row=self._tasks.task(grant.task_id).row,
                min_publication=grant.admission_publication,
                deadline_s=grant.deadline_s,
                part=grant.part,
            )
        )

    def group_finished(self, order: GroupOrder, finished: Finished) -> None:
        self._add_result(order.group_id, order.attempt, finished)

    def group_lost(self, order: GroupOrder, cause: str) -> None:
        self._add_result(order.group_id, order.attempt, Lost(cause))

    def worker_died(self, cause: str) -> None:
        self._metrics.add("rollout/worker_deaths", 1)

    def _expire(self, grant: Grant) -> None:
        # Its policy server may have lost its weights.
        self._is_served = self._until_served is None
        self._pool.cancel(grant.group_id, grant.attempt, is_late=True)
        self._add_result(grant.group_id, grant.attempt, Lost("deadline"))

    def _add_result(self, group: GroupId, number: int, result: Finished | Lost) -> None:
        attempt = self._attempts.get((group, number))
        if attempt is None or attempt.has_ended:
            return
        if isinstance(result, Lost) or result.is_last:
            attempt.has_ended = True
            attempt.timer.cancel()
        attempt.results.append(result)
        if not attempt.is_queued:
            attempt.is_queued = True
            self._with_results.put_nowait(attempt)

    async def _settle_attempts(self) -> None:
        """Report results to the ledger: one attempt at a time, its parts in order.

        Takes:  attempts with results, from the pool's callbacks and the timers.
        Gives:  stored, closed and released groups, to the ledger; outcomes, to the task source.
        Waits:  for an attempt; then for the ledger.
        Ends:   on cancellation. Groups not stored by then are played again.
        """
        while True:
            attempt = await self._with_results.get()
            try:
                while attempt.results:
                    result = attempt.results.popleft()
                    if isinstance(result, Lost):
                        await self._release(attempt, result.cause)
                    elif attempt.grant.part is None:
                        await self._settle(attempt, result)
                    else:
                        await self._settle_part(attempt, result)
            finally:
                attempt.is_queued = False
                self._with_results.task_done()

    async def _release(self, attempt: Attempt, cause: str) -> None:
        grant, played = attempt.grant, attempt.open_id
        self._metrics.add("rollout/groups_released", 1)
        self._log.info("rollout.group_released", group_id=played, attempt=grant.attempt, cause=cause)
        await self._sink.release(played, attempt=grant.attempt, cause=cause)
        self._monitor.group_released(attempt.draw_id, seconds=self._clock.now() - attempt.started)
        self._remove(attempt)
        self._failed_attempts[attempt.draw_id] += 1
        if self._failed_attempts[attempt.draw_id] == self._max_attempts:
            # The ledger has dropped it and sends no message about it; the cursor would wait for it forever.
            self._tasks.observe(attempt.draw_id, grant.position, attempt.outcome)
            del self._failed_attempts[attempt.draw_id]
        else:
            self._follower.released(attempt.draw_id)

    async def _settle(self, attempt: Attempt, result: Finished) -> None:
        result = await self._store(attempt.grant, result)
        attempt.add_outcome(result.outcome)
        self._slots.count(is_accepted=result.drop is None)
        self._finish(attempt, result)

    async def _settle_part(self, attempt: Attempt, result: Finished) -> None:
        """Store a part. The attempt is over with its last part, or when the group lacks no sample any more."""
        result, reply = await self._store_part(attempt, result)
        if attempt.is_abandoned:
            return
        attempt.add_outcome(result.outcome)
        if not attempt.continues(result, reply):
            await self._give_way(attempt, reply)
            return
        self._slots.count(is_accepted=result.drop is None)
        if reply.next_part is not None and not result.is_last:
            self._slots.freed(attempt.units - reply.next_part.num_samples)
            attempt.open_part = reply.next_part
            self._slot_freed.set()
            self._report(attempt, result)
            return
        if reply.next_part is not None:
            reason = result.missing or DropReason(DropKind.INVALID, "the worker returned too few samples")
            await self._sink.close(reply.next_part.group_id, reason)
        self._finish(attempt, result)

    async def _store_part(self, attempt: Attempt, result: Finished) -> tuple[Finished, PartReceipt]:
        """Returns what was stored. A part that the trainer could not train closes the group: the rest would be refused too."""
        grant = attempt.grant
        if result.group is not None:
            try:
                reply = await self._sink.submit_part(
                    result.group, result.outcome, attempt=grant.attempt, drop=result.drop
                )
                return result, reply
            except UnusableGroupError as error:
                self._pool.cancel(*attempt.key)
                attempt.has_ended = True
                attempt.results.clear()
                result = msgspec.structs.replace(_refused(result, str(error)), is_last=True)
        assert result.drop is not None
        receipt = await self._sink.close(attempt.open_id, result.drop, outcome=result.outcome)
        return result, PartReceipt(receipt=receipt)

    async def _give_way(self, attempt: Attempt, reply: PartReceipt) -> None:
        """Another attempt has stored other samples: stop this one. What the group lacks then gets another attempt."""
        grant = attempt.grant
        self._log.info("rollout.attempt_superseded", group_id=attempt.draw_id, attempt=grant.attempt)
        self._abandon(attempt)
        if reply.next_part is None:
            self._tasks.observe(attempt.draw_id, grant.position, attempt.outcome)
        else:
            self._follower.released(attempt.draw_id)
            # Without effect if the open part belongs to the other attempt.
            await self._sink.release(
                reply.next_part.group_id, attempt=grant.attempt, cause="another attempt was stored first"
            )

    def _abandon(self, attempt: Attempt) -> None:
        attempt.is_abandoned = attempt.has_ended = True
        attempt.results.clear()
        self._pool.cancel(*attempt.key)
        self._remove(attempt)

    def _finish(self, attempt: Attempt, result: Finished) -> None:
        """The draw is settled."""
        grant, outcome = attempt.grant, attempt.outcome
        assert outcome is not None
        self._failed_attempts.pop(attempt.draw_id, None)
        seconds = self._clock.now() - attempt.started
        self._monitor.group_settled(attempt.draw_id, outcome, result.drop, seconds=seconds)
        if grant.part is not None:
            self._metrics.add("rollout/parts_per_group", attempt.num_parts)
        self._remove(attempt)
        self._tasks.observe(attempt.draw_id, grant.position, outcome)
        # Last, because it may stop the run: everything else must be recorded before.
        self._report(attempt, result, is_over=True)

    def _report(self, attempt: Attempt, result: Finished, *, is_over: bool = False) -> None:
        seconds = self._clock.now() - attempt.started
        self._reporter.report(attempt, result, seconds=seconds, is_over=is_over)

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

    def _remove(self, attempt: Attempt) -> None:
        attempt.timer.cancel()
        self._attempts.pop(attempt.key, None)
        self._slots.freed(attempt.units)
        self._slot_freed.set()

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
