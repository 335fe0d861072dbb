"""`Settlement`: reports the results of attempts to the ledger, and ends the attempts.

Parts of an attempt are reported one after the other; several attempts are reported concurrently.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import PartReceipt, Receipt
from rollbook.contracts.errors import NotFoundError
from rollbook.contracts.group import DropKind, DropReason, GroupId
from rollbook.contracts.group_checks import UnusableGroupError
from rollbook.contracts.ports import GroupSink, TaskSource
from rollbook.rollout.dispatch.attempts import AfterPart, Attempt, Lost, refused
from rollbook.rollout.dispatch.monitor import DispatchMonitor
from rollbook.rollout.dispatch.outcome_follower import OutcomeFollower
from rollbook.rollout.dispatch.reporter import GroupReporter
from rollbook.rollout.dispatch.slots import StalenessController
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.workers.pool import WorkerPool
from rollbook.telemetry.events import EventLog


class Settlement:
    def __init__(
        self,
        *,
        sink: GroupSink,
        tasks: TaskSource,
        pool: WorkerPool,
        slots: StalenessController,
        follower: OutcomeFollower,
        monitor: DispatchMonitor,
        reporter: GroupReporter,
        log: EventLog,
        clock: Clock,
        max_waiting: int,
        max_attempts: int | None,
        compares_samples: bool = False,
    ) -> None:
        """`compares_samples`: reward functions of groups compare later parts with the first one."""
        self._sink = sink
        self._tasks = tasks
        self._pool = pool
        self._slots = slots
        self._follower = follower
        self._monitor = monitor
        self._reporter = reporter
        self._log = log
        self._clock = clock
        self._max_attempts = max_attempts
        self._compares_samples = compares_samples
        self._attempts: dict[tuple[str, int], Attempt] = {}
        # An attempt is at most once in this queue and keeps its slot until the ledger has settled it.
        self._waiting: asyncio.Queue[Attempt] = asyncio.Queue(maxsize=max_waiting)
        self._failed_attempts: Counter[GroupId] = Counter()
        self.slot_freed = asyncio.Event()
        """Set whenever a slot, or a part of one, is freed."""

    def __len__(self) -> int:
        """Attempts that are not settled."""
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._attempts.values()))

    def begin(self, attempt: Attempt) -> None:
        for older in self:
            # The ledger has given up the older attempt, so its result would be ignored.
            if older.draw_id == attempt.draw_id and not older.has_ended:
                self._abandon(older)
        self._attempts[attempt.key] = attempt
        self._follower.started(attempt.draw_id)

    def add(self, key: tuple[str, int], result: PlayedPart | Lost) -> None:
        """A result to report. That of an attempt that has ended is ignored."""
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.add(result):
            self._waiting.put_nowait(attempt)

    async def run(self) -> None:
        """Report results to the ledger: one attempt at a time, its parts in order.

        Takes:  attempts with results, from the pool's callbacks and the timers.
        Gives:  stored, closed and released groups, to the ledger; outcomes, to the task source.
        Waits:  for an attempt; then for the ledger.
        Ends:   on cancellation. Groups not stored by then are played again.
        """
        while True:
            attempt = await self._waiting.get()
            try:
                while attempt.results:
                    result = attempt.results.popleft()
                    if isinstance(result, Lost):
                        await self._release(attempt, result.cause)
                    else:
                        await self._settle(attempt, result)
            finally:
                attempt.is_queued = False
                self._waiting.task_done()

    async def flush(self) -> None:
        """Wait until all results so far are reported."""
        await self._waiting.join()

    async def _settle(self, attempt: Attempt, played: PlayedPart) -> None:
        played, reply = await self._store(attempt, played)
        if attempt.is_abandoned:
            return
        attempt.add_outcome(played.outcome)
        after = attempt.after(played, reply)
        if after is AfterPart.CONTINUE and not await self._is_quorum_stored(attempt, played, reply):
            after = AfterPart.GIVE_UP
        if after is AfterPart.GIVE_UP:
            await self._on_superseded(attempt, reply)
            return
        self._slots.count(is_accepted=played.drop is None)
        if reply.next_part is not None and after is AfterPart.CONTINUE:
            self._slots.freed(attempt.units - reply.next_part.units)
            attempt.open_part = reply.next_part
            self.slot_freed.set()
            self._report(attempt, played, is_over=False)
            return
        if reply.next_part is not None:
            reason = played.missing or DropReason(DropKind.INVALID, "the worker returned too few samples")
            await self._sink.close(reply.next_part.group_id, reason)
        self._finish(attempt, played)

    async def _is_quorum_stored(self, attempt: Attempt, played: PlayedPart, reply: PartReceipt) -> bool:
        """Whether the stored first part is that of this attempt. Another one may have the same rewards and other samples."""
        is_first = played.encoded.id == attempt.draw_id
        if not self._compares_samples or reply.receipt is Receipt.STORED or not is_first:
            return True
        try:
            return await self._sink.payload(played.encoded.id) == played.encoded.payload
        except NotFoundError:
            return False

    async def _store(self, attempt: Attempt, played: PlayedPart) -> tuple[PlayedPart, PartReceipt]:
        """Returns what was stored. A part that the trainer could not train closes the group: the rest would be refused too."""
        if played.encoded.payload:
            try:
                reply = await self._sink.submit(played.encoded)
            except UnusableGroupError as error:
                self._pool.cancel(*attempt.key)
                attempt.end()
                attempt.results.clear()
                played = refused(played, str(error))
            else:
                self._log_receipt(attempt, reply.receipt)
                return played, reply
        assert played.drop is not None
        receipt = await self._sink.close(attempt.open_part.group_id, played.drop, outcome=played.outcome)
        self._log_receipt(attempt, receipt)
        return played, PartReceipt(receipt=receipt)

    def _log_receipt(self, attempt: Attempt, receipt: Receipt) -> None:
        if receipt is not Receipt.STORED:
            # Another attempt was faster, or an earlier try of this request arrived after all.
            self._log.info(
                "rollout.group_already_settled",
                group_id=attempt.open_part.group_id,
                attempt=attempt.grant.attempt,
                receipt=receipt,
            )

    async def _release(self, attempt: Attempt, cause: str) -> None:
        grant, part = attempt.grant, attempt.open_part.group_id
        self._log.info("rollout.group_released", group_id=part, attempt=grant.attempt, cause=cause)
        await self._sink.release(part, attempt=grant.attempt, cause=cause)
        self._reporter.report_released()
        self._monitor.group_released(attempt.draw_id, seconds=self._clock.now() - attempt.started)
        self._remove(attempt)
        self._failed_attempts[attempt.draw_id] += 1
        if self._failed_attempts[attempt.draw_id] == self._max_attempts:
            # The ledger has dropped it and sends no message about it; the cursor would wait for it forever.
            self._tasks.observe(attempt.draw_id, grant.position, attempt.outcome)
            del self._failed_attempts[attempt.draw_id]
        else:
            self._follower.released(attempt.draw_id)

    async def _on_superseded(self, attempt: Attempt, reply: PartReceipt) -> None:
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
        attempt.abandon()
        self._pool.cancel(*attempt.key)
        self._remove(attempt)

    def _finish(self, attempt: Attempt, played: PlayedPart) -> None:
        """The draw is settled."""
        assert attempt.outcome is not None
        self._failed_attempts.pop(attempt.draw_id, None)
        seconds = self._clock.now() - attempt.started
        self._monitor.group_settled(attempt.draw_id, attempt.outcome, played.drop, seconds=seconds)
        self._remove(attempt)
        self._tasks.observe(attempt.draw_id, attempt.grant.position, attempt.outcome)
        # Last, because it may stop the run: everything else must be recorded before.
        self._report(attempt, played, is_over=True)

    def _report(self, attempt: Attempt, played: PlayedPart, *, is_over: bool) -> None:
        seconds = self._clock.now() - attempt.started
        self._reporter.report(attempt, played, seconds=seconds, is_over=is_over)

    def _remove(self, attempt: Attempt) -> None:
        attempt.timer.cancel()
        self._attempts.pop(attempt.key, None)
        self._slots.freed(attempt.units)
        self.slot_freed.set()
