"""Read-only access to a run directory: audit, groups, recorded batches. Works during a run and after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollbook.contracts.admission import LedgerStatus, RunId
from rollbook.contracts.batch import BatchEntry, TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupState, PromptGroup
from rollbook.contracts.group_codec import decode_payload
from rollbook.ledger.records import GroupRecord, MoveRecord, StepRecord
from rollbook.ledger.rules.run_transaction import find_run
from rollbook.ledger.rules.runs import status
from rollbook.ledger.store import Reader, Transaction
from rollbook.ledger.stores.sqlite.store import open_readonly
from rollbook.ledger.tools.audit import AuditReport
from rollbook.ledger.tools.audit import audit as audit_ledger
from rollbook.run.config.run import RunConfig, load_resolved_config
from rollbook.run.directory import RunDirectory

__all__ = ["AuditReport", "RunRecordReader", "audit", "open_run"]


@dataclass(frozen=True, slots=True)
class RunRecordReader:
    """The ledger and config of one run."""

    directory: RunDirectory
    config: RunConfig
    reader: Reader

    @property
    def run_id(self) -> RunId:
        return RunId(self.config.run.name)

    def audit(self) -> AuditReport:
        return audit_ledger(self.reader, self.run_id)

    def status(self) -> LedgerStatus:
        return self.reader.read_now(lambda tx: status(tx, self.run_id))

    def groups(self, *, state: GroupState | None, limit: int, start: int = 0) -> list[GroupRecord]:
        """A page of groups, from the admission sequence number `start` on."""
        return self.reader.read_now(lambda tx: tx.groups.page(self.run_id, start=start, limit=limit, state=state))

    def group(self, group_id: GroupId) -> tuple[GroupRecord, PromptGroup | None, list[MoveRecord]]:
        """The record of a group, its samples where they are still stored, and its history."""

        def read(tx: Transaction) -> tuple[GroupRecord, PromptGroup | None, list[MoveRecord]]:
            record = tx.groups.get(self.run_id, group_id)
            if record is None:
                raise RunError(
                    f"run {self.run_id} has no group {group_id!r}; `rollbook inspect RUN --groups` lists them"
                )
            body = tx.payloads.get(self.run_id, group_id)
            return (
                record,
                None if body is None else decode_payload(body, group_id),
                tx.history.of_group(self.run_id, group_id),
            )

        return self.reader.read_now(read)

    def steps(self) -> list[StepRecord]:
        return self.reader.read_now(lambda tx: list(tx.steps.each(self.run_id)))

    def entry(self, step: int, group_id: GroupId) -> BatchEntry | None:
        """The entry of a group in the batch of `step`."""
        record = self.reader.read_now(lambda tx: tx.batches.get(self.run_id, step))
        entries = () if record is None else record.manifest.entries
        return next((entry for entry in entries if entry.group_id == group_id), None)

    def batches(self, until: int, *, first: int = 1) -> Iterator[TrainingBatch]:
        """Batches `first` to `until` as they were decided."""
        for step in range(first, until + 1):
            yield self.reader.read_now(lambda tx, step=step: self._batch(tx, step))  # type: ignore[misc]  # a lambda's default

    def _batch(self, tx: Transaction, step: int) -> TrainingBatch:
        record = tx.batches.get(self.run_id, step)
        if record is None:
            raise RunError(f"run {self.run_id}: batch {step} was never decided")
        bodies = [tx.payloads.get(self.run_id, entry.group_id) for entry in record.manifest.entries]
        if any(body is None for body in bodies):
            raise RunError(
                f"run {self.run_id}: the payloads of batch {step} were deleted; set ledger.keep_payloads = true to replay a run"
            )
        limits = find_run(tx, self.run_id).settings.limits
        return TrainingBatch.decode(record.manifest, [body for body in bodies if body is not None], limits)


def audit(path: str | Path) -> AuditReport:
    """Check the ledger of a run directory: the conservation law, every group's history, batches, steps, payloads and lag.

    Works during a run and after it. `ok` of the report says whether everything is accounted for; `violations` lists what is not.
    """
    with open_run(Path(path)) as run:
        return run.audit()


@contextmanager
def open_run(path: Path) -> Iterator[RunRecordReader]:
    """Open a run directory for reading."""
    directory = RunDirectory(path.resolve())
    config = load_resolved_config(directory).config
    with open_readonly(directory.ledger) as reader:
        yield RunRecordReader(directory, config, reader)
