"""The ledger service: every operation of a run as one transaction of the rules, without HTTP and SQL.

Any number of tasks may call it. Waiting calls (`open`, `decide`) check again after each commit that changed their run.
Time-driven changes are in `lease_expiry`.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import (
    ActionKind,
    DrawProgress,
    GateState,
    LedgerStatus,
    Member,
    MemberId,
    MemberReply,
    MemberRole,
    OpenReply,
    OwnerId,
    PartReceipt,
    PastDraw,
    Receipt,
    RunId,
    RunSettings,
)
from rollbook.contracts.batch import AckReceipt, BatchManifest, EndOfRun, PassSplit, TrainerRole
from rollbook.contracts.errors import RollbookError, RunError
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome, GroupState
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import Draw
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.lease_expiry import LeaseExpiry
from rollbook.ledger.notifier import RunNotifier
from rollbook.ledger.records import (
    ActionRecord,
    GroupRecord,
    ProducerRecord,
    PublicationRecord,
    RunChanges,
    StepRecord,
)
from rollbook.ledger.rules import actions, batches, gate, groups, members, publications, runs, trainer
from rollbook.ledger.rules.groups import Submission
from rollbook.ledger.rules.run_transaction import RunTransaction, find_run, run_transaction
from rollbook.ledger.store import Store, Transaction
from rollbook.telemetry.events import EventLog

T = TypeVar("T")

PAYLOADS_PER_READ = 8
BYTES_PER_READ = 4_000_000
"""Limits of one read. They bound the memory of the ledger while a trainer reads slowly."""


class Ledger:
    """All runs of one store. Opened by `open_ledger`."""

    def __init__(self, *, store: Store, config: LedgerConfig, clock: Clock, log: EventLog) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._log = log
        self._notifier = RunNotifier()
        self._is_waiting_allowed = True
        store.listen(self._notifier.notify)

    # ------------------------------------------------------------------ runs

    async def create_run(self, run_id: RunId, settings: RunSettings) -> None:
        """Create a run, or resume it with new settings. Groups per step, batch policy and staleness bound of a run never change."""
        if settings.rule.groups_per_step > self._config.max_queued_groups:
            raise RunError(
                f"run {run_id}: a step takes {settings.rule.groups_per_step} groups, but max_queued_groups is "
                f"{self._config.max_queued_groups}, so no batch could ever be formed"
            )
        now = self._clock.wall()
        await self._store.write(lambda tx: runs.create_run(tx, run_id, settings, now=now), run_id=run_id)
        self._log.info("ledger.run_created", run=run_id)

    async def runs(self) -> list[RunId]:
        return await self._store.read(lambda tx: tx.runs.ids())

    async def status(self, run_id: RunId) -> LedgerStatus:
        return await self._store.read(lambda tx: runs.status(tx, run_id))

    async def progress(self, run_id: RunId) -> DrawProgress:
        return await self._store.read(lambda tx: runs.progress(tx, run_id))

    async def outcomes(self, run_id: RunId, *, after: int, limit: int) -> list[PastDraw]:
        """A page of past draws, in order of admission."""
        return await self._store.read(lambda tx: runs.outcomes(tx, run_id, after=after, limit=limit))

    # ------------------------------------------------------------------ operators

    async def act(
        self,
        run_id: RunId,
        kind: ActionKind,
        *,
        author: str,
        target: str = "",
        sample: int | None = None,
        note: str = "",
        nonce: str | None = None,
    ) -> ActionRecord:
        """Record an action of an operator and do it, in one transaction."""
        nonce = nonce or uuid.uuid4().hex
        action = await self._write(
            run_id,
            lambda run_tx: actions.act(
                run_tx, kind, author=author, target=target, sample=sample, note=note, nonce=nonce
            ),
        )
        self._log.info("ledger.action", run=run_id, action=action.number, kind=kind, author=author, target=target)
        return action

    async def actions(
        self, run_id: RunId, *, start: int = 0, limit: int = 1000, target: str | None = None
    ) -> list[ActionRecord]:
        """A page of actions from number `start` on; with `target`, those about one task or group."""

        def read(tx: Transaction) -> list[ActionRecord]:
            if target is None:
                return tx.actions.page(run_id, start=start, limit=limit)
            return [action for action in tx.actions.of_target(run_id, target) if action.number >= start][:limit]

        return await self._read(run_id, read)

    # ------------------------------------------------------------------ members

    async def join_member(
        self, run_id: RunId, *, name: str, role: MemberRole, node: str, address: str, lease_s: float, nonce: str
    ) -> MemberReply:
        reply = await self._write(
            run_id,
            lambda run_tx: members.join(
                run_tx, name=name, role=role, node=node, address=address, lease_s=lease_s, nonce=nonce
            ),
        )
        if reply.member is not None:
            self._log.info("ledger.member_joined", run=run_id, member=reply.member, name=name, node=node)
        return reply

    async def heartbeat_member(
        self, run_id: RunId, member: MemberId, *, publication: int | None = None, load: float = 0.0
    ) -> None:
        await self._write(run_id, lambda run_tx: members.heartbeat(run_tx, member, publication=publication, load=load))

    async def leave_member(self, run_id: RunId, member: MemberId) -> None:
        await self._write(run_id, lambda run_tx: members.leave(run_tx, member))
        self._log.info("ledger.member_left", run=run_id, member=member)

    async def members(self, run_id: RunId) -> list[Member]:
        def read(tx: Transaction) -> list[Member]:
            return [members.member_of(record) for record in tx.members.alive(run_id)]

        return await self._read(run_id, read)

    # ------------------------------------------------------------------ dispatchers

    async def join(self, run_id: RunId, owner_name: str, *, nonce: str | None = None) -> OwnerId:
        nonce = nonce or uuid.uuid4().hex
        owner = await self._write(run_id, lambda run_tx: gate.join(run_tx, owner_name, nonce))
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
            change = self._notifier.next_change(run_id)
            reply, ttl_s = await self._write(
                run_id,
                lambda run_tx: (
                    gate.open_groups(run_tx, owner, draws, limit=limit, request_id=request_id),
                    run_tx.run.settings.owner_ttl_s,
                ),
            )
            is_answered = reply.grants or reply.taken or reply.gate is GateState.ENDED
            # A waiting dispatcher is alive: repeat often enough that the gate does not time it out.
            if is_answered or not await self._wait(change, until, at_most_s=ttl_s / 2):
                return reply

    async def heartbeat(self, run_id: RunId, owner: OwnerId) -> None:
        await self._write(run_id, lambda run_tx: gate.heartbeat(run_tx, owner))

    async def submit(self, run_id: RunId, *submissions: Submission) -> list[PartReceipt | RollbookError]:
        """Store groups, or parts of groups, in one transaction. A refused group does not affect the others."""
        most, most_bytes = self._config.max_queued_groups, int(self._config.max_queued_mb * 1_000_000)
        return await self._write(
            run_id, lambda run_tx: groups.submit_each(run_tx, submissions, max_queued=most, max_queued_bytes=most_bytes)
        )

    async def close(
        self, run_id: RunId, group_id: GroupId, reason: DropReason, *, outcome: GroupOutcome | None = None
    ) -> Receipt:
        return await self._write(run_id, lambda run_tx: groups.close(run_tx, group_id, reason, outcome=outcome))

    async def release(self, run_id: RunId, group_id: GroupId, *, attempt: int, cause: str) -> None:
        await self._write(run_id, lambda run_tx: groups.release(run_tx, group_id, attempt=attempt, cause=cause))
        self._log.info("ledger.group_released", run=run_id, group=group_id, attempt=attempt, cause=cause)

    async def register_producer(
        self, run_id: RunId, name: str, *, weight: float = 1.0, min_share: float = 0.0
    ) -> ProducerRecord:
        """Register a producer that submits without grants: its weight, and its guaranteed share of each batch."""
        record = await self._write(
            run_id, lambda run_tx: groups.register_producer(run_tx, name, weight=weight, min_share=min_share)
        )
        self._log.info("ledger.producer_registered", run=run_id, producer=name, weight=weight, min_share=min_share)
        return record

    async def producers(self, run_id: RunId) -> list[ProducerRecord]:
        return await self._read(run_id, lambda tx: tx.producers.all(run_id))

    async def exhausted(self, run_id: RunId) -> None:
        await self._write(run_id, groups.mark_exhausted)

    # ------------------------------------------------------------------ trainer

    async def take_role(self, run_id: RunId, *, restored_step: int) -> TrainerRole:
        role = await self._write(run_id, lambda run_tx: trainer.take_role(run_tx, restored_step=restored_step))
        self._log.info("ledger.trainer_took_role", run=run_id, epoch=role.epoch, restored_step=restored_step)
        return role

    async def decide(self, run_id: RunId, step: int, *, epoch: int, wait_s: float) -> BatchManifest | EndOfRun | None:
        """The manifest of `step`. None: not enough groups within `wait_s`."""
        until = self._clock.now() + wait_s
        while True:
            change = self._notifier.next_change(run_id)
            decision = await self._write(run_id, lambda run_tx: batches.decide(run_tx, step, epoch=epoch))
            if decision.num_stale:
                self._log.info("ledger.stale_dropped", run=run_id, step=step, groups=decision.num_stale)
            if decision.is_new and decision.manifest is not None:
                num_groups = len(decision.manifest.entries)
                self._log.info("ledger.batch_decided", run=run_id, step=step, groups=num_groups)
            result = decision.manifest or decision.end
            if result is not None or not await self._wait(change, until):
                return result

    async def payloads(self, run_id: RunId, manifest: BatchManifest) -> AsyncIterator[bytes]:
        """The stored bytes of a batch's groups, in the manifest's order, a few at a time."""
        left = [entry.group_id for entry in manifest.entries]
        while left:
            some = left[:PAYLOADS_PER_READ]
            found = await self._store.read(lambda tx, some=some: _payloads(tx, run_id, some))  # type: ignore[misc]
            left = left[len(found) :]
            # Each payload is freed before the next one is yielded: a slow reader holds one of them, not all.
            found.reverse()
            while found:
                yield found.pop()

    async def acknowledge(
        self,
        run_id: RunId,
        step: int,
        weights_digest: str,
        *,
        epoch: int,
        unusable: Mapping[GroupId, str] | None = None,
        split: PassSplit | None = None,
    ) -> AckReceipt:
        receipt = await self._write(
            run_id,
            lambda run_tx: trainer.acknowledge(
                run_tx, step, weights_digest, epoch=epoch, unusable=unusable, split=split
            ),
        )
        await self._store.journal(run_id)
        if unusable:
            self._log.warning("ledger.unusable_groups", run=run_id, step=step, epoch=epoch, groups=dict(unusable))
        if receipt is AckReceipt.DIVERGED:
            self._log.warning("ledger.diverged", run=run_id, step=step, epoch=epoch, digest=weights_digest)
        else:
            self._log.info("ledger.step_acknowledged", run=run_id, step=step, epoch=epoch, receipt=receipt)
        return receipt

    async def register(self, run_id: RunId, step: int, weights_digest: str, *, epoch: int) -> Publication:
        return await self._write(
            run_id, lambda run_tx: publications.register(run_tx, step, weights_digest, epoch=epoch)
        )

    async def confirm(self, run_id: RunId, publication: Publication, *, epoch: int) -> None:
        await self._write(run_id, lambda run_tx: publications.confirm(run_tx, publication, epoch=epoch))
        self._log.info("ledger.publication_confirmed", run=run_id, publication=publication.id, step=publication.step)

    async def checkpointed(self, run_id: RunId, step: int, *, oldest_kept: int, epoch: int) -> None:
        num_deleted = await self._write(
            run_id, lambda run_tx: trainer.checkpointed(run_tx, step, oldest_kept=oldest_kept, epoch=epoch)
        )
        await self._store.journal(run_id, checkpoint=True)
        self._log.info(
            "ledger.checkpointed", run=run_id, step=step, oldest_kept=oldest_kept, payloads_deleted=num_deleted
        )

    async def finish(self, run_id: RunId, reason: EndOfRun, *, epoch: int) -> None:
        await self._write(run_id, lambda run_tx: trainer.finish(run_tx, reason, epoch=epoch))
        await self._store.journal(run_id, checkpoint=True)
        self._log.info("ledger.run_finished", run=run_id, reason=reason)

    # ------------------------------------------------------------------ queries

    async def groups(
        self, run_id: RunId, state: GroupState | None = None, *, start: int = 0, limit: int = 100
    ) -> list[GroupRecord]:
        """A page of groups, from the admission sequence number `start` on."""
        return await self._read(run_id, lambda tx: tx.groups.page(run_id, start=start, limit=limit, state=state))

    async def changes(self, run_id: RunId, *, after: int | None, limit: int = 1000) -> RunChanges:
        """The groups that changed after the move with the number `after`."""
        return await self._store.read(lambda tx: runs.changes(tx, run_id, after=after, limit=limit))

    async def batch_manifest(self, run_id: RunId, step: int) -> BatchManifest | None:
        record = await self._read(run_id, lambda tx: tx.batches.get(run_id, step))
        return None if record is None else record.manifest

    async def split_of(self, run_id: RunId, step: int) -> PassSplit | None:
        """The split with which a step was acknowledged last."""
        found = await self._read(run_id, lambda tx: tx.steps.of_step(run_id, step))
        return found[-1].split if found else None

    async def steps(self, run_id: RunId, *, start: int = 0, limit: int = 10_000) -> list[StepRecord]:
        """A page of acknowledgements, from step `start` on."""
        return await self._read(run_id, lambda tx: tx.steps.page(run_id, start=start, limit=limit))

    async def publications(self, run_id: RunId, *, start: int = 0, limit: int = 10_000) -> list[PublicationRecord]:
        """A page of publications, from id `start` on."""
        return await self._read(run_id, lambda tx: tx.publications.page(run_id, start=start, limit=limit))

    async def statuses(self, run_id: RunId, *, quiet_s: float) -> AsyncIterator[LedgerStatus | None]:
        """The status now and after each change, until the service closes. None after `quiet_s` without a change.

        Changes while the reader is busy are merged into one status.
        """
        while self._is_waiting_allowed:
            change = self._notifier.next_change(run_id)
            yield await self.status(run_id)
            while not change.is_set() and self._is_waiting_allowed:
                await self._notifier.wait(change, at_most_s=quiet_s, clock=self._clock)
                if not change.is_set():
                    yield None

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one consistent state; for audit and explain."""
        return await self._store.read(work)

    # ------------------------------------------------------------------ internal

    def stop_waiting(self) -> None:
        """Answer all waiting calls now, and let none wait again; the service is closing."""
        self._is_waiting_allowed = False
        self._notifier.notify_all()

    async def _write(self, run_id: RunId, rule: Callable[[RunTransaction], T]) -> T:
        now = self._clock.wall()

        def work(tx: Transaction) -> T:
            with run_transaction(tx, run_id, now) as run_tx:
                return rule(run_tx)

        return await self._store.write(work, run_id=run_id)

    async def _read(self, run_id: RunId, work: Callable[[Transaction], T]) -> T:
        def read(tx: Transaction) -> T:
            find_run(tx, run_id)
            return work(tx)

        return await self._store.read(read)

    async def _wait(self, change: asyncio.Event, until: float, *, at_most_s: float | None = None) -> bool:
        """Wait for a change. False: the time is over."""
        left = until - self._clock.now()
        if left <= 0 or not self._is_waiting_allowed:
            return False
        await self._notifier.wait(
            change, at_most_s=left if at_most_s is None else min(left, at_most_s), clock=self._clock
        )
        return True


