"""Imports a run from the JSON lines of `export`: completely or not at all, and only if it passes the audit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollbook.contracts.admission import RunId
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import RunError
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
from rollbook.ledger.rules.runs import require_run_id
from rollbook.ledger.store import Store, Transaction
from rollbook.ledger.tools.audit import audit_run

GROUPS_AT_ONCE = 64
"""Groups that the store buffers before they are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    run_id: RunId
    groups: int
    payloads: int
    steps: int


async def import_jsonl(
    store: Store, source: Path, *, as_run: RunId | None = None, extensions: Sequence[RunExtension] = ()
) -> ImportReport:
    """Import the run of a file under its own name or another. The store must not have a run of that name.

    It is one transaction, audited before the commit. Other writers of the store wait for it.
    """
    return await store.write(lambda tx: _Import(tx, source, as_run, extensions).run())


class _Import:
    def __init__(self, tx: Transaction, source: Path, as_run: RunId | None, extensions: Sequence[RunExtension]) -> None:
        self._tx = tx
        self._source = source
        self._run_id = as_run
        self._extensions = {extension.name: extension for extension in extensions}
        self._num_groups = self._num_payloads = 0

    def run(self) -> ImportReport:
        for line in _read(self._source):
            self._write(line)
        if self._run_id is None:
            raise RunError(f"{self._source} is empty")
        report = audit_run(self._tx, self._run_id)
        if not report.ok:
            raise RunError(
                f"{self._source}: the run does not pass the audit and was not imported: {report.violations[0]}"
                + (f" (and {len(report.violations) - 1} more)" if len(report.violations) > 1 else "")
            )
        self._tx.sync_to_disk()
        self._tx.announce(self._run_id)
        return ImportReport(
            run_id=self._run_id, groups=self._num_groups, payloads=self._num_payloads, steps=report.steps
        )

    def _write(self, line: AnyLine) -> None:
        if isinstance(line, RunLine):
            self._begin(line)
            return
        run_id, tx = self._run_id, self._tx
        if run_id is None:
            raise RunError(f"{self._source} does not begin with a run: it is not an exported ledger")
        match line:
            case GroupLine():
                self._write_group(line, run_id)
            case ActionLine():
                tx.actions.add(line.record.changed(run_id=run_id))
            case BatchLine():
                tx.batches.put(line.record.changed(run_id=run_id))
            case StepLine():
                tx.steps.put(line.record.changed(run_id=run_id))
            case PublicationLine():
                tx.publications.put(line.record.changed(run_id=run_id))
            case ExtensionLine():
                if line.name not in self._extensions:
                    raise RunError(f"{self._source} has data of {line.name!r}, which this command cannot import")
                self._extensions[line.name].import_run(tx, run_id, bytes(line.data))
            case EndLine():
                pass

    def _begin(self, line: RunLine) -> None:
        if line.format != FORMAT:
            raise RunError(f"{self._source} has format {line.format}; supported is {FORMAT}")
        run_id = self._run_id = self._run_id or line.record.run_id
        require_run_id(run_id)
        tx = self._tx
        if tx.runs.get(run_id) is not None:
            raise RunError(f"the ledger already has a run {run_id!r}: import it under another name")
        tx.runs.put(line.record.changed(run_id=run_id))
        for kind, number in line.drops.items():
            tx.runs.count_drop(run_id, kind, num=number, missing=line.missing.get(kind, 0))
        for position, unsettled in line.positions:
            tx.positions.put(run_id, position, unsettled=unsettled)
        for owner in line.owners:
            tx.owners.put(owner.changed(run_id=run_id))
        for producer in line.producers:
            tx.producers.put(producer.changed(run_id=run_id))

    def _write_group(self, line: GroupLine, run_id: RunId) -> None:
        tx = self._tx
        tx.groups.put(line.record.changed(run_id=run_id))
        for move in line.moves:
            tx.history.add(move.changed(run_id=run_id))
        self._num_groups += 1
        if self._num_groups % GROUPS_AT_ONCE == 0:
            tx.history.last_number(run_id)  # a read of the history makes the store write all that it buffers
        if line.payload is not None:
            tx.payloads.put(run_id, line.record.group_id, line.payload)
            self._num_payloads += 1


def _read(source: Path) -> Iterator[AnyLine]:
    """All lines. Raises if the last line is missing or another line follows it."""
    decoder = json_decoder(AnyLine)
    number, end = 0, None
    try:
        with source.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if end is not None:
                    raise RunError(f"{source}:{number}: there is a line after the end")
                line: AnyLine = decoder.decode(raw)
                if isinstance(line, EndLine):
                    end = line
                yield line
    except msgspec.MsgspecError as error:
        raise RunError(f"{source}:{number}: not a line of an exported ledger: {error}") from error
    except OSError as error:
        raise RunError(f"{source} cannot be read: {error.strerror}") from error
    if number and (end is None or end.lines != number - 1):
        raise RunError(f"{source} is truncated after line {number}: export it again")
