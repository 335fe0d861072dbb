"""The ledger of a run for the dashboard: read from its store, or over HTTP."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from rollbook.contracts.admission import Action, LedgerStatus, RunId
from rollbook.contracts.batch import BatchManifest
from rollbook.contracts.errors import NotFoundError
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import Publication
from rollbook.dashboard.source import Audit, Changes, GroupRow, GroupTimeline, Move, Producer
from rollbook.ledger.client.client import LedgerClient
from rollbook.ledger.http import wire
from rollbook.ledger.records import GroupRecord, MoveRecord, ProducerRecord
from rollbook.ledger.rules import runs
from rollbook.ledger.store import Transaction
from rollbook.ledger.stores.registry import open_reader
from rollbook.ledger.tools.audit import audit_since
from rollbook.ledger.tools.audit_findings import AuditMark, AuditReport
from rollbook.ledger.tools.explain import explain_group

T = TypeVar("T")


class StoreSource:
    """The store of a run directory. Satisfies `dashboard.source.LedgerSource`.

    Each read opens it again: its file may be created, replaced or deleted at any time, and opening takes a millisecond.
    """

    most_groups = 1500
    """Some megabytes. More would save no time, which is that of opening the store."""

    def __init__(self, store_url: str, run_id: RunId) -> None:
        self._store_url = store_url
        self._run_id = run_id
        self._audited: AuditMark | None = None

    async def status(self) -> LedgerStatus:
        return await self._read(lambda tx: runs.status(tx, self._run_id))

    async def groups(self, *, start: int, limit: int) -> tuple[GroupRow, ...]:
        return await self._read(
            lambda tx: _rows_of_values(tx.groups.values(self._run_id, COLUMNS, start=start, limit=limit))
        )

    async def changes(self, *, after: int | None, limit: int) -> Changes:
        def read(tx: Transaction) -> Changes:
            found = runs.changes(tx, self._run_id, after=after, limit=limit)
            return Changes(
                next=found.next, is_complete=found.is_complete, groups=tuple(map(_row_of_record, found.groups))
            )

        return await self._read(read)

    async def history(self, group_id: str) -> GroupTimeline:
        def read(tx: Transaction) -> GroupTimeline:
            group = tx.groups.get(self._run_id, GroupId(group_id))
            if group is None:
                raise NotFoundError(f"run {self._run_id}: there is no group {group_id}")
            return GroupTimeline(
                group=_row_of_record(group),
                moves=tuple(map(_move, tx.history.of_group(self._run_id, group.group_id))),
                sentences=tuple(explain_group(tx, self._run_id, group.group_id)),
            )

        return await self._read(read)

    async def payload(self, group_id: str) -> bytes | None:
        return await self._read(lambda tx: tx.payloads.get(self._run_id, GroupId(group_id)))

    async def manifest(self, step: int) -> BatchManifest:
        found = await self._read(lambda tx: tx.batches.get(self._run_id, step))
        if found is None:
            raise NotFoundError(f"run {self._run_id}: batch {step} is not decided")
        return found.manifest

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

    async def producers(self) -> tuple[Producer, ...]:
        return tuple(map(_producer, await self._read(lambda tx: tx.producers.all(self._run_id))))

    async def audit(self) -> Audit:
        report, self._audited = await self._read(lambda tx: audit_since(tx, self._run_id, self._audited))
        return _audit(report)

    async def _read(self, work: Callable[[Transaction], T]) -> T:
        def read() -> T:
            with open_reader(self._store_url) as reader:
                return reader.read_now(work)

        return await asyncio.to_thread(read)


class HttpSource:
    """A run of a ledger service. Satisfies `dashboard.source.LedgerSource`."""

    most_groups = wire.MAX_LISTED

    def __init__(self, client: LedgerClient) -> None:
        self._client = client

    async def status(self) -> LedgerStatus:
        return await self._client.status()

    async def groups(self, *, start: int, limit: int) -> tuple[GroupRow, ...]:
        return tuple(map(_row_of_view, await self._client.groups(start=start, limit=limit)))

    async def changes(self, *, after: int | None, limit: int) -> Changes:
        found = await self._client.changes(after=after, limit=limit)
        return Changes(next=found.next, is_complete=found.is_complete, groups=tuple(map(_row_of_view, found.groups)))

    async def history(self, group_id: str) -> GroupTimeline:
        found = await self._client.explain(GroupId(group_id))
        return GroupTimeline(
            group=_row_of_view(found.group), moves=tuple(map(_move, found.moves)), sentences=found.sentences
        )

    async def payload(self, group_id: str) -> bytes | None:
        try:
            return await self._client.payload(GroupId(group_id))
        except NotFoundError:
            return None

    async def manifest(self, step: int) -> BatchManifest:
        return await self._client.manifest(step)

    async def publications(self, *, start: int, limit: int) -> tuple[Publication, ...]:
        return await self._client.publications(start=start, limit=limit)

    async def actions(self, *, start: int, limit: int, target: str | None = None) -> tuple[Action, ...]:
        return await self._client.actions(start=start, limit=limit, target=target)

    async def producers(self) -> tuple[Producer, ...]:
        return tuple(map(_producer, await self._client.producers()))

    async def audit(self) -> Audit:
        return _audit(await self._client.audit())


COLUMNS = [{"outcome_json": "outcome"}.get(name, name) for name in GroupRow.__struct_fields__]
PUBLICATIONS, HAS_PAYLOAD = COLUMNS.index("publications"), COLUMNS.index("has_payload")


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


def _move(move: MoveRecord | wire.MoveView) -> Move:
    return Move(at=move.at, from_state=move.from_state, to_state=move.to_state, note=move.note, by=move.by)


def _producer(producer: ProducerRecord | wire.ProducerView) -> Producer:
    return Producer(
        name=producer.name,
        weight=producer.weight,
        min_share=producer.min_share,
        credit=producer.credit,
        num_batched=producer.num_batched,
    )


def _audit(report: AuditReport | wire.AuditView) -> Audit:
    return Audit(
        ok=report.ok,
        opened=report.opened,
        law=report.law,
        dropped=report.dropped,
        steps=report.steps,
        max_lag=report.max_lag,
        violations=report.violations,
    )