def _payloads(tx: Transaction, run_id: RunId, ids: Sequence[GroupId]) -> list[bytes]:
    """The first payloads, up to the limit of one read, and at least one."""
    found: list[bytes] = []
    for group_id in ids:
        payload = tx.payloads.get(run_id, group_id)
        if payload is None:
            raise RunError(f"run {run_id}: the payload of group {group_id} is missing")
        found.append(payload)
        if sum(map(len, found)) >= BYTES_PER_READ:
            break
    return found


@asynccontextmanager
async def open_ledger(store: Store, config: LedgerConfig, *, clock: Clock, log: EventLog) -> AsyncIterator[Ledger]:
    """The ledger on an open store; on a shared store, one of several replicas.

    The time to open depends on the number of open groups, not on the length of the run.
    """
    ledger = Ledger(store=store, config=config, clock=clock, log=log)
    expiry = LeaseExpiry(store=store, clock=clock, log=log)
    await expiry.recover()
    # Not a TaskGroup: it would wrap errors of the block that uses the ledger into an exception group.
    expiring = asyncio.create_task(expiry.run(), name="ledger.lease_expiry")
    try:
        yield ledger
    finally:
        ledger.stop_waiting()
        expiring.cancel()
        with suppress(asyncio.CancelledError):
            await expiring
