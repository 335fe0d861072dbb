"""A run as lines of JSON: everything the ledger knows of it, in an order that can be written back as it is read.

First the run, then its groups with their histories and payloads (base64, byte for byte what the producer sent), then batches, steps
and publications, and a last line that counts what went before: a file that was cut short is recognised.
"""

from typing import TypeVar

import msgspec

from rollbook.contracts.admission import RunId
from rollbook.ledger.atropos.records import AtroposRecord, EnvRecord, QueuedGroup
from rollbook.ledger.records import (
    BatchRecord,
    GroupRecord,
    MoveRecord,
    OwnerRecord,
    ProducerRecord,
    PublicationRecord,
    Record,
    RunRecord,
    StepRecord,
)
from rollbook.ledger.tools.plain_payload import PlainSample

FORMAT = 1
R = TypeVar("R", bound=Record)


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True, omit_defaults=True):
    """Root of all. `kind` says which."""


class RunLine(Line, frozen=True, kw_only=True, tag="run"):
    format: int
    record: RunRecord
    drops: dict[str, int]
    positions: list[tuple[int, bool]]
    owners: list[OwnerRecord]
    producers: list[ProducerRecord]


class GroupLine(Line, frozen=True, kw_only=True, tag="group"):
    record: GroupRecord
    moves: list[MoveRecord]
    payload: bytes | None = None
    samples: list[PlainSample] | None = None
    """The payload once more, readable. Nothing reads it back."""


class BatchLine(Line, frozen=True, kw_only=True, tag="batch"):
    record: BatchRecord


class StepLine(Line, frozen=True, kw_only=True, tag="step"):
    record: StepRecord


class PublicationLine(Line, frozen=True, kw_only=True, tag="publication"):
    record: PublicationRecord


class AtroposLine(Line, frozen=True, kw_only=True, tag="atropos"):
    """What Atropos clients know of the run beside its groups."""

    record: AtroposRecord
    envs: list[EnvRecord]
    shelved: list[QueuedGroup]


class EndLine(Line, frozen=True, kw_only=True, tag="end"):
    lines: int
    """How many went before."""


AnyLine = RunLine | GroupLine | BatchLine | StepLine | PublicationLine | AtroposLine | EndLine


def of_run(record: R, run_id: RunId) -> R:
    """The same record under another run's name."""
    return record.changed(run_id=run_id)
