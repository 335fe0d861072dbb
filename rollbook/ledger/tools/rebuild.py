"""Rebuilds the database of a SQLite store from its journal, when the database or its write-ahead log is damaged or missing.

The journal has every row up to the last acknowledged step, and says where payloads are. Groups that were opened or submitted after
that step are not restored; a resumed run plays them again. The damaged files are kept.
"""

from dataclasses import dataclass, field
from pathlib import Path

from rollbook.contracts.admission import AuditReport, RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupState
from rollbook.ledger.journal import JOURNAL, JournalMark, JournalMarks, read_journal, read_marks, write_marks
from rollbook.ledger.record_lines import ActionLine, BatchLine, GroupLine, PublicationLine, RunLine, StepLine
from rollbook.ledger.records import MoveRecord
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.stores.sqlite.replacement import NewDatabase, replace_database
from rollbook.ledger.stores.sqlite.store import open_readonly
from rollbook.ledger.tools.audit import audit, audit_run


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildReport:
    runs: tuple[AuditReport, ...]
    """The audit of each rebuilt run."""
    old_files: Path

    @property
    def ok(self) -> bool:
        return all(report.ok for report in self.runs)


@dataclass(slots=True)
class _Rows:
    """The last version of each row of the journal."""

    runs: dict[RunId, RunLine] = field(default_factory=dict)
    groups: dict[tuple[RunId, GroupId], GroupLine] = field(default_factory=dict)
    moves: list[MoveRecord] = field(default_factory=list)
    others: dict[tuple[object, ...], ActionLine | BatchLine | StepLine | PublicationLine] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path) -> "_Rows":
        rows = cls()
        for line in read_journal(directory):
            match line:
                case RunLine(record=run):
                    rows.runs[run.run_id] = line
                case GroupLine(record=group, moves=moves):
                    rows.groups[group.run_id, group.group_id] = line
                    rows.moves += moves
                case ActionLine(record=action):
                    rows.others["action", action.run_id, action.number] = line
                case BatchLine(record=batch):
                    rows.others["batch", batch.run_id, batch.manifest.step] = line
                case StepLine(record=step):
                    rows.others["step", step.run_id, step.step, step.epoch] = line
                case PublicationLine(record=publication):
                    rows.others["publication", publication.run_id, publication.id] = line
        return rows


def rebuild(directory: Path) -> RebuildReport:
    """Rebuild the database in this directory. Raises `RunError` if it needs no rebuild or has no journal.

    Needs exclusive access (`only_service`).
    """
    marks = read_marks(directory)
    if not marks.runs:
        raise RunError(f"{directory} has no {JOURNAL} with an acknowledged step: restore the directory from a copy")
    if _is_intact(directory):
        raise RunError(f"the ledger in {directory} passes its audit and was not changed")
    rows = _Rows.of(directory)
    if not rows.runs:
        raise RunError(f"{directory / JOURNAL} is damaged: no entry of it can be read")

    def write(database: NewDatabase) -> list[tuple[AuditReport, JournalMark]]:
        _write(database, rows)
        tx = database.tx
        return [(audit_run(tx, run_id), _mark(database, run_id)) for run_id in rows.runs]

    found, old_files = replace_database(directory, write)
    runs = {report.run_id: mark for report, mark in found}
    write_marks(directory, JournalMarks(length=marks.length, runs=runs))
    return RebuildReport(runs=tuple(report for report, _ in found), old_files=old_files)


def _is_intact(directory: Path) -> bool:
    try:
        with open_readonly(directory, is_alone=True) as reader:
            run_ids = reader.read_now(lambda tx: tx.runs.ids())
            return all(audit(reader, run_id).ok for run_id in run_ids)
    except StoreFaultError:
        return False


def _write(database: NewDatabase, rows: _Rows) -> None:
    for line in rows.runs.values():
        _write_run(database, line)
    for group in rows.groups.values():
        _write_group(database, group, rows.runs[group.record.run_id].record.payload_floor)
    tx = database.tx
    for move in rows.moves:
        tx.history.add(move)
    for other in rows.others.values():
        match other:
            case ActionLine(record=action):
                tx.actions.add(action)
            case BatchLine(record=batch):
                tx.batches.put(batch)
            case StepLine(record=step):
                tx.steps.put(step)
            case PublicationLine(record=publication):
                tx.publications.put(publication)


def _write_run(database: NewDatabase, line: RunLine) -> None:
    tx, run_id = database.tx, line.record.run_id
    tx.runs.put(line.record)
    for kind, number in line.drops.items():
        tx.runs.count_drop(run_id, kind, num=number, missing=line.missing.get(kind, 0))
    for position, unsettled in line.positions:
        tx.positions.put(run_id, position, unsettled=unsettled)
    for owner in line.owners:
        tx.owners.put(owner)
    for producer in line.producers:
        tx.producers.put(producer)


def _write_group(database: NewDatabase, group: GroupLine, payload_floor: int) -> None:
    record = group.record
    if record.has_payload and not _is_payload_kept(database, group, payload_floor):
        record = record.changed(has_payload=False)
    if record.has_payload and group.place is not None:
        digest = record.payload_digest or ""
        database.refer_to_payload(record.run_id, record.group_id, group.place, record.payload_bytes, digest)
    database.tx.groups.put(record)


def _is_payload_kept(database: NewDatabase, group: GroupLine, payload_floor: int) -> bool:
    """Deleting a payload is not in the journal: it is deleted after a checkpoint, or missing from its file."""
    record = group.record
    if record.state is GroupState.DURABLE:
        return (record.step or 0) > payload_floor
    if record.state is GroupState.DROPPED:
        return group.place is not None and database.has_payload(
            group.place, record.payload_bytes, record.payload_digest or ""
        )
    return True


def _mark(database: NewDatabase, run_id: RunId) -> JournalMark:
    run = database.tx.runs.get(run_id)
    assert run is not None
    return JournalMark(
        number=database.tx.history.last_number(run_id),
        epoch=run.epoch,
        acknowledged=run.epoch_acknowledged,
        decided=run.last_decided,
        publications=run.next_publication,
        actions=run.next_action,
    )
