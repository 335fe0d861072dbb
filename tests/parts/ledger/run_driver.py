"""A run on a real store, driven rule by rule with a manual clock, without threads and HTTP."""

import asyncio
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from rollbook.contracts.admission import (
    ActionKind,
    AuditReport,
    LedgerStatus,
    OpenReply,
    OwnerId,
    PartReceipt,
    Receipt,
    RunSettings,
)
from rollbook.contracts.batch import AckReceipt, EndOfRun, TrainerRole
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupState, PromptGroup, part_id
from rollbook.contracts.policy import Publication
from rollbook.contracts.task import Draw
from rollbook.ledger.config import Durability
from rollbook.ledger.records import ActionRecord, GroupRecord
from rollbook.ledger.rules import actions, batches, gate, groups, publications, runs, trainer
from rollbook.ledger.rules.batches import Decision
from rollbook.ledger.rules.run_transaction import RunTransaction, run_transaction
from rollbook.ledger.store import Transaction
from rollbook.ledger.stores.postgres.writer import PostgresWriter
from rollbook.ledger.stores.sql.committer import Operation
from rollbook.ledger.stores.sqlite.file import FILE_NAME, MEMORY
from rollbook.ledger.stores.sqlite.writer import SqliteWriter
from rollbook.ledger.tools.audit import audit_run, audit_since
from rollbook.ledger.tools.audit_findings import AuditMark
from tests.parts.ledger.groups import RUN, draws, group_of, settings, submission_of

T = TypeVar("T")


class BlockingStore:
    """The writer of a real store, called without its thread. Satisfies `store.Reader`."""

    def __init__(self, writer: SqliteWriter | PostgresWriter) -> None:
        self._writer = writer
        weakref.finalize(self, writer.close)

    def write_now(self, work: Callable[[Transaction], T]) -> T:
        operation = Operation(work, cast("asyncio.Future[Any]", None))
        self._writer.commit([operation])
        if operation.error is not None:
            raise operation.error
        result: T = operation.result
        return result

    def read_now(self, work: Callable[[Transaction], T]) -> T:
        return self.write_now(work)

    def close(self) -> None:
        self._writer.close()


def blocking_sqlite(path: Path = MEMORY) -> BlockingStore:
    return BlockingStore(SqliteWriter(path, Durability.PROCESS_CRASH))


def blocking_postgres(url: str) -> BlockingStore:
    writer = PostgresWriter(url)
    writer.prepare()
    return BlockingStore(writer)


