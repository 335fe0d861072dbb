"""Records as people and programs outside see them."""

from collections.abc import Sequence

import msgspec

from rollbook.contracts.group import GroupOutcome
from rollbook.ledger.http import wire
from rollbook.ledger.records import GroupRecord, MoveRecord, ProducerRecord
from rollbook.ledger.tools.audit import AuditReport


def group_view(group: GroupRecord) -> wire.GroupView:
    return wire.GroupView(
        group_id=group.group_id,
        task_id=group.task_id,
        draw=group.draw,
        origin=group.origin.value,
        state=group.state.value,
        sequence=group.sequence,
        opened_at=group.opened_at,
        attempt=group.attempt,
        owner=group.owner,
        producer=group.producer,
        admission_version=group.admission_version,
        publications=group.publications,
        oldest_version=group.oldest_version,
        step=group.step,
        drop_reason=group.drop_reason,
        payload_bytes=group.payload_bytes,
        has_payload=group.has_payload,
        outcome=None if group.outcome is None else msgspec.json.decode(group.outcome, type=GroupOutcome),
    )


def life_view(group: GroupRecord, moves: Sequence[MoveRecord], sentences: Sequence[str]) -> wire.Life:
    told = tuple(
        wire.MoveView(
            at=move.at,
            from_state=None if move.from_state is None else move.from_state.value,
            to_state=move.to_state.value,
            note=move.note,
            by=move.by,
        )
        for move in moves
    )
    return wire.Life(group=group_view(group), moves=told, sentences=tuple(sentences))


def producer_view(producer: ProducerRecord) -> wire.ProducerView:
    return wire.ProducerView(
        name=producer.name,
        weight=producer.weight,
        min_share=producer.min_share,
        credit=producer.credit,
        num_batched=producer.num_batched,
    )


def audit_view(report: AuditReport) -> wire.AuditView:
    return wire.AuditView(
        run_id=report.run_id,
        ok=report.ok,
        opened=report.opened,
        law=dict(report.law),
        dropped=dict(report.dropped),
        steps=report.steps,
        max_lag=report.max_lag,
        max_head_offpolicy_versions=report.max_head_offpolicy_versions,
        violations=report.violations,
    )
