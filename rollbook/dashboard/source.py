"""What the dashboard reads of a run's ledger: the port, and the values that cross it.

`run` implements it twice, on the ledger of a run directory and on the HTTP API of a ledger, so that both look alike on the page.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from rollbook.contracts.admission import Action, LedgerStatus
from rollbook.contracts.batch import BatchManifest
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.group import GroupOutcome
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
    """As the ledger stores it. A list of a million groups needs a few numbers of it only."""

    @property
    def outcome(self) -> GroupOutcome | None:
        return None if self.outcome_json is None else _OUTCOME.decode(self.outcome_json)

    @property
    def drop_kind(self) -> str | None:
        return None if self.drop_reason is None else self.drop_reason.partition(":")[0]

    @property
    def lag(self) -> int | None:
        """Of a group in a batch: versions between its oldest trained token and the policy that was trained."""
        if self.step is None or self.oldest_version is None:
            return None
        return self.step - 1 - self.oldest_version


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    next: int
    """Continue after this number."""
    is_complete: bool
    """There are no later changes yet."""
    groups: tuple[GroupRow, ...]
    """Groups that changed, as they are now."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    from_state: str | None
    to_state: str
    note: str
    by: str


class GroupTimeline(msgspec.Struct, frozen=True, kw_only=True):
    group: GroupRow
    moves: tuple[Move, ...]
    sentences: tuple[str, ...]


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool
    opened: int
    law: Mapping[str, int]
    dropped: Mapping[str, int]
    steps: int
    max_lag: int | None
    violations: tuple[str, ...]


class Producer(msgspec.Struct, frozen=True, kw_only=True):
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

    async def groups(self, *, start: int, limit: int) -> tuple[GroupRow, ...]:
        """Groups from the admission sequence number `start` on."""

    async def changes(self, *, after: int | None, limit: int) -> Changes:
        """The groups that changed after the change number `after`. None: only the number of the last change."""

    async def history(self, group_id: str) -> GroupTimeline:
        """Raises `NotFoundError` if there is no such group."""

    async def payload(self, group_id: str) -> bytes | None: ...

    async def manifest(self, step: int) -> BatchManifest:
        """Raises `NotFoundError` if the batch is not decided."""

    async def publications(self, *, start: int, limit: int) -> tuple[Publication, ...]: ...

    async def producers(self) -> tuple[Producer, ...]: ...

    async def actions(self, *, start: int, limit: int, target: str | None = None) -> tuple[Action, ...]:
        """Actions of operators from number `start` on; with `target`, those about one task or group."""

    async def audit(self) -> Audit: ...


_OUTCOME = json_decoder(GroupOutcome)
