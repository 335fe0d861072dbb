"""The rows of a run's ledger, as the dashboard and the commands read them, and the port that reads them.

`run/reader.py` implements it twice, on the store of a run directory and on the HTTP API of a ledger, so that both look alike.
"""

from typing import Protocol

import msgspec

from rollbook.contracts.admission import Action, AuditReport, LedgerStatus
from rollbook.contracts.batch import AckReceipt, BatchManifest, PassSplit
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.group import GroupOutcome, GroupState
from rollbook.contracts.policy import Publication


class GroupRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A group as the ledger has it, without its payload."""

    sequence: int
    group_id: str
    task_id: str
    draw: int
    origin: str
    producer: str | None
    state: str
    opened_at: float
    attempt: int
    admission_version: int | None
    oldest_version: int | None
    publications: tuple[int, ...]
    step: int | None
    drop_reason: str | None
    unusable: str | None
    has_payload: bool
    payload_bytes: int
    outcome_json: bytes | None
    """The stored JSON. A list of a million groups needs only a few numbers of it."""

    @property
    def outcome(self) -> GroupOutcome | None:
        return None if self.outcome_json is None else _OUTCOME.decode(self.outcome_json)

    @property
    def drop_kind(self) -> str | None:
        return None if self.drop_reason is None else self.drop_reason.partition(":")[0]

    @property
    def lag(self) -> int | None:
        """Versions between its oldest trained token and the policy that was trained; None if it is in no batch."""
        if self.step is None or self.oldest_version is None:
            return None
        return self.step - 1 - self.oldest_version


class ChangedGroups(msgspec.Struct, frozen=True, kw_only=True):
    next: int
    """Continue after this number."""
    is_complete: bool
    """There are no later changes yet."""
    groups: tuple[GroupRow, ...]
    """Groups that changed, as they are now."""


class MoveRow(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    from_state: str | None
    to_state: str
    note: str
    by: str


class GroupTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """A group, its state changes, and an explanation of them in sentences."""

    group: GroupRow
    moves: tuple[MoveRow, ...]
    sentences: tuple[str, ...]


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One acknowledgement. A step that was trained again after a restart has one for each epoch."""

    step: int
    epoch: int
    digest: str
    receipt: AckReceipt
    at: float
    split: PassSplit | None = None


class ProducerRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    weight: float
    min_share: float
    credit: float
    num_batched: int


class LedgerSource(Protocol):
    """Every method raises `TransientError` or `RunError` if the ledger cannot be read; the message says why and what to do."""

    @property
    def most_groups(self) -> int:
        """Groups in one read, at most."""

    async def status(self) -> LedgerStatus: ...

    async def groups(self, *, start: int, limit: int, state: GroupState | None = None) -> tuple[GroupRow, ...]:
        """A page of groups from the admission sequence number `start` on.

        It ends with the last part of a group, so it may have a few more parts than `limit`.
        """

    async def changes(self, *, after: int | None, limit: int) -> ChangedGroups:
        """The groups that changed after the change number `after`. None: only the number of the last change."""

    async def explain(self, group_id: str) -> GroupTimeline:
        """Raises `NotFoundError` if there is no such group."""

    async def payloads(self, *group_ids: str) -> tuple[bytes | None, ...]:
        """The encoded samples of each group; None if they were never submitted, or are deleted."""

    async def manifest(self, step: int) -> BatchManifest:
        """Raises `NotFoundError` if the batch is not decided."""

    async def steps(self) -> tuple[StepRow, ...]: ...

    async def publications(self, *, start: int, limit: int) -> tuple[Publication, ...]: ...

    async def producers(self) -> tuple[ProducerRow, ...]: ...

    async def actions(self, *, start: int, limit: int, target: str | None = None) -> tuple[Action, ...]:
        """Actions of operators from number `start` on; with `target`, those about one task or group."""

    async def audit(self, *, full: bool = False) -> AuditReport:
        """Check what changed since the last audit without violations; with `full`, everything."""


_OUTCOME = json_decoder(GroupOutcome)
