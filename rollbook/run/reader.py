"""Reads the record of a run: from the store of its directory, or over HTTP from a ledger. Works during a run and after it.

Both sources return the same rows (`dashboard/source.py`). The dashboard awaits them; commands open a `RecordedRun`, which blocks.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollbook.concurrency.blocking import LoopThread
from rollbook.contracts.admission import Action, AuditReport, LedgerStatus, RunId
from rollbook.contracts.batch import BatchManifest, EncodedBatch, TrainingBatch
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import NotFoundError, RunError
from rollbook.contracts.group import GroupId, GroupOutcome, GroupState, PromptGroup
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.contracts.group_codec import decode_payload
from rollbook.contracts.policy import Publication
from rollbook.dashboard.source import (
    ChangedGroups,
    GroupRow,
    GroupTimeline,
    LedgerSource,
    MoveRow,
    ProducerRow,
    StepRow,
)
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.http import wire
from rollbook.ledger.records import GroupRecord, MoveRecord, ProducerRecord, StepRecord
from rollbook.ledger.rules import runs
from rollbook.ledger.rules.run_transaction import UnknownRunError, find_run
from rollbook.ledger.store import StoreFaultError, Transaction
from rollbook.ledger.stores.registry import open_reader
from rollbook.ledger.tools.audit import audit_since
from rollbook.ledger.tools.audit_findings import AuditMark
from rollbook.ledger.tools.explain import explain_group
from rollbook.run.config.run import LoadedConfig, RunConfig, load_resolved_config
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.ledger_clients import external_token, run_settings, store_url
from rollbook.run.record_check import TrainedSteps, compared, lost_ledger, trained_steps

T = TypeVar("T")

QUERY_S = 10.0
"""A person waits for the response."""
COLUMNS = [{"outcome_json": "outcome"}.get(name, name) for name in GroupRow.__struct_fields__]
PUBLICATIONS, HAS_PAYLOAD = COLUMNS.index("publications"), COLUMNS.index("has_payload")


class StoreSource:
    """The store of a run directory. Satisfies `LedgerSource`.

    Each read opens it again: its file may be created, replaced or deleted at any time, and opening takes a millisecond.
    """

    most_groups = 1500
    """Some megabytes. More would save no time, which is that of opening the store."""

    def __init__(
        self, store_url: str, run_id: RunId, *, directory: RunDirectory | None = None, audit_file: Path | None = None
    ) -> None:
        """An audit compares the ledger with the files of `directory`. `audit_file` keeps the mark of the last audit; without one it
        is kept in memory."""
        self._directory = directory
        self._store_url = store_url
        self._run_id = run_id
        self._audit_file = audit_file
        self._audited: AuditMark | None = None

    async def status(self) -> LedgerStatus:
        return await self._read(lambda tx: runs.status(tx, self._run_id))

    async def groups(self, *, start: int, limit: int, state: GroupState | None = None) -> tuple[GroupRow, ...]:
        def read(tx: Transaction) -> tuple[GroupRow, ...]:
            if state is None:
                return _rows_of_values(tx.groups.values(self._run_id, COLUMNS, start=start, limit=limit))
            found = tx.groups.page(self._run_id, start=start, limit=limit, state=state)
            return tuple(map(_row_of_record, found))

        return await self._read(read)

    async def changes(self, *, after: int | None, limit: int) -> ChangedGroups:
        def read(tx: Transaction) -> ChangedGroups:
            found = runs.changes(tx, self._run_id, after=after, limit=limit)
            return ChangedGroups(
                next=found.next, is_complete=found.is_complete, groups=tuple(map(_row_of_record, found.groups))
            )

        return await self._read(read)

    async def explain(self, group_id: str) -> GroupTimeline:
        def read(tx: Transaction) -> GroupTimeline:
            group = tx.groups.get(self._run_id, GroupId(group_id))
            if group is None:
                raise NotFoundError(
                    f"run {self._run_id}: there is no group {group_id}; `rollbook inspect RUN --groups` lists them"
                )
            return GroupTimeline(
                group=_row_of_record(group),
                moves=tuple(map(_move, tx.history.of_group(self._run_id, group.group_id))),
                sentences=tuple(explain_group(tx, self._run_id, group.group_id)),
            )

        return await self._read(read)

    async def payloads(self, *group_ids: str) -> tuple[bytes | None, ...]:
        return await self._read(
            lambda tx: tuple(tx.payloads.get(self._run_id, GroupId(group_id)) for group_id in group_ids)
        )

    async def manifest(self, step: int) -> BatchManifest:
        found = await self._read(lambda tx: tx.batches.get(self._run_id, step))
        if found is None:
            raise NotFoundError(f"run {self._run_id}: batch {step} is not decided")
        return found.manifest

    async def steps(self) -> tuple[StepRow, ...]:
        return await self._read(lambda tx: tuple(map(_step, tx.steps.each(self._run_id))))

    async def publications(self, *, start: int, limit: int) -> tuple[Publication, ...]:
        found = await self._read(lambda tx: tx.publications.page(self._run_id, start=start, limit=limit))
        return tuple(record.contract for record in found)

    async def actions(self, *, start: int, limit: int, target: str | None = None) -> tuple[Action, ...]:
        def read(tx: Transaction) -> tuple[Action, ...]:
            if target is None:
                found = tx.actions.page(self._run_id, start=start, limit=limit)
            else:
                found = tx.actions.of_target(self._run_id, target)
            return tuple(action.contract for action in found)

        return await self._read(read)

    async def producers(self) -> tuple[ProducerRow, ...]:
        return tuple(map(_producer, await self._read(lambda tx: tx.producers.all(self._run_id))))

    async def limits(self) -> TrainingLimits:
        return await self._read(lambda tx: find_run(tx, self._run_id).settings.limits)

    async def audit(self, *, full: bool = False) -> AuditReport:
        trained = await asyncio.to_thread(trained_steps, self._directory)
        before = self._audited if self._audit_file is None else last_audit(self._audit_file)
        try:
            report, self._audited = await self._read(lambda tx: audit_since(tx, self._run_id, None if full else before))
        except (StoreFaultError, UnknownRunError) as error:
            lost = lost_ledger(trained, self._run_id, error)
            if lost is None:
                raise
            return lost
        if self._audit_file is not None:
            # Nothing is lost if it cannot be written: the next audit reads more.
            with suppress(OSError):
                if self._audited is None:
                    self._audit_file.unlink(missing_ok=True)
                else:
                    write_json(self._audit_file, msgspec.to_builtins(self._audited))
        return await _compared(report, trained, self, full=full)

    async def _read(self, work: Callable[[Transaction], T]) -> T:
        def read() -> T:
            with open_reader(self._store_url) as reader:
                return reader.read_now(work)

        return await asyncio.to_thread(read)


class HttpSource:
    """A run of a ledger service. Satisfies `LedgerSource`."""

    most_groups = wire.MAX_LISTED

    def __init__(self, client: LedgerClient, *, directory: RunDirectory | None = None) -> None:
        self._client = client
        self._directory = directory

    async def status(self) -> LedgerStatus:
        return await self._client.status()

    async def groups(self, *, start: int, limit: int, state: GroupState | None = None) -> tuple[GroupRow, ...]:
        return tuple(map(_row_of_view, await self._client.groups(state, start=start, limit=limit)))

    async def changes(self, *, after: int | None, limit: int) -> ChangedGroups:
        found = await self._client.changes(after=after, limit=limit)
        groups = tuple(map(_row_of_view, found.groups))
        return ChangedGroups(next=found.next, is_complete=found.is_complete, groups=groups)

    async def explain(self, group_id: str) -> GroupTimeline:
        found = await self._client.explain(GroupId(group_id))
        moves = tuple(map(_move, found.moves))
        return GroupTimeline(group=_row_of_view(found.group), moves=moves, sentences=found.sentences)

    async def payloads(self, *group_ids: str) -> tuple[bytes | None, ...]:
        return tuple([await self._payload(GroupId(group_id)) for group_id in group_ids])

    async def _payload(self, group_id: GroupId) -> bytes | None:
        try:
            return await self._client.payload(group_id)
        except NotFoundError:
            return None

    async def manifest(self, step: int) -> BatchManifest:
        return await self._client.manifest(step)

    async def steps(self) -> tuple[StepRow, ...]:
        found: list[StepRow] = []
        start, known = 0, set[tuple[int, int]]()
        while True:
            # A page may end between two acknowledgements of one step, so the next one begins with that step again.
            page = [view for view in await self._client.steps(start=start) if (view.step, view.epoch) not in known]
            if not page:
                return tuple(found)
            found += map(_step, page)
            known = {(view.step, view.epoch) for view in page}
            start = page[-1].step

    async def publications(self, *, start: int, limit: int) -> tuple[Publication, ...]:
        return await self._client.publications(start=start, limit=limit)

    async def actions(self, *, start: int, limit: int, target: str | None = None) -> tuple[Action, ...]:
        return await self._client.actions(start=start, limit=limit, target=target)

    async def producers(self) -> tuple[ProducerRow, ...]:
        return tuple(map(_producer, await self._client.producers()))

    async def audit(self, *, full: bool = False) -> AuditReport:
        trained = await asyncio.to_thread(trained_steps, self._directory)
        return await _compared(audit_report(await self._client.audit(full=full)), trained, self, full=full)


async def _compared(
    report: AuditReport, trained: TrainedSteps | None, source: LedgerSource, *, full: bool
) -> AuditReport:
    """The report of the ledger, compared with the other files of the run."""
    if trained is None:
        return report
    batches = {
        step: (await source.manifest(step)).digest
        for step in trained.batches_to_compare(full=full)
        if step <= report.steps
    }
    return compared(report, trained, await source.steps(), batches)


def _rows_of_values(found: list[tuple[Any, ...]]) -> tuple[GroupRow, ...]:
    """From stored values. A run of a million groups is read, so this avoids all work that a record would need."""
    rows = []
    for values in found:
        row = list(values)
        ids: str = row[PUBLICATIONS]
        row[PUBLICATIONS] = (int(ids),) if ids.isdecimal() else tuple(int(one) for one in ids.split(",") if one)
        row[HAS_PAYLOAD] = row[HAS_PAYLOAD] == 1
        rows.append(GroupRow(*row))
    return tuple(rows)


def _row_of_record(group: GroupRecord) -> GroupRow:
    return _row(group, group.state._value_, group.outcome)


def _row_of_view(group: wire.GroupView) -> GroupRow:
    return _row(group, group.state.value, None if group.outcome is None else msgspec.json.encode(group.outcome))


def _row(group: GroupRecord | wire.GroupView, state: str, outcome: bytes | None) -> GroupRow:
    return GroupRow(
        sequence=group.sequence,
        group_id=group.group_id,
        task_id=group.task_id,
        draw=group.draw,
        origin=str(group.origin),
        producer=group.producer,
        state=state,
        opened_at=group.opened_at,
        attempt=group.attempt,
        admission_version=group.admission_version,
        oldest_version=group.oldest_version,
        publications=group.publications,
        step=group.step,
        drop_reason=group.drop_reason,
        unusable=group.unusable,
        has_payload=group.has_payload,
        payload_bytes=group.payload_bytes,
        outcome_json=outcome,
    )


def _move(move: MoveRecord | wire.MoveView) -> MoveRow:
    return MoveRow(at=move.at, from_state=move.from_state, to_state=move.to_state, note=move.note, by=move.by)


def _step(step: StepRecord | wire.StepView) -> StepRow:
    return StepRow(
        step=step.step, epoch=step.epoch, digest=step.digest, receipt=step.receipt, at=step.at, split=step.split
    )


def _producer(producer: ProducerRecord | wire.ProducerView) -> ProducerRow:
    return ProducerRow(
        name=producer.name,
        weight=producer.weight,
        min_share=producer.min_share,
        credit=producer.credit,
        num_batched=producer.num_batched,
    )


def audit_report(view: wire.AuditView) -> AuditReport:
    return AuditReport(
        run_id=RunId(view.run_id),
        opened=view.opened,
        law=view.law,
        dropped=view.dropped,
        steps=view.steps,
        max_lag=view.max_lag,
        max_head_offpolicy_versions=view.max_head_offpolicy_versions,
        samples=view.samples,
        left_out=view.left_out,
        violations=view.violations,
        known=view.known,
        known_at=view.known_at,
    )


def last_audit(audit_file: Path) -> AuditMark | None:
    """The last audit of a run, if it found no violation."""
    try:
        return json_decoder(AuditMark).decode(audit_file.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


@asynccontextmanager
async def open_source(
    loaded: LoadedConfig, directory: RunDirectory, *, audit_file: Path | None = None
) -> AsyncIterator[LedgerSource]:
    """The run's own store, or the service that its configuration names."""
    ledger, run_id = loaded.config.ledger, RunId(loaded.config.run.name)
    if ledger.url is None:
        yield StoreSource(store_url(ledger, directory), run_id, directory=directory, audit_file=audit_file)
        return
    async with open_ledger_client(ledger.url, run_id, request_s=QUERY_S, token=external_token(loaded)) as client:
        yield HttpSource(client, directory=directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEpisodes:
    played: int
    """Including unscorable and retried ones."""
    unscorable: int


class RecordedRun:
    """The record of one run directory, for code without `await`. Created by `open_run`."""

    def __init__(self, directory: RunDirectory, config: RunConfig, source: LedgerSource, loop: LoopThread) -> None:
        self.directory = directory
        self.config = config
        self._source = source
        self._loop = loop

    @property
    def run_id(self) -> RunId:
        return RunId(self.config.run.name)

    def audit(self, *, full: bool = False) -> AuditReport:
        """Check what changed since the last audit without violations; with `full`, everything."""
        return self._wait(self._source.audit(full=full))

    def status(self) -> LedgerStatus:
        return self._wait(self._source.status())

    def groups(self, *, state: GroupState | None = None, limit: int, start: int = 0) -> list[GroupRow]:
        """Groups from the admission sequence number `start` on."""
        found: list[GroupRow] = []
        while len(found) < limit:
            wanted = min(limit - len(found), self._source.most_groups)
            page = self._wait(self._source.groups(state=state, start=start, limit=wanted))
            found += page
            if len(page) < wanted:
                break
            start = page[-1].sequence + 1
        return found

    def episodes(self) -> StoredEpisodes:
        """The episodes of all groups with an outcome, by the ledger. A process that is killed loses what it counted itself."""
        played = unscorable = 0
        for row in self.groups(limit=1 << 62):
            if row.outcome_json is not None:
                outcome = json_decoder(GroupOutcome).decode(row.outcome_json)
                failed = sum(outcome.invalid_causes.values())
                played += outcome.num_scorable + failed + outcome.declined_samples
                unscorable += failed
        return StoredEpisodes(played=played, unscorable=unscorable)

    def explain(self, group_id: GroupId) -> GroupTimeline:
        """A group, its state changes, and an explanation of them in sentences."""
        return self._wait(self._source.explain(group_id))

    def samples(self, group_id: GroupId) -> PromptGroup | None:
        """The samples of a group; None if they were never submitted, or are deleted."""
        [body] = self._wait(self._source.payloads(group_id))
        return None if body is None else decode_payload(body, group_id)

    def steps(self) -> tuple[StepRow, ...]:
        """Acknowledged steps. A step that was trained again after a restart has one row for each epoch."""
        return self._wait(self._source.steps())

    def manifest(self, step: int) -> BatchManifest:
        return self._wait(self._source.manifest(step))

    def batches(self, until: int, *, first: int = 1) -> Iterator[TrainingBatch]:
        """Batches `first` to `until` as they were decided, with the splits of their last acknowledgements."""
        limits = self._limits()
        splits = {step.step: step.split for step in self.steps()}
        for step in range(first, until + 1):
            manifest = self.manifest(step)
            bodies = self._wait(self._source.payloads(*(entry.group_id for entry in manifest.entries)))
            payloads = tuple(body for body in bodies if body is not None)
            if len(payloads) < len(bodies):
                raise RunError(
                    f"run {self.run_id}: the payloads of batch {step} were deleted; set ledger.keep_payloads = true to replay a run"
                )
            yield EncodedBatch(manifest=manifest, payloads=payloads, limits=limits, split=splits.get(step)).decode()

    def _limits(self) -> TrainingLimits:
        """The limits with which the batches were trained. Over HTTP they are computed again from the model."""
        if isinstance(self._source, StoreSource):
            return self._wait(self._source.limits())
        return run_settings(self.config, self.directory).limits

    def _wait(self, reading: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(reading)


@contextmanager
def open_run(path: Path) -> Iterator[RecordedRun]:
    """Open a run directory for reading."""
    directory = RunDirectory(path.resolve())
    loaded = load_resolved_config(directory)
    loop, stack = LoopThread("run-reader"), AsyncExitStack()
    try:
        opening = open_source(loaded, directory, audit_file=directory.audit_file)
        source = loop.run(stack.enter_async_context(opening))
        yield RecordedRun(directory, loaded.config, source, loop)
    finally:
        loop.run(stack.aclose())
        loop.stop()


def audit(path: str | Path, *, full: bool = False) -> AuditReport:
    """Check the ledger of a run directory: the conservation law, every group's history, batches, steps, payloads and lag.

    Works during a run and after it. `ok` of the report says whether everything is accounted for; `violations` lists what is not.
    Durable and dropped groups that an earlier audit has checked are not read again, unless `full`.
    """
    with open_run(Path(path)) as run:
        return run.audit(full=full)
