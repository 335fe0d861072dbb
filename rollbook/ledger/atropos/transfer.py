"""Exports and imports what the Atropos API stores about a run."""

import msgspec

from rollbook.contracts.admission import RunId
from rollbook.ledger.atropos.records import AtroposRecord, EnvRecord, QueuedGroup
from rollbook.ledger.atropos.tables import NAME, AtroposTables
from rollbook.ledger.store import Transaction


class _RunData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    record: AtroposRecord
    envs: list[EnvRecord]
    queued: list[QueuedGroup]


class AtroposExtension:
    """Implements `tools.jsonl.RunExtension`."""

    name = NAME

    def export_run(self, tx: Transaction, run_id: RunId) -> bytes | None:
        tables = AtroposTables(tx)
        record = tables.stored_record(run_id) if tables.exist() else None
        if record is None:
            return None
        return msgspec.json.encode(_RunData(record, tables.envs(run_id), tables.all_queued(run_id)))

    def import_run(self, tx: Transaction, run_id: RunId, data: bytes) -> None:
        found = msgspec.json.decode(data, type=_RunData)
        tables = AtroposTables(tx)
        tables.create()
        tables.put_record(found.record.changed(run_id=run_id))
        for env in found.envs:
            tables.put_env(env.changed(run_id=run_id))
        tables.put_queued([group.changed(run_id=run_id) for group in found.queued])
