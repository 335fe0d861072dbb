"""The ledger: every verb of a run, each one transaction of the rules. No HTTP and no SQL.

Takes calls from any number of tasks. Waiting calls (`open`, `batch`) look, and look again whenever a commit moved something in
their run. What happens because time passes is the timekeeper's.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import (
    DrawProgress,
    GateState,
    LedgerStatus,
    OpenReply,
    OwnerId,
    PastDraw,
    Receipt,
    RunId,
    RunSettings,
)
from rollbook.contracts.batch import AckReceipt, BatchManifest, EndOfRun, TrainerRole, TrainingBatch
from rollbook.contracts.errors import RollbookError, RunError
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome, GroupState, PromptGroup
from rollbook.contracts.group_codec import EncodedGroup, decode_payload
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import Draw
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.lease_expiry import Timekeeper
from rollbook.ledger.notifier import Bell
from rollbook.ledger.records import GroupRecord, MoveRecord, ProducerRecord, PublicationRecord, StepRecord
from rollbook.ledger.rules import batches, gate, groups, lineage, outcomes, producers, runs, trainer
from rollbook.ledger.rules.book import RunBook, find_run, opened_book
from rollbook.ledger.rules.groups import Submission
from rollbook.ledger.store import Store, Transaction
from rollbook.ledger.stores.sqlite.store import open_sqlite_store
from rollbook.telemetry.events import EventLog

T = TypeVar("T")

PAYLOADS_IN_ONE_READ = 8
BYTES_IN_ONE_READ = 4_000_000
"""Together they bound what a slow trainer keeps in the ledger's memory: no read goes on beyond either."""