class RunDriver:
    """One run and its operations. Tests set `now`."""

    def __init__(self, store: BlockingStore | None = None) -> None:
        self.store = store or blocking_sqlite()
        self.now = 1_000.0
        self.epoch = 0
        self._requests = 0
        self._audited: AuditMark | None = None

    def rule(self, work: Callable[[RunTransaction], T]) -> T:
        def run(tx: Transaction) -> T:
            with run_transaction(tx, RUN, self.now) as run_tx:
                return work(run_tx)

        return self.store.write_now(run)

    def create(self, run_settings: RunSettings) -> "RunDriver":
        self.store.write_now(lambda tx: runs.create_run(tx, RUN, run_settings, now=self.now))
        return self

    def join(self, name: str = "worker", nonce: str | None = None) -> OwnerId:
        self._requests += 1
        nonce = nonce or f"nonce{self._requests}"
        return self.rule(lambda run_tx: gate.join(run_tx, name, nonce))

    def open(self, owner: OwnerId, draws: list[Draw], *, limit: int = 100, request: str | None = None) -> OpenReply:
        self._requests += 1
        request = request or f"request{self._requests}"
        return self.rule(lambda run_tx: gate.open_groups(run_tx, owner, draws, limit=limit, request_id=request))

    def submit(
        self,
        task: str,
        publications: tuple[int, ...] = (0,),
        *,
        attempt: int = 1,
        drop: DropReason | None = None,
        max_queued: int = 1_000,
        samples: int = 2,
    ) -> Receipt:
        group = group_of(task, publications, samples=samples)
        return self.send(group, attempt=attempt, drop=drop, max_queued=max_queued).receipt

    def send(
        self, group: PromptGroup, *, attempt: int = 1, drop: DropReason | None = None, max_queued: int = 1_000
    ) -> PartReceipt:
        submission = submission_of(group, attempt=attempt, drop=drop)
        return self.rule(lambda run_tx: groups.submit(run_tx, submission, max_queued=max_queued))

    def close(self, task: str, reason: DropReason, *, part: int = 1) -> Receipt:
        group = part_id(GroupId(f"{task}@0"), part)
        return self.rule(lambda run_tx: groups.close(run_tx, group, reason, outcome=None))

    def release(self, task: str, attempt: int, cause: str = "worker died", *, part: int = 1) -> None:
        group = part_id(GroupId(f"{task}@0"), part)
        self.rule(lambda run_tx: groups.release(run_tx, group, attempt=attempt, cause=cause))

    def exhausted(self) -> None:
        self.rule(groups.mark_exhausted)

    def expire(self) -> int:
        return self.rule(gate.expire)

    def take_role(self, restored_step: int = 0) -> TrainerRole:
        role = self.rule(lambda run_tx: trainer.take_role(run_tx, restored_step=restored_step))
        self.epoch = role.epoch
        return role

    def decide(self, step: int, *, epoch: int | None = None) -> Decision:
        epoch = self.epoch if epoch is None else epoch
        return self.rule(lambda run_tx: batches.decide(run_tx, step, epoch=epoch))

    def acknowledge(
        self,
        step: int,
        digest: str | None = None,
        *,
        epoch: int | None = None,
        unusable: Mapping[GroupId, str] | None = None,
    ) -> AckReceipt:
        epoch = self.epoch if epoch is None else epoch
        digest = digest or f"weights{step}"
        return self.rule(lambda run_tx: trainer.acknowledge(run_tx, step, digest, epoch=epoch, unusable=unusable))

    def register(self, step: int, digest: str | None = None) -> Publication:
        return self.rule(
            lambda run_tx: publications.register(run_tx, step, digest or f"weights{step}", epoch=self.epoch)
        )

    def publish(self, step: int, digest: str | None = None) -> Publication:
        publication = self.register(step, digest)
        self.rule(lambda run_tx: publications.confirm(run_tx, publication, epoch=self.epoch))
        return publication

    def checkpointed(self, step: int, *, oldest_kept: int | None = None) -> int:
        kept = step if oldest_kept is None else oldest_kept
        return self.rule(lambda run_tx: trainer.checkpointed(run_tx, step, oldest_kept=kept, epoch=self.epoch))

    def act(
        self,
        kind: ActionKind,
        target: str = "",
        *,
        note: str = "",
        sample: int | None = None,
        nonce: str | None = None,
        author: str = "Ada",
    ) -> ActionRecord:
        self._requests += 1
        nonce = nonce or f"nonce{self._requests}"
        return self.rule(
            lambda run_tx: actions.act(
                run_tx, kind, author=author, target=target, sample=sample, note=note, nonce=nonce
            )
        )

    def finish(self, reason: EndOfRun) -> None:
        self.rule(lambda run_tx: trainer.finish(run_tx, reason, epoch=self.epoch))

    def status(self) -> LedgerStatus:
        return self.store.read_now(lambda tx: runs.status(tx, RUN))

    def audit(self) -> AuditReport:
        """A complete audit. An audit that continues from the last one must agree with it, and known rows with the database."""
        self.store.read_now(_compare_known_rows)
        report = self.store.read_now(lambda tx: audit_run(tx, RUN))
        since, mark = self.store.read_now(lambda tx: audit_since(tx, RUN, self._audited))
        self._audited = mark and msgspec.json.decode(msgspec.json.encode(mark), type=AuditMark)
        if report.ok:
            assert replace(since, known=0, known_at=None) == report, (since, report)
        return report

    def group(self, task: str, *, part: int = 1) -> GroupRecord:
        record = self.store.read_now(lambda tx: tx.groups.get(RUN, part_id(GroupId(f"{task}@0"), part)))
        assert record is not None
        return record

    def groups(self, state: GroupState) -> list[GroupRecord]:
        return self.store.read_now(lambda tx: tx.groups.page(RUN, start=0, limit=10_000, state=state))

    def notes(self, task: str) -> list[str]:
        moves = self.store.read_now(lambda tx: tx.history.of_group(RUN, GroupId(f"{task}@0")))
        return [f"{move.to_state}: {move.note}" for move in moves]


def _compare_known_rows(tx: Transaction) -> None:
    """A row by its key, which the writer may know from an earlier commit, is that of a query."""
    for group in tx.groups.page(RUN, limit=10_000):
        assert tx.groups.get(RUN, group.group_id) == group
    for publication in tx.publications.page(RUN, limit=10_000):
        assert tx.publications.get(RUN, publication.id) == publication
    for owner in tx.owners.alive(RUN):
        assert tx.owners.get(RUN, owner.owner_id) == owner
    for batch in tx.batches.each(RUN):
        assert tx.batches.get(RUN, batch.manifest.step) == batch
    positions = dict(tx.positions.all(RUN))
    for position in range(max(positions, default=0) + 2):
        assert tx.positions.get(RUN, position) == positions.get(position)


def write_a_run(directory: Path) -> None:
    """Two steps trained, one durable; one group batched, queued, leased, dropped each. A short batch ends it."""
    file = blocking_sqlite(directory / FILE_NAME)
    driver = RunDriver(file).create(settings(staleness_bound=2))
    driver.take_role()
    live = driver.publish(0)
    owner = driver.join()
    for step in (1, 2, 3):
        driver.open(owner, draws(2 * step, 2))
        for at in (0, 1):
            driver.submit(f"task{2 * step + at}", (live.id,))
        driver.decide(step)
        if step < 3:
            driver.acknowledge(step)
            live = driver.publish(step)
    driver.checkpointed(1)
    driver.open(owner, draws(8, 3))
    driver.submit("task8", (live.id,))
    driver.close("task9", DropReason(DropKind.FILTERED, "constant"))
    file.close()
