"""The seam below the rules: what a store must offer, and what it promises.

Promises. A write is all or nothing, and on the disk as the durability mode says before its caller hears of it; a transaction that
asked for `sync_to_disk` is there in every mode. Writes happen one after the other. A read sees one moment. A failed write harms no
other one.

The rules are written once, against `Transaction`; a store only has primitives.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from rollbook.contracts.admission import OwnerId, RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.policy import PublicationId
from rollbook.ledger.atropos.records import AtroposTables
from rollbook.ledger.records import (
    BatchRecord,
    GroupRecord,
    MoveRecord,
    OwnerRecord,
    ProducerRecord,
    PublicationRecord,
    RunRecord,
    StepRecord,
)

T = TypeVar("T")


class StoreFaultError(RunError):
    """The store cannot do its work (disk full, not writable, corrupt): a person must act."""


class Transaction(Protocol):
    """Primitive reads and writes, valid inside one `Store.write` or `Store.read` call. `put_*` inserts or replaces by key."""

    # runs
    def run(self, run_id: RunId) -> RunRecord | None: ...
    def runs(self) -> list[RunId]: ...
    def put_run(self, run: RunRecord) -> None: ...
    def drops(self, run_id: RunId) -> dict[str, int]:
        """Dropped groups by kind, from the running counters."""

    def count_drop(self, run_id: RunId, kind: str) -> None: ...

    # owners
    def owner(self, run_id: RunId, owner_id: OwnerId) -> OwnerRecord | None: ...
    def owners_named(self, run_id: RunId, name: str) -> list[OwnerRecord]: ...
    def owners_alive(self, run_id: RunId) -> list[OwnerRecord]: ...
    def put_owner(self, owner: OwnerRecord) -> None: ...

    # producers
    def producers(self, run_id: RunId) -> list[ProducerRecord]:
        """Registered ones, by name."""

    def put_producer(self, producer: ProducerRecord) -> None: ...

    # groups
    def group(self, run_id: RunId, group_id: GroupId) -> GroupRecord | None: ...
    def known_groups(self, run_id: RunId, group_ids: Sequence[GroupId]) -> dict[GroupId, GroupRecord]:
        """Those of them that exist, looked up together."""

    def put_group(self, group: GroupRecord) -> None: ...
    def leased_by(self, run_id: RunId, owner: OwnerId) -> list[GroupRecord]: ...
    def leases_ending_by(self, run_id: RunId, until: float) -> list[GroupRecord]: ...
    def waiting(self, run_id: RunId, limit: int) -> list[GroupRecord]:
        """Dispatched groups without an owner, lowest sequence first."""

    def oldest_running(self, run_id: RunId) -> int | None:
        """The lowest sequence among dispatched groups, leased or waiting."""

    def queued(self, run_id: RunId) -> list[GroupRecord]:
        """Every queued group, by sequence."""

    def queued_by_sequence(self, run_id: RunId, limit: int, *, producer: str | None = None) -> list[GroupRecord]:
        """Those of one registered producer, or, for None, those of nobody registered."""

    def queued_by_arrival(self, run_id: RunId, limit: int) -> list[GroupRecord]:
        """Those of nobody registered."""

    def queued_below(self, run_id: RunId, version: int) -> list[GroupRecord]:
        """Queued groups whose oldest version is known and lower than `version`, lowest sequence first."""

    def dispatched(self, run_id: RunId) -> list[GroupRecord]: ...
    def groups(self, run_id: RunId, state: GroupState | None, limit: int, offset: int) -> list[GroupRecord]:
        """By sequence, for people."""

    def groups_after(self, run_id: RunId, sequence: int, limit: int) -> list[GroupRecord]:
        """Those with a higher sequence, lowest first: a page of history costs its length, wherever it begins."""

    def each_group(self, run_id: RunId) -> Iterator[GroupRecord]:
        """Every group, by id."""

    # payloads
    def put_payload(
        self, run_id: RunId, group_id: GroupId, body: bytes | memoryview, digest: str | None = None
    ) -> None:
        """Keep a payload. `digest` is its `payload_digest` where somebody has computed it: hashing costs as much as copying."""

    def payload(self, run_id: RunId, group_id: GroupId) -> bytes | None: ...
    def payloads(self, run_id: RunId, group_ids: Sequence[GroupId]) -> list[bytes | memoryview | None]:
        """Several, in the order asked for: a store reads those that lie together in one go."""

    def delete_payload(self, run_id: RunId, group_id: GroupId) -> None: ...
    def lost_payloads(self, run_id: RunId) -> list[GroupId]:
        """Groups whose payload a power cut took, as was found when the store was opened."""

    def releasable(self, run_id: RunId, up_to_step: int, *, dropped_only: bool) -> list[GroupRecord]:
        """Groups that still have a payload whose `release_step` is at most `up_to_step`."""

    # positions in the cursor's order, kept above the settled prefix only
    def put_position(self, run_id: RunId, position: int, *, is_settled: bool) -> None: ...
    def position(self, run_id: RunId, position: int) -> bool | None:
        """Whether it is settled; None when it is not kept."""

    def positions(self, run_id: RunId) -> list[tuple[int, bool]]: ...
    def delete_position(self, run_id: RunId, position: int) -> None: ...

    # history
    def add_move(self, move: MoveRecord) -> None: ...
    def moves(self, run_id: RunId, group_id: GroupId) -> list[MoveRecord]: ...
    def each_move(self, run_id: RunId) -> Iterator[MoveRecord]:
        """Every move, by group id and then in order."""

    # batches and steps
    def batch(self, run_id: RunId, step: int) -> BatchRecord | None: ...
    def put_batch(self, batch: BatchRecord) -> None: ...
    def each_batch(self, run_id: RunId) -> Iterator[BatchRecord]: ...
    def steps(self, run_id: RunId, step: int | None = None) -> list[StepRecord]:
        """Acknowledgements, by step and epoch; of one step when it is given."""

    def put_step(self, step: StepRecord) -> None: ...

    # publications
    def publication(self, run_id: RunId, publication_id: PublicationId) -> PublicationRecord | None: ...
    def publications(self, run_id: RunId, *, effective_from: int = 0) -> list[PublicationRecord]:
        """Those whose effective step is at least `effective_from`, by id."""

    def put_publication(self, publication: PublicationRecord) -> None: ...

    @property
    def atropos(self) -> AtroposTables:
        """The tables of the Atropos dialect."""

    # effects of the commit
    def sync_to_disk(self, run_id: RunId | None = None, group_ids: Sequence[GroupId] = ()) -> None:
        """This transaction must be on the disk before anybody hears of it, whatever the durability mode.

        With it the payloads of these groups; without a run, all that were ever kept.
        """

    def announce(self, run_id: RunId) -> None:
        """Once committed, tell who listens that something moved in this run."""


class Reader(Protocol):
    """A ledger that is only looked at."""

    def read_now(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one consistent moment."""


class Store(Protocol):
    async def write(self, work: Callable[[Transaction], T], *, before: Callable[[], None] | None = None) -> T:
        """Run `work` in a write transaction. It must be quick and touch nothing but the transaction: it may run in a thread.

        `before` is what `work` computes by itself if nobody has done it yet. A store whose transactions keep other processes
        waiting calls it first, in the same thread; it must not raise.
        """

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one consistent moment."""

    def listen(self, heard: Callable[[RunId], None]) -> None:
        """Call `heard` on the event loop after each commit that announced something."""