class Ledger:
    """All runs of one store. Made by `open_ledger`."""

    def __init__(self, *, store: Store, config: LedgerConfig, clock: Clock, log: EventLog) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._log = log
        self._bell = Bell()
        self._is_waiting_allowed = True
        store.listen(self._bell.ring)

    # ------------------------------------------------------------------ runs

    async def create_run(self, run_id: RunId, settings: RunSettings) -> None:
        """Create a run, or go on with it under new settings. Groups per step, policy and staleness bound of a run never change."""
        if settings.rule.groups_per_step > self._config.max_queued_groups:
            raise RunError(
                f"run {run_id}: a step takes {settings.rule.groups_per_step} groups, but max_queued_groups is "
                f"{self._config.max_queued_groups}: no batch could ever be formed"
            )
        now = self._clock.wall()
        await self._store.write(lambda tx: runs.create_run(tx, run_id, settings, now=now))
        self._log.info("ledger.run_created", run=run_id)

    async def runs(self) -> list[RunId]:
        return await self._store.read(lambda tx: tx.runs())

    async def status(self, run_id: RunId) -> LedgerStatus:
        return await self._store.read(lambda tx: runs.status(tx, run_id))

    async def progress(self, run_id: RunId) -> DrawProgress:
        return await self._store.read(lambda tx: runs.progress(tx, run_id))

    async def outcomes(self, run_id: RunId, *, after: int, limit: int) -> list[PastDraw]:
        """A page of past draws, in order of admission."""
        return await self._store.read(lambda tx: outcomes.outcomes(tx, run_id, after=after, limit=limit))

    # ------------------------------------------------------------------ dispatchers

    async def join(self, run_id: RunId, owner_name: str, *, nonce: str | None = None) -> OwnerId:
        nonce = nonce or uuid.uuid4().hex
        owner = await self._write(run_id, lambda book: gate.join(book, owner_name, nonce))
        self._log.info("ledger.dispatcher_joined", run=run_id, owner=owner)
        return owner

    async def open(
        self,
        run_id: RunId,
        owner: OwnerId,
        draws: Sequence[Draw],
        *,
        limit: int,
        wait_s: float = 0.0,
        request_id: str | None = None,
    ) -> OpenReply:
        request_id = request_id or uuid.uuid4().hex
        until = self._clock.now() + wait_s
        while True:
            ticket = self._bell.ticket(run_id)
            reply, ttl_s = await self._write(
                run_id,
                lambda book: (
                    gate.open_groups(book, owner, draws, limit=limit, request_id=request_id),
                    book.run.settings.owner_ttl_s,
                ),
            )
            has_answer = reply.grants or reply.taken or reply.gate is GateState.ENDED
            # Whoever waits here is alive: look in often enough that the gate does not think otherwise.
            if has_answer or not await self._wait(ticket, until, at_most_s=ttl_s / 2):
                return reply

    async def heartbeat(self, run_id: RunId, owner: OwnerId) -> None:
        await self._write(run_id, lambda book: gate.heartbeat(book, owner))

    async def submit(
        self,
        run_id: RunId,
        group: EncodedGroup,
        outcome: GroupOutcome,
        *,
        attempt: int,
        drop: DropReason | None = None,
    ) -> Receipt:
        submission = Submission(
            group_id=group.id,
            task_id=group.task_id,
            draw=group.draw,
            attempt=attempt,
            publications=group.publications,
            outcome=outcome,
            payload=group.payload,
            payload_digest=group.digest,
            drop=drop,
        )
        return await self.submit_encoded(run_id, submission)

    async def submit_encoded(self, run_id: RunId, submission: Submission) -> Receipt:
        """Store a group as its producer encoded it."""
        most, most_bytes = self._config.max_queued_groups, int(self._config.max_queued_mb * 1_000_000)
        return await self._write(
            run_id, lambda book: groups.submit(book, submission, max_queued=most, max_queued_bytes=most_bytes)
        )

    async def submit_many_encoded(
        self, run_id: RunId, submissions: Sequence[Submission]
    ) -> list[Receipt | RollbookError]:
        """The same for several in one transaction. Each is judged by itself: a refused one keeps no other out."""
        most, most_bytes = self._config.max_queued_groups, int(self._config.max_queued_mb * 1_000_000)
        return await self._write(
            run_id, lambda book: groups.submit_many(book, submissions, max_queued=most, max_queued_bytes=most_bytes)
        )

    async def close(
        self, run_id: RunId, group_id: GroupId, reason: DropReason, *, outcome: GroupOutcome | None = None
    ) -> Receipt:
        return await self._write(run_id, lambda book: groups.close(book, group_id, reason, outcome=outcome))

    async def release(self, run_id: RunId, group_id: GroupId, *, attempt: int, cause: str) -> None:
        await self._write(run_id, lambda book: groups.release(book, group_id, attempt=attempt, cause=cause))
        self._log.info("ledger.group_released", run=run_id, group=group_id, attempt=attempt, cause=cause)

    async def register_producer(
        self, run_id: RunId, name: str, *, weight: float = 1.0, min_share: float = 0.0
    ) -> ProducerRecord:
        """Register somebody who sends groups unasked: its weight among the others, and the part of a batch it may count on."""
        record = await self._write(
            run_id, lambda book: producers.register_producer(book, name, weight=weight, min_share=min_share)
        )
        self._log.info("ledger.producer_registered", run=run_id, producer=name, weight=weight, min_share=min_share)
        return record

    async def producers(self, run_id: RunId) -> list[ProducerRecord]:
        return await self._look(run_id, lambda tx: tx.producers(run_id))

    async def exhausted(self, run_id: RunId) -> None:
        await self._write(run_id, groups.exhausted)

    # ------------------------------------------------------------------ trainer

    async def take_role(self, run_id: RunId, *, restored_step: int) -> TrainerRole:
        role = await self._write(run_id, lambda book: trainer.take_role(book, restored_step=restored_step))
        self._log.info("ledger.trainer_took_role", run=run_id, epoch=role.epoch, restored_step=restored_step)
        return role

    async def decide(self, run_id: RunId, step: int, *, epoch: int, wait_s: float) -> BatchManifest | EndOfRun | None:
        """The manifest of `step`. None: not enough groups within `wait_s`."""
        until = self._clock.now() + wait_s
        while True:
            ticket = self._bell.ticket(run_id)
            decision = await self._write(run_id, lambda book: batches.decide(book, step, epoch=epoch))
            if decision.num_stale:
                self._log.info("ledger.stale_dropped", run=run_id, step=step, groups=decision.num_stale)
            if decision.is_new and decision.manifest is not None:
                num_groups = len(decision.manifest.entries)
                self._log.info("ledger.batch_decided", run=run_id, step=step, groups=num_groups)
            answer = decision.manifest or decision.end
            if answer is not None or not await self._wait(ticket, until):
                return answer

    async def payloads(self, run_id: RunId, manifest: BatchManifest) -> AsyncIterator[bytes]:
        """The stored bytes of a batch's groups, in the manifest's order, a few at a time."""
        left = [entry.group_id for entry in manifest.entries]
        while left:
            some = left[:PAYLOADS_IN_ONE_READ]
            found = await self._store.read(lambda tx, some=some: _payloads(tx, run_id, some))  # type: ignore[misc]
            left = left[len(found) :]
            # Each is let go before the next is handed out: a reader that takes its time holds one of them, not all.
            found.reverse()
            while found:
                yield found.pop()

    async def batch(self, run_id: RunId, step: int, *, epoch: int, wait_s: float) -> TrainingBatch | EndOfRun | None:
        decided = await self.decide(run_id, step, epoch=epoch, wait_s=wait_s)
        if not isinstance(decided, BatchManifest):
            return decided
        payloads = [payload async for payload in self.payloads(run_id, decided)]
        stored = (decode_payload(body, entry.group_id) for entry, body in zip(decided.entries, payloads, strict=True))
        return TrainingBatch(manifest=decided, groups=tuple(stored))

    async def acknowledge(self, run_id: RunId, step: int, weights_digest: str, *, epoch: int) -> AckReceipt:
        receipt = await self._write(run_id, lambda book: trainer.acknowledge(book, step, weights_digest, epoch=epoch))
        if receipt is AckReceipt.DIVERGED:
            self._log.warning("ledger.diverged", run=run_id, step=step, epoch=epoch, digest=weights_digest)
        else:
            self._log.info("ledger.step_acknowledged", run=run_id, step=step, epoch=epoch, receipt=receipt)
        return receipt

    async def register(self, run_id: RunId, step: int, weights_digest: str, *, epoch: int) -> Publication:
        return await self._write(run_id, lambda book: lineage.register(book, step, weights_digest, epoch=epoch))

    async def confirm(self, run_id: RunId, publication: Publication, *, epoch: int) -> None:
        await self._write(run_id, lambda book: lineage.confirm(book, publication, epoch=epoch))
        self._log.info("ledger.publication_confirmed", run=run_id, publication=publication.id, step=publication.step)

    async def checkpointed(self, run_id: RunId, step: int, *, oldest_kept: int, epoch: int) -> None:
        gone = await self._write(
            run_id, lambda book: trainer.checkpointed(book, step, oldest_kept=oldest_kept, epoch=epoch)
        )
        self._log.info("ledger.checkpointed", run=run_id, step=step, oldest_kept=oldest_kept, payloads_gone=gone)

    async def finish(self, run_id: RunId, reason: EndOfRun, *, epoch: int) -> None:
        await self._write(run_id, lambda book: trainer.finish(book, reason, epoch=epoch))
        self._log.info("ledger.run_finished", run=run_id, reason=reason)

    # ------------------------------------------------------------------ looking

    async def groups(
        self, run_id: RunId, state: GroupState | None = None, *, limit: int = 100, offset: int = 0
    ) -> list[GroupRecord]:
        return await self._look(run_id, lambda tx: tx.groups(run_id, state, limit, offset))

    async def group(self, run_id: RunId, group_id: GroupId) -> tuple[GroupRecord, PromptGroup | None]:
        """What is known of a group, and its samples unless its payload is gone or never came."""
        record, payload = await self._look(
            run_id, lambda tx: (tx.group(run_id, group_id), tx.payload(run_id, group_id))
        )
        if record is None:
            raise RunError(f"run {run_id}: there is no group {group_id}")
        return record, None if payload is None else decode_payload(payload, group_id)

    async def history(self, run_id: RunId, group_id: GroupId) -> list[MoveRecord]:
        return await self._look(run_id, lambda tx: tx.moves(run_id, group_id))

    async def batch_manifest(self, run_id: RunId, step: int) -> BatchManifest | None:
        record = await self._look(run_id, lambda tx: tx.batch(run_id, step))
        return None if record is None else record.manifest

    async def steps(self, run_id: RunId) -> list[StepRecord]:
        return await self._look(run_id, lambda tx: tx.steps(run_id))

    async def publications(self, run_id: RunId) -> list[PublicationRecord]:
        return await self._look(run_id, lambda tx: tx.publications(run_id))

    async def statuses(self, run_id: RunId, *, quiet_s: float) -> AsyncIterator[LedgerStatus | None]:
        """The status now and after whatever moves, until the service closes. None after `quiet_s` in which nothing did.

        Moves while the reader is busy are told as one: a slow reader misses what lay between, and piles up nothing.
        """
        while self._is_waiting_allowed:
            ticket = self._bell.ticket(run_id)
            yield await self.status(run_id)
            while not ticket.is_set() and self._is_waiting_allowed:
                await self._bell.wait(ticket, at_most_s=quiet_s, clock=self._clock)
                if not ticket.is_set():
                    yield None

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """For audit and explanation: read at one moment."""
        return await self._store.read(work)

    # ------------------------------------------------------------------ inside

    def stop_waiting(self) -> None:
        """Answer every waiting call as things stand, and let none wait again: the service is closing."""
        self._is_waiting_allowed = False
        self._bell.ring_all()

    async def _write(self, run_id: RunId, rule: Callable[[RunBook], T]) -> T:
        now = self._clock.wall()

        def work(tx: Transaction) -> T:
            with opened_book(tx, run_id, now) as book:
                return rule(book)

        return await self._store.write(work)

    async def _look(self, run_id: RunId, work: Callable[[Transaction], T]) -> T:
        def checked(tx: Transaction) -> T:
            find_run(tx, run_id)
            return work(tx)

        return await self._store.read(checked)

    async def _wait(self, ticket: asyncio.Event, until: float, *, at_most_s: float | None = None) -> bool:
        """Wait for something to move. False: the time is over, answer with what there is."""
        left = until - self._clock.now()
        if left <= 0 or not self._is_waiting_allowed:
            return False
        await self._bell.wait(ticket, at_most_s=left if at_most_s is None else min(left, at_most_s), clock=self._clock)
        return True


