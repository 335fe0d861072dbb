"""A run as Parquet files, for analysis: one row a group, and one row a sequence. The only door of pyarrow."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.contracts.admission import RunId
from rollbook.ledger.records import GroupRecord
from rollbook.ledger.rules.run_transaction import find_run
from rollbook.ledger.store import Reader, Transaction
from rollbook.ledger.tools.export import ExportReport, refuse_existing
from rollbook.ledger.tools.plain_payload import plain_samples

GROUPS_AT_ONCE = 64
"""Groups in one row group: bounds the memory, whatever the length of the run."""

GROUPS_FILE, SEQUENCES_FILE = "groups.parquet", "sequences.parquet"
GROUP_COLUMNS = pa.schema(
    [
        *((name, pa.string()) for name in ("run_id", "group_id", "task_id", "origin", "state", "owner", "drop_reason")),
        *((name, pa.int64()) for name in ("draw", "position", "sequence", "attempt", "failures", "admission_version")),
        *((name, pa.int64()) for name in ("arrival", "oldest_version", "step", "payload_bytes")),
        ("opened_at", pa.float64()),
        ("publications", pa.list_(pa.int64())),
        ("payload_digest", pa.string()),
        ("producer", pa.string()),
        ("outcome", pa.string()),
    ]
)
SEQUENCE_COLUMNS = pa.schema(
    [
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("state", pa.string()),
        ("step", pa.int64()),
        ("sample", pa.int32()),
        ("row", pa.int32()),
        ("reward", pa.float64()),
        ("solved", pa.bool_()),
        ("finish_reason", pa.string()),
        ("invalid_cause", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("versions", pa.list_(pa.int32())),
        ("messages", pa.string()),
    ]
)


def export_parquet(reader: Reader, run_id: RunId, directory: Path) -> ExportReport:
    """Write `groups.parquet` and `sequences.parquet` into a new directory, as the run stands at one moment."""
    refuse_existing(directory)
    directory.mkdir(parents=True)
    files = (directory / GROUPS_FILE, directory / SEQUENCES_FILE)

    def work(tx: Transaction) -> tuple[int, int]:
        find_run(tx, run_id)
        with (
            pq.ParquetWriter(files[0], GROUP_COLUMNS, compression="zstd") as groups,
            pq.ParquetWriter(files[1], SEQUENCE_COLUMNS, compression="zstd") as sequences,
        ):
            return _write(tx, run_id, groups, sequences)

    num_groups, num_rows = reader.read_now(work)
    return ExportReport(
        run_id=run_id,
        groups=num_groups,
        rows=num_rows,
        bytes_written=sum(file.stat().st_size for file in files),
        files=files,
    )


def _write(tx: Transaction, run_id: RunId, groups: pq.ParquetWriter, sequences: pq.ParquetWriter) -> tuple[int, int]:
    num_groups = num_rows = 0
    remaining = iter(tx.groups.each(run_id))
    while some := list(islice(remaining, GROUPS_AT_ONCE)):
        groups.write_table(pa.Table.from_pylist([_group_row(group) for group in some], schema=GROUP_COLUMNS))
        rows = [row for group in some for row in _sequence_rows(tx, group)]
        if rows:
            sequences.write_table(pa.Table.from_pylist(rows, schema=SEQUENCE_COLUMNS))
        num_groups += len(some)
        num_rows += len(rows)
    return num_groups, num_rows


def _group_row(group: GroupRecord) -> dict[str, Any]:
    row = msgspec.structs.asdict(group)
    row["outcome"] = None if group.outcome is None else group.outcome.decode()
    return {name: row[name] for name in GROUP_COLUMNS.names}


def _sequence_rows(tx: Transaction, group: GroupRecord) -> Iterator[dict[str, Any]]:
    payload = tx.payloads.get(group.run_id, group.group_id) if group.has_payload else None
    if payload is None:
        return
    for number, sample in enumerate(plain_samples(payload)):
        messages = None if sample.messages is None else msgspec.json.encode(sample.messages).decode()
        for at, sequence in enumerate(sample.sequences):
            yield {
                "group_id": group.group_id,
                "task_id": group.task_id,
                "state": group.state.value,
                "step": group.step,
                "sample": number,
                "row": at,
                "reward": sample.reward,
                "solved": sample.solved,
                "finish_reason": sample.finish_reason,
                "invalid_cause": sample.invalid_cause,
                "messages": messages,
                **msgspec.structs.asdict(sequence),
            }
