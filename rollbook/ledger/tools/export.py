"""Exports a run as JSON lines: complete, readable, and the input of `import_run`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.group_codec import decode_payload
from rollbook.contracts.trajectory import RolloutSample
from rollbook.ledger.record_lines import (
    FORMAT,
    ActionLine,
    AnyLine,
    BatchLine,
    EndLine,
    ExtensionLine,
    GroupLine,
    PublicationLine,
    RunExtension,
    RunLine,
    StepLine,
)
from rollbook.ledger.rules.run_transaction import find_run
from rollbook.ledger.store import Reader, Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    run_id: RunId
    groups: int
    rows: int
    """JSON lines, or sequences of a Parquet file."""
    bytes_written: int
    files: tuple[Path, ...]


def export_jsonl(
    reader: Reader, run_id: RunId, target: Path, *, extensions: Sequence[RunExtension] = ()
) -> ExportReport:
    """Write the current state of a run to a new file."""
    reject_existing(target)

    def work(tx: Transaction) -> ExportReport:
        encoder = msgspec.json.Encoder(enc_hook=_plain)
        num_lines = num_groups = 0
        with target.open("xb") as file:
            for line in _lines(tx, run_id, extensions):
                file.write(encoder.encode(line) + b"\n")
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


def reject_existing(target: Path) -> None:
    if target.exists():
        raise RunError(f"{target} exists and is not overwritten: choose another name or remove it")


def readable_samples(payload: bytes, group_id: GroupId) -> tuple[RolloutSample, ...] | None:
    """The samples of a payload; None if they cannot be decoded. The payload itself is exported in any case."""
    try:
        return decode_payload(payload, group_id).samples
    except RunError:
        return None


def _lines(tx: Transaction, run_id: RunId, extensions: Sequence[RunExtension]) -> Iterator[AnyLine]:
    run = find_run(tx, run_id)
    yield RunLine(
        format=FORMAT,
        record=run,
        drops=tx.runs.drops(run_id),
        missing=tx.runs.missing(run_id),
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
            samples=None if payload is None else readable_samples(payload, group.group_id),
        )
    for action in tx.actions.page(run_id, limit=run.next_action):
        yield ActionLine(record=action)
    for batch in tx.batches.each(run_id):
        yield BatchLine(record=batch)
    for step in tx.steps.each(run_id):
        yield StepLine(record=step)
    for publication in tx.publications.each(run_id):
        yield PublicationLine(record=publication)
    for extension in extensions:
        data = extension.export_run(tx, run_id)
        if data is not None:
            yield ExtensionLine(name=extension.name, data=msgspec.Raw(data))


def _plain(value: object) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be exported")
