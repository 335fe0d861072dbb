"""Read-only access to the record of a run: audit, groups, recorded batches. Works during a run and after it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from rollbook.contracts.admission import LedgerStatus, RunId
from rollbook.contracts.batch import BatchManifest, EncodedBatch, TrainingBatch
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupState, PromptGroup
from rollbook.contracts.group_codec import decode_payload
from rollbook.ledger.client.blocking import SyncLedgerClient, open_sync_ledger_client
from rollbook.ledger.http import wire
from rollbook.ledger.records import GroupRecord, MoveRecord, StepRecord
from rollbook.ledger.rules.run_transaction import find_run
from rollbook.ledger.rules.runs import status
from rollbook.ledger.store import Reader, Transaction
from rollbook.ledger.stores.registry import open_reader
from rollbook.ledger.tools.audit import audit_since
from rollbook.ledger.tools.audit_findings import AuditMark, AuditReport
from rollbook.ledger.tools.explain import explain
from rollbook.run.config.run import RunConfig, load_resolved_config
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.ledger_clients import external_token, run_settings, store_url

__all__ = ["AuditReport", "RunRecordReader", "audit", "open_run"]

QUERY_S = 10.0
"""A person waits for the response."""
Group = tuple[GroupRecord, PromptGroup | None, list[MoveRecord]]


class RunRecordReader(Protocol):
    """The ledger and config of one run."""

    @property
    def directory(self) -> RunDirectory: ...
    @property
    def config(self) -> RunConfig: ...
    @property
    def run_id(self) -> RunId: ...
    def audit(self, *, full: bool = False) -> AuditReport:
        """Check what changed since the last audit without violations; with `full`, everything."""

    def status(self) -> LedgerStatus: ...
    def explain(self, group_id: GroupId) -> list[str]:
        """The history of a group in sentences."""

    def groups(self, *, state: GroupState | None, limit: int, start: int = 0) -> list[GroupRecord]:
        """A page of groups, from the admission sequence number `start` on."""

    def group(self, group_id: GroupId) -> Group:
        """The record of a group, its samples where they are still stored, and its history."""

    def steps(self) -> list[StepRecord]: ...
    def manifest(self, step: int) -> BatchManifest: ...
    def batches(self, until: int, *, first: int = 1) -> Iterator[TrainingBatch]:
        """Batches `first` to `until` as they were decided."""


def last_audit(directory: RunDirectory) -> AuditMark | None:
    """The last audit of a run, if it found no violation."""
    try:
        return json_decoder(AuditMark).decode(directory.audit_file.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Reads the store. Satisfies `RunRecordReader`."""

    directory: RunDirectory
    config: RunConfig
    reader: Reader

    @property
    def run_id(self) -> RunId:
        return RunId(self.config.run.name)

    def audit(self, *, full: bool = False) -> AuditReport:
        before = None if full else last_audit(self.directory)
        report, mark = self.reader.read_now(lambda tx: audit_since(tx, self.run_id, before))
        # Nothing is lost if it cannot be written: the next audit reads more.
        with suppress(OSError):
            if mark is None:
                self.directory.audit_file.unlink(missing_ok=True)
            else:
                write_json(self.directory.audit_file, msgspec.to_builtins(mark))
        return report

    def status(self) -> LedgerStatus:
        return self.reader.read_now(lambda tx: status(tx, self.run_id))

    def explain(self, group_id: GroupId) -> list[str]:
        return explain(self.reader, self.run_id, group_id)

    def groups(self, *, state: GroupState | None, limit: int, start: int = 0) -> list[GroupRecord]:
        return self.reader.read_now(lambda tx: tx.groups.page(self.run_id, start=start, limit=limit, state=state))

    def group(self, group_id: GroupId) -> Group:
        def read(tx: Transaction) -> Group:
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

    def manifest(self, step: int) -> BatchManifest:
        record = self.reader.read_now(lambda tx: tx.batches.get(self.run_id, step))
        if record is None:
            raise RunError(f"run {self.run_id}: batch {step} was never decided")
        return record.manifest

    def batches(self, until: int, *, first: int = 1) -> Iterator[TrainingBatch]:
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
        payloads = tuple(body for body in bodies if body is not None)
        return EncodedBatch(manifest=record.manifest, payloads=payloads, limits=limits).decode()


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """Reads over HTTP, from the service at `ledger.url`. Satisfies `RunRecordReader`."""

    directory: RunDirectory
    config: RunConfig
    client: SyncLedgerClient

    @property
    def run_id(self) -> RunId:
        return RunId(self.config.run.name)

    def audit(self, *, full: bool = False) -> AuditReport:
        return audit_report(self.client.audit(full=full))

    def status(self) -> LedgerStatus:
        return self.client.status()

    def explain(self, group_id: GroupId) -> list[str]:
        return list(self.client.explain(group_id).sentences)

    def groups(self, *, state: GroupState | None, limit: int, start: int = 0) -> list[GroupRecord]:
        found: list[GroupRecord] = []
        while len(found) < limit:
            wanted = min(limit - len(found), wire.MAX_LISTED)
            page = self.client.groups(state, start=start, limit=wanted)
            found += [self._group(view) for view in page]
            if len(page) < wanted:
                break
            start = page[-1].sequence + 1
        return found

    def group(self, group_id: GroupId) -> Group:
        history = self.client.explain(group_id)
        group = None
        if history.group.has_payload:
            group = decode_payload(self.client.payload(group_id), group_id)
        moves = [
            MoveRecord(run_id=self.run_id, group_id=group_id, **msgspec.structs.asdict(move)) for move in history.moves
        ]
        return self._group(history.group), group, moves

    def steps(self) -> list[StepRecord]:
        found: list[StepRecord] = []
        start, known = 0, set[tuple[int, int]]()
        while True:
            # A page may end between two acknowledgements of one step, so the next one begins with that step again.
            page = [view for view in self.client.steps(start=start) if (view.step, view.epoch) not in known]
            if not page:
                return found
            found += [StepRecord(run_id=self.run_id, **msgspec.structs.asdict(view)) for view in page]
            known = {(view.step, view.epoch) for view in page}
            start = page[-1].step

    def manifest(self, step: int) -> BatchManifest:
        return self.client.manifest(step)

    def batches(self, until: int, *, first: int = 1) -> Iterator[TrainingBatch]:
        limits = run_settings(self.config, self.directory).limits
        for step in range(first, until + 1):
            manifest = self.client.manifest(step)
            payloads = tuple(self.client.payload(entry.group_id) for entry in manifest.entries)
            yield EncodedBatch(manifest=manifest, payloads=payloads, limits=limits).decode()

    def _group(self, view: wire.GroupView) -> GroupRecord:
        known = msgspec.structs.asdict(view)
        known["outcome"] = None if view.outcome is None else msgspec.json.encode(view.outcome)
        return GroupRecord(run_id=self.run_id, position=None, **known)


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
        violations=view.violations,
        known=view.known,
        known_at=view.known_at,
    )


def audit(path: str | Path, *, full: bool = False) -> AuditReport:
    """Check the ledger of a run directory: the conservation law, every group's history, batches, steps, payloads and lag.

    Works during a run and after it. `ok` of the report says whether everything is accounted for; `violations` lists what is not.
    Durable and dropped groups that an earlier audit has checked are not read again, unless `full`.
    """
    with open_run(Path(path)) as run:
        return run.audit(full=full)


@contextmanager
def open_run(path: Path) -> Iterator[RunRecordReader]:
    """Open a run directory for reading."""
    directory = RunDirectory(path.resolve())
    loaded = load_resolved_config(directory)
    config = loaded.config
    if config.ledger.url is None:
        with open_reader(store_url(config.ledger, directory)) as reader:
            yield StoredRun(directory, config, reader)
        return
    token = external_token(loaded)
    with open_sync_ledger_client(config.ledger.url, config.run.name, request_s=QUERY_S, token=token) as client:
        yield RemoteRun(directory, config, client)
