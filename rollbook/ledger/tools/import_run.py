"""A run into a ledger, from the JSON lines of `export`. All of it or nothing, and only if it adds up."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError
from rollbook.ledger.atropos.tables import AtroposTables
from rollbook.ledger.store import Store, Transaction
from rollbook.ledger.tools.audit import audit_run
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
    of_run,
)

GROUPS_AT_ONCE = 64
"""Bounds what is in memory, whatever the length of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    run_id: RunId
    groups: int
    payloads: int
    steps: int


async def import_jsonl(store: Store, source: Path, *, as_run: RunId | None = None) -> ImportReport:
    """Write the run of a file into a store that does not know it, under its own name or another.

    One transaction, audited before it is committed. Other writers of the store wait meanwhile.
    """
    return await store.write(lambda tx: _Import(tx, source, as_run).run())


class _Import:
    def __init__(self, tx: Transaction, source: Path, as_run: RunId | None) -> None:
        self._tx = tx
        self._source = source
        self._run_id = as_run
        self._num_groups = self._num_payloads = 0

    def run(self) -> ImportReport:
        for line in _read(self._source):
            self._write(line)
        if self._run_id is None:
            raise RunError(f"{self._source} is empty: there is no run in it")
        report = audit_run(self._tx, self._run_id)
        if not report.ok:
            raise RunError(
                f"{self._source}: the run does not add up and was not imported: {report.violations[0]}"
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
            raise RunError(f"{self._source} does not begin with a run: it is no export of a ledger")
        match line:
            case GroupLine():
                self._write_group(line, run_id)
            case BatchLine():
                tx.batches.put(of_run(line.record, run_id))
            case StepLine():
                tx.steps.put(of_run(line.record, run_id))
            case PublicationLine():
                tx.publications.put(of_run(line.record, run_id))
            case AtroposLine():
                tables = AtroposTables(tx)
                tables.create()
                tables.put_record(of_run(line.record, run_id))
                for env in line.envs:
                    tables.put_env(of_run(env, run_id))
                tables.put_queued([of_run(shelved, run_id) for shelved in line.shelved])
            case EndLine():
                pass

    def _begin(self, line: RunLine) -> None:
        if line.format != FORMAT:
            raise RunError(f"{self._source} has format {line.format}, this release reads {FORMAT}")
        run_id = self._run_id = self._run_id or line.record.run_id
        tx = self._tx
        if tx.runs.get(run_id) is not None:
            raise RunError(f"the ledger has a run {run_id!r} already: import under another name")
        tx.runs.put(of_run(line.record, run_id))
        for kind, number in line.drops.items():
            for _ in range(number):
                tx.runs.count_drop(run_id, kind)
        for position, is_settled in line.positions:
            tx.positions.put(run_id, position, is_settled=is_settled)
        for owner in line.owners:
            tx.owners.put(of_run(owner, run_id))
        for producer in line.producers:
            tx.producers.put(of_run(producer, run_id))

    def _write_group(self, line: GroupLine, run_id: RunId) -> None:
        tx = self._tx
        tx.groups.put(of_run(line.record, run_id))
        for move in line.moves:
            tx.history.add(of_run(move, run_id))
        self._num_groups += 1
        if self._num_groups % GROUPS_AT_ONCE == 0:
            tx.groups.oldest_dispatched(
                run_id
            )  # a look at the groups: what the store keeps in memory until then is written
        if line.payload is not None:
            tx.payloads.put(run_id, line.record.group_id, line.payload)
            self._num_payloads += 1


def _read(source: Path) -> Iterator[AnyLine]:
    """Line by line, to the last one, which must say that it is the last."""
    decoder = msgspec.json.Decoder(AnyLine)
    number, end = 0, None
    try:
        with source.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if end is not None:
                    raise RunError(f"{source}:{number}: there is something after the end")
                line: AnyLine = decoder.decode(raw)
                if isinstance(line, EndLine):
                    end = line
                yield line
    except msgspec.MsgspecError as error:
        raise RunError(f"{source}:{number}: not a line of an exported ledger: {error}") from error
    except OSError as error:
        raise RunError(f"{source} cannot be read: {error.strerror}") from error
    if number and (end is None or end.lines != number - 1):
        raise RunError(f"{source} was cut short: it ends after line {number} without its last line; export it again")