def _payloads(tx: Transaction, run_id: RunId, ids: Sequence[GroupId]) -> list[bytes]:
    """As many of the first as fit into one read, and at least one."""
    found: list[bytes] = []
    for group_id in ids:
        payload = tx.payload(run_id, group_id)
        if payload is None:
            raise RunError(f"run {run_id}: the payload of group {group_id} is gone")
        found.append(payload)
        if sum(map(len, found)) >= BYTES_IN_ONE_READ:
            break
    return found


@asynccontextmanager
async def open_ledger(config: LedgerConfig, *, directory: Path, clock: Clock, log: EventLog) -> AsyncIterator[Ledger]:
    """The ledger whose file lies in `directory`. Opening takes time for what is open, not for what is past."""
    async with (
        open_sqlite_store(directory, durability=config.durability) as store,
        ledger_on(store, config, clock=clock, log=log) as ledger,
    ):
        yield ledger


@asynccontextmanager
async def ledger_on(store: Store, config: LedgerConfig, *, clock: Clock, log: EventLog) -> AsyncIterator[Ledger]:
    """The ledger on a store that somebody opened; on a shared one, one of several replicas."""
    ledger = Ledger(store=store, config=config, clock=clock, log=log)
    timekeeper = Timekeeper(store=store, clock=clock, log=log)
    await timekeeper.recover()
    # Not a TaskGroup: it would wrap an error of the block that uses the ledger into a group of its own.
    ticking = asyncio.create_task(timekeeper.run(), name="ledger.time")
    try:
        yield ledger
    finally:
        ledger.stop_waiting()
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking
