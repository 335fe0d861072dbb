"""The storage interface below the rules.

A write is atomic. It is durable, as the durability mode defines, before its caller gets the result; a transaction that called
`sync_to_disk` is on the disk in every mode. Writes of a run are executed one after the other. A read sees one consistent state. A
failed write does not affect other writes.

The rules are written once against `Transaction`; a store implements only simple reads and writes, grouped by what they hold.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from rollbook.contracts.admission import MemberId, OwnerId, RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.policy import PublicationId
from rollbook.ledger.records import (
    ActionRecord,
    BatchRecord,
    GroupRecord,
    MemberRecord,
    MoveRecord,
    Origin,
    OwnerRecord,
    ProducerRecord,
    PublicationRecord,
    RunRecord,
    StepRecord,
)

T = TypeVar("T")


class StoreFaultError(RunError):
    """The store cannot work (disk full, not writable, corrupt); an operator must act."""


class StoreInUseError(StoreFaultError):
    """Another service uses the store, which admits only one."""


Move = tuple[float, str | None, str]
"""Time, state before and state after."""


class ChangedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of the steps after one, and of the publications from one on."""

    after_step: int
    publication: int


class Runs(Protocol):
    def get(self, run_id: RunId) -> RunRecord | None: ...
    def ids(self) -> list[RunId]:
        """All runs, oldest first."""

    def with_leases(self) -> list[RunId]:
        """Runs with a live dispatcher or member, or a leased group. The cost does not depend on the number of other runs."""

    def put(self, run: RunRecord) -> None: ...
    def drops(self, run_id: RunId) -> dict[str, int]:
        """Number of dropped groups by kind, from the counters."""

    def missing(self, run_id: RunId) -> dict[str, int]:
        """Samples that dropped parts were opened for and never got, by kind. Only kinds with such samples."""

    def count_drop(self, run_id: RunId, kind: str, *, num: int = 1, missing: int = 0) -> None: ...


class Owners(Protocol):
    def get(self, run_id: RunId, owner_id: OwnerId) -> OwnerRecord | None: ...
    def named(self, run_id: RunId, name: str) -> list[OwnerRecord]: ...
    def alive(self, run_id: RunId) -> list[OwnerRecord]: ...
    def put(self, owner: OwnerRecord) -> None: ...


class Members(Protocol):
    def get(self, run_id: RunId, member_id: MemberId) -> MemberRecord | None: ...
    def alive(self, run_id: RunId) -> list[MemberRecord]:
        """Members whose lease has not ended, in the order in which they joined."""

    def put(self, member: MemberRecord) -> None: ...


class Actions(Protocol):
    """Actions of operators. They are added, never changed."""

    def add(self, action: ActionRecord) -> None: ...
    def by_nonce(self, run_id: RunId, nonce: str) -> ActionRecord | None: ...
    def page(self, run_id: RunId, *, start: int = 0, limit: int) -> list[ActionRecord]:
        """Actions from number `start` on."""

    def of_target(self, run_id: RunId, target: str) -> list[ActionRecord]:
        """Actions about a task or a group, oldest first."""

    def quarantined(self, run_id: RunId) -> frozenset[str]:
        """The tasks in quarantine: those quarantined and not readmitted since."""


class Producers(Protocol):
    def all(self, run_id: RunId) -> list[ProducerRecord]:
        """Registered producers, ordered by name."""

    def put(self, producer: ProducerRecord) -> None: ...


class Groups(Protocol):
    def get(self, run_id: RunId, group_id: GroupId) -> GroupRecord | None: ...
    def find(self, run_id: RunId, group_ids: Sequence[GroupId]) -> dict[GroupId, GroupRecord]:
        """Those of the ids that exist, in one lookup."""

    def put(self, group: GroupRecord) -> None: ...
    def leased_by(self, run_id: RunId, owner: OwnerId) -> list[GroupRecord]: ...
    def leases_ending_by(self, run_id: RunId, until: float) -> list[GroupRecord]: ...
    def waiting(self, run_id: RunId, limit: int) -> list[GroupRecord]:
        """Dispatched groups without an owner, lowest sequence first."""

    def dispatched(self, run_id: RunId) -> list[GroupRecord]: ...
    def oldest_dispatched(self, run_id: RunId) -> int | None:
        """The lowest sequence among dispatched groups, leased or waiting."""

    def aged(self, run_id: RunId, below: int) -> tuple[int, int]:
        """Dispatched groups admitted at a version lower than `below`: their number, and the samples they were opened for."""

    def last_part(self, run_id: RunId, sequence: int) -> GroupRecord | None:
        """The last part of the group with this sequence."""

    def queued(self, run_id: RunId) -> list[GroupRecord]:
        """All queued groups, by sequence and part."""

    def queued_by_sequence(
        self, run_id: RunId, limit: int, *, origin: Origin, producer: str | None = None
    ) -> list[GroupRecord]:
        """Queued groups that the gate granted, or external ones: of one registered producer, or of no registered one."""

    def queued_by_arrival(self, run_id: RunId, limit: int, *, origin: Origin) -> list[GroupRecord]:
        """Queued groups of no registered producer."""

    def queued_below(self, run_id: RunId, version: int, *, by_newest: bool = False) -> list[GroupRecord]:
        """Queued groups whose oldest (or newest) version is known and lower than `version`, lowest sequence first."""

    def releasable(self, run_id: RunId, up_to_step: int, limit: int, *, dropped_only: bool) -> list[GroupRecord]:
        """Up to `limit` groups that still have a payload and whose `release_step` is at most `up_to_step`, lowest first.

        Without first parts of groups that are still played: late samples may be compared with them.
        """

    def page(self, run_id: RunId, *, start: int = 0, limit: int, state: GroupState | None = None) -> list[GroupRecord]:
        """Groups from sequence `start` on, lowest first. The cost depends on `limit`, not on the position in the run.

        A page ends with the last part of a group, so it may have a few more parts than `limit`.
        """

    def values(self, run_id: RunId, columns: Sequence[str], *, start: int = 0, limit: int) -> list[tuple[Any, ...]]:
        """Some columns of a page of groups, as they are stored: enums as text, booleans as 0 and 1, publications with commas.

        Three times as fast as records, for a reader of all groups.
        """

    def each(self, run_id: RunId) -> Iterator[GroupRecord]:
        """All groups, by id."""

    def checked(
        self, run_id: RunId, on_damage: Callable[[str], None], group_ids: Sequence[GroupId] | None = None
    ) -> Iterator[list[GroupRecord]]:
        """All groups, lowest sequence first, or those of these ids that exist, in any order; a few hundred at a time.

        Rows that do not match their checksums are reported. Rows that cannot be read are reported and left out.
        """


class Payloads(Protocol):
    def put(self, run_id: RunId, group_id: GroupId, body: bytes | memoryview, digest: str | None = None) -> None:
        """`digest` is the body's `payload_digest` if the caller has it; hashing costs as much as copying."""

    def get(self, run_id: RunId, group_id: GroupId) -> bytes | None: ...
    def get_many(self, run_id: RunId, group_ids: Sequence[GroupId]) -> list[bytes | memoryview | None]:
        """In the order of the ids. A store may read adjacent payloads in one operation."""

    def delete(self, run_id: RunId, group_id: GroupId) -> None: ...
    def lost(self, run_id: RunId) -> list[GroupId]:
        """Groups whose payload was lost in a power failure, as detected when the store was opened."""


class Positions(Protocol):
    """Opened positions of the task cursor above the settled prefix, with the number of unsettled parts of their group."""

    def put(self, run_id: RunId, position: int, *, unsettled: int) -> None: ...
    def get(self, run_id: RunId, position: int) -> int | None:
        """Its number of unsettled parts; None if it is not stored."""

    def all(self, run_id: RunId) -> list[tuple[int, int]]: ...
    def delete(self, run_id: RunId, position: int) -> None: ...


class History(Protocol):
    def add(self, move: MoveRecord) -> None: ...
    def of_group(self, run_id: RunId, group_id: GroupId) -> list[MoveRecord]: ...
    def after(self, number: int, limit: int) -> list[tuple[int, RunId, GroupId]]:
        """The moves of all runs after the move with this number, by number. The cost depends on `limit` only.

        The numbers of one run are in the order of its commits. Those of different runs need not be in a shared store.
        """

    def records_after(self, run_id: RunId, number: int) -> list[tuple[int, MoveRecord]]:
        """The moves of one run after the move with this number, with their numbers. Reads the moves of other runs after it."""

    def last_number(self, run_id: RunId) -> int:
        """The number of the run's last move; 0 if there is none. Reads the moves of other runs after it."""

    def checked(
        self, run_id: RunId, on_damage: Callable[[str], None], group_ids: Sequence[GroupId]
    ) -> dict[GroupId, list[Move]]:
        """The moves of several groups, in order, as stored. Rows that do not match their checksums are reported."""

    def without_row(self, run_id: RunId, group_ids: Sequence[GroupId] | None = None) -> list[GroupId]:
        """Those of these groups, or of all, that have moves and no row."""


class Batches(Protocol):
    def get(self, run_id: RunId, step: int) -> BatchRecord | None: ...
    def put(self, batch: BatchRecord) -> None:
        """A batch is written once; a second write of the same step fails."""

    def each(self, run_id: RunId, *, after: int = 0) -> Iterator[BatchRecord]:
        """The batches after step `after`, in order."""


class Steps(Protocol):
    def of_step(self, run_id: RunId, step: int) -> list[StepRecord]:
        """Acknowledgements of one step, by epoch."""

    def page(self, run_id: RunId, *, start: int = 0, limit: int) -> list[StepRecord]:
        """Acknowledgements from step `start` on, by step and epoch."""

    def each(self, run_id: RunId, *, after: int = 0) -> Iterator[StepRecord]:
        """Acknowledgements of the steps after step `after`, by step and epoch."""

    def put(self, step: StepRecord) -> None: ...


class Publications(Protocol):
    def get(self, run_id: RunId, publication_id: PublicationId) -> PublicationRecord | None: ...
    def effective_from(self, run_id: RunId, step: int) -> list[PublicationRecord]:
        """Publications whose effective step is at least `step`, by id."""

    def page(self, run_id: RunId, *, start: int = 0, limit: int) -> list[PublicationRecord]:
        """Publications from id `start` on, by id."""

    def each(self, run_id: RunId, *, start: int = 0) -> Iterator[PublicationRecord]:
        """Publications from id `start` on, by id."""

    def put(self, publication: PublicationRecord) -> None: ...


class Rows(Protocol):
    def fetchone(self) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...


class SideTables(Protocol):
    """SQL tables of an extension, in the same database and the same transaction.

    Statements use `?` for parameters, SQLite type names, and only what SQLite and PostgreSQL have in common. They must not touch
    the ledger's own tables.
    """

    def exists(self, name: str) -> bool:
        """Whether the extension `name` has created its tables in this database."""

    def create(self, name: str, version: int, statements: Sequence[str]) -> None:
        """Run the statements if the extension has no tables yet. Tables of another version are refused."""

    def select(self, sql: str, parameters: Sequence[Any] = ()) -> Rows: ...
    def write(self, sql: str, parameters: Sequence[Any]) -> None: ...
    def write_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        """Returns the number of changed rows."""


class Transaction(Protocol):
    """Valid inside one `Store.write` or `Store.read` call. `put` inserts or replaces by key."""

    @property
    def runs(self) -> Runs: ...
    @property
    def owners(self) -> Owners: ...
    @property
    def members(self) -> Members: ...
    @property
    def actions(self) -> Actions: ...
    @property
    def producers(self) -> Producers: ...
    @property
    def groups(self) -> Groups: ...
    @property
    def payloads(self) -> Payloads: ...
    @property
    def positions(self) -> Positions: ...
    @property
    def history(self) -> History: ...
    @property
    def batches(self) -> Batches: ...
    @property
    def steps(self) -> Steps: ...
    @property
    def publications(self) -> Publications: ...
    @property
    def side_tables(self) -> SideTables: ...

    def sync_to_disk(self, run_id: RunId | None = None, group_ids: Sequence[GroupId] = ()) -> None:
        """Require that this transaction is on the disk before its caller gets the result, in every durability mode.

        The payloads of these groups are synced too; without a run, all payloads.
        """

    def damage(self, run_id: RunId, only: ChangedRows | None = None) -> Iterator[str]:
        """Damage of the stored rows of a run, one sentence each: by checksums, and by the checks of the database itself.

        Without groups and their histories: their `checked` reports it. With `only`, the checksums of these rows.
        Raises `StoreFaultError` if the rows cannot be read.
        """

    def announce(self, run_id: RunId) -> None:
        """After the commit, notify the listeners that this run has changed."""


class Reader(Protocol):
    """Read-only access to a ledger."""

    def read_now(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one consistent state."""


class Store(Protocol):
    @property
    def is_shared(self) -> bool:
        """Whether other processes may serve from it at the same time."""

    async def write(
        self,
        work: Callable[[Transaction], T],
        *,
        run_id: RunId | None = None,
        before: Callable[[], None] | None = None,
    ) -> T:
        """Run `work` in a write transaction. It must be quick and use only the transaction; it may run in a thread.

        `run_id` is the only run that `work` reads and changes; None: any. A shared store executes writes of different runs at the
        same time. `before` computes in advance what `work` would otherwise compute itself. A store whose transactions block other
        processes calls it first, in the same thread; it must not raise.
        """

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one consistent state."""

    async def journal(self, run_id: RunId, *, checkpoint: bool = False) -> None:
        """Copy what changed in this run to a second, independent file, from which the store can be rebuilt.

        With `checkpoint`, all commits so far are also moved from the write-ahead log to the database. A store that is backed up by
        other means does nothing.
        """

    def listen(self, on_change: Callable[[RunId], None]) -> None:
        """Call `on_change` on the event loop after each commit that announced a run."""
