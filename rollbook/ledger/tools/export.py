"""A run out of the ledger, as JSON lines: complete, readable, and the way into another store (`import_`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError
from rollbook.ledger.atropos.tables import AtroposTables
from rollbook.ledger.rules.run_transaction import find_run
from rollbook.ledger.store import Reader, Transaction
from rollbook.ledger.tools.jsonl import (
    FORMAT,
    AnyLine,
    AtroposLine,
    BatchLine,
    EndLine,
    GroupLine,
    PublicationLine,
    RunLine,
    StepLine,
)
from rollbook.ledger.tools.plain_payload import plain_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    run_id: RunId
    groups: int
    rows: int
    """Lines of JSON, or sequences of a Parquet file."""
    bytes_written: int
    files: tuple[Path, ...]


def export_jsonl(reader: Reader, run_id: RunId, target: Path, *, is_readable: bool = True) -> ExportReport:
    """Write a run to a new file, as it stands at one moment. With `is_readable` each group's samples are spelt out, too."""
    refuse_existing(target)

    def work(tx: Transaction) -> ExportReport:
        encoder = msgspec.json.Encoder()
        num_lines = num_groups = 0
        with target.open("xb") as file:
            for line in _lines(tx, run_id, is_readable=is_readable):
                file.write(encoder.encode(line))
                file.write(b"\n")
                num_lines += 1
                num_groups += isinstance(line, GroupLine)
            file.write(encoder.encode(EndLine(lines=num_lines)) + b"\n")
        return ExportReport(
            run_id=run_id,
            groups=num_groups,
            rows=num_lines + 1,
            bytes_written=target.stat().st_size,
            files=(target,),
        )

    try:
        return reader.read_now(work)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def refuse_existing(target: Path) -> None:
    if target.exists():
        raise RunError(f"{target} exists: nothing is written over, name another one or remove it")


def _lines(tx: Transaction, run_id: RunId, *, is_readable: bool) -> Iterator[AnyLine]:
    run = find_run(tx, run_id)
    yield RunLine(
        format=FORMAT,
        record=run,
        drops=tx.runs.drops(run_id),
        positions=tx.positions.all(run_id),
        owners=tx.owners.alive(run_id),
        producers=tx.producers.all(run_id),
    )
    for group in tx.groups.each(run_id):
        payload = tx.payloads.get(run_id, group.group_id) if group.has_payload else None
        yield GroupLine(
            record=group,
            moves=tx.history.of_group(run_id, group.group_id),
            payload=payload,
            samples=plain_samples(payload) if payload is not None and is_readable else None,
        )
    for batch in tx.batches.each(run_id):
        yield BatchLine(record=batch)
    for step in tx.steps.all(run_id):
        yield StepLine(record=step)
    for publication in tx.publications.all(run_id):
        yield PublicationLine(record=publication)
    yield from _atropos(tx, run_id)


def _atropos(tx: Transaction, run_id: RunId) -> Iterator[AtroposLine]:
    tables = AtroposTables(tx)
    record = tables.stored_record(run_id) if tables.exist() else None
    if record is not None:
        yield AtroposLine(record=record, envs=tables.envs(run_id), shelved=tables.all_queued(run_id))
