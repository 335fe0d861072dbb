"""What the Atropos dialect remembers, and the primitives that a store offers for it."""

from collections.abc import Sequence
from typing import Protocol

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.records import Record

NO_ENV = -1
"""Stands for a group that names no environment."""


class AtroposRecord(Record, frozen=True, kw_only=True):
    """One run as Atropos clients see it. Their step is the ledger's step plus `shift`."""

    run_id: RunId
    registration: str | None = None
    """As the trainer sent it, JSON; None until one registers, and after a reset."""
    is_started: bool = False
    """A batch was asked for: environments may register."""
    first_step: int = 0
    """Batches of the ledger up to this one belong to a time before the last reset."""
    handed_step: int = 0
    """The batch that was handed out last, whether or not its body arrived."""
    served_step: int = 0
    """The last batch whose body was written to its end."""
    shift: int = 0
    reset_below: int = 0
    """Groups with a lower sequence are dropped by a reset."""
    latest: GroupId | None = None

    @property
    def current_step(self) -> int:
        return self.handed_step + self.shift


class EnvRecord(Record, frozen=True, kw_only=True):
    run_id: RunId
    env_id: int
    desired_name: str
    real_name: str
    max_token_length: int
    weight: float
    group_size: int
    min_batch_allocation: float | None
    is_connected: bool
    last_seen: float


class ShelvedGroup(Record, frozen=True, kw_only=True):
    """A queued group, as far as forming batches needs to know it. `place` is its order in the queue."""

    run_id: RunId
    group_id: GroupId
    place: int
    env_id: int
    size: int
    """Sequences."""
    is_buffered: bool = False
    """Of another size than its environment announced: waits until some of them add up."""


class Shelf(Record, frozen=True, kw_only=True):
    """Queued groups of one environment and one size."""

    env_id: int
    size: int
    num: int


class UnansweredPost(Record, frozen=True, kw_only=True):
    """A stored post whose answer may not have been read, and how often it came."""

    run_id: RunId
    digest: str
    num: int
    at: float
    answer: str


class AtroposTables(Protocol):
    """Primitive reads and writes, valid inside one transaction. `put_*` inserts or replaces by key."""

    def record(self, run_id: RunId) -> AtroposRecord | None: ...
    def put_record(self, record: AtroposRecord) -> None: ...

    def envs(self, run_id: RunId) -> list[EnvRecord]:
        """By id."""

    def env(self, run_id: RunId, env_id: int) -> EnvRecord | None: ...
    def put_env(self, env: EnvRecord) -> None: ...
    def clear(self, run_id: RunId) -> None:
        """Forget environments, shelves and unanswered posts."""

    def put_shelved(self, groups: Sequence[ShelvedGroup]) -> None:
        """Keep groups; those that are not buffered count on their shelves."""

    def shelved(self, run_id: RunId, group_id: GroupId) -> ShelvedGroup | None: ...
    def take_shelved(self, groups: Sequence[ShelvedGroup]) -> None:
        """Forget groups, off their shelves."""

    def shelves(self, run_id: RunId) -> list[Shelf]: ...
    def on_shelf(self, run_id: RunId, env_id: int, size: int, limit: int) -> list[ShelvedGroup]:
        """The first of one shelf, by place."""

    def buffered(self, run_id: RunId, env_id: int) -> list[ShelvedGroup]:
        """By place."""

    def unanswered(self, run_id: RunId, digest: str) -> UnansweredPost | None: ...
    def put_unanswered(self, posts: Sequence[UnansweredPost]) -> None: ...
    def forget_unanswered(self, run_id: RunId, digests: Sequence[str]) -> None: ...
    def forget_answered(self, run_id: RunId, digests: Sequence[str]) -> None:
        """Each of them came once less; one that never came again is not kept."""

    def forget_unanswered_before(self, run_id: RunId, at: float) -> None: ...
