"""Exports a run as Parquet files for analysis: one row per group and one row per sequence. The only module that imports pyarrow."""

import shutil
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
from rollbook.ledger.tools.export import ExportReport, readable_samples, reject_existing

GROUPS_AT_ONCE = 64
"""Groups in one row group. Limits the memory."""

GROUPS_FILE, SEQUENCES_FILE = "groups.parquet", "sequences.parquet"
GROUP_COLUMNS = pa.schema(
    [
        *((name, pa.string()) for name in ("run_id", "group_id", "task_id", "origin", "state", "owner", "drop_reason")),
        *((name, pa.int64()) for name in ("draw", "position", "sequence", "attempt", "failures", "admission_version")),
        *((name, pa.int64()) for name in ("arrival", "oldest_version", "newest_version", "step", "payload_bytes")),
        *((name, pa.int64()) for name in ("part", "num_samples", "expected_samples")),
        ("baseline", pa.list_(pa.float64())),
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
    """Write the current state of a run to `groups.parquet` and `sequences.parquet` in a new directory."""
    reject_existing(directory)
    directory.mkdir(parents=True)
    files = (directory / GROUPS_FILE, directory / SEQUENCES_FILE)

    def work(tx: Transaction) -> tuple[int, int]:
        find_run(tx, run_id)
        with (
            pq.ParquetWriter(files[0], GROUP_COLUMNS, compression="zstd") as groups,
            pq.ParquetWriter(files[1], SEQUENCE_COLUMNS, compression="zstd") as sequences,
        ):
            return _write(tx, run_id, groups, sequences)

    try:
        num_groups, num_rows = reader.read_now(work)
    except BaseException:
        shutil.rmtree(directory)
        raise
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
    for number, sample in enumerate(readable_samples(payload, group.group_id) or ()):
        messages = None if sample.messages is None else msgspec.json.encode(sample.messages).decode()
        for at, row in enumerate(sample.sequences):
            yield {
                "group_id": group.group_id,
                "task_id": group.task_id,
                "state": group.state.value,
                "step": group.step,
                "sample": number,
                "row": at,
                "reward": sample.reward,
                "solved": sample.solved,
                "finish_reason": sample.finish_reason.value,
                "invalid_cause": sample.invalid_cause,
                "messages": messages,
                "token_ids": row.token_ids,
                "logprobs": row.logprobs,
                "loss_mask": row.loss_mask,
                "versions": row.versions,
            }
