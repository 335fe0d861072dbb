"""The rows of a run as JSON lines: an exported run, and the entries of a store's journal (`journal.py`).

First the run, then its groups with their histories and payloads (base64, unchanged), then actions, batches, steps, publications and
the data of extensions, so that the lines can be imported in this order. The last line of an export counts the lines before it, so
that a truncated file is detected.
"""

from typing import Any, Protocol

import msgspec

from rollbook.contracts.admission import RunId
from rollbook.ledger.records import (
    ActionRecord,
    BatchRecord,
    GroupRecord,
    MoveRecord,
    OwnerRecord,
    ProducerRecord,
    PublicationRecord,
    RunRecord,
    StepRecord,
)
from rollbook.ledger.store import Transaction

FORMAT = 2


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True, omit_defaults=True):
    """Base of all lines. `kind` is the type of the line."""


class RunLine(Line, frozen=True, kw_only=True, tag="run"):
    format: int
    record: RunRecord
    drops: dict[str, int]
    missing: dict[str, int]
    positions: list[tuple[int, int]]
    owners: list[OwnerRecord]
    producers: list[ProducerRecord]


class GroupLine(Line, frozen=True, kw_only=True, tag="group"):
    record: GroupRecord
    moves: list[MoveRecord]
    payload: bytes | None = None
    samples: Any = None
    """The decoded payload, for people. The import ignores it."""
    place: tuple[int, int] | None = None
    """Segment and offset of the payload, only in a journal."""


class ActionLine(Line, frozen=True, kw_only=True, tag="action"):
    record: ActionRecord


class BatchLine(Line, frozen=True, kw_only=True, tag="batch"):
    record: BatchRecord


class StepLine(Line, frozen=True, kw_only=True, tag="step"):
    record: StepRecord


class PublicationLine(Line, frozen=True, kw_only=True, tag="publication"):
    record: PublicationRecord


class ExtensionLine(Line, frozen=True, kw_only=True, tag="extension"):
    """Data of an extension that has its own tables in the store."""

    name: str
    data: msgspec.Raw


class EndLine(Line, frozen=True, kw_only=True, tag="end"):
    lines: int
    """Number of lines before this one."""


AnyLine = RunLine | GroupLine | ActionLine | BatchLine | StepLine | PublicationLine | ExtensionLine | EndLine


class RunExtension(Protocol):
    """Exports and imports what an extension stores about a run."""

    @property
    def name(self) -> str: ...

    def export_run(self, tx: Transaction, run_id: RunId) -> bytes | None:
        """JSON, or None if the extension does not know the run."""

    def import_run(self, tx: Transaction, run_id: RunId, data: bytes) -> None:
        """`run_id` may differ from the exported one."""
