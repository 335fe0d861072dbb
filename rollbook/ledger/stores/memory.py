"""The store that forgets: same rules, same isolation, nothing on disk. For tests, tutorials and benchmarks of the rules.

Rows live in dictionaries. Every change first notes how to undo it, so that a failed operation leaves no trace. Searches look at
every open group, which is fine for what it is for.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

from rollbook.contracts.admission import OwnerId, RunId
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.policy import PublicationId
from rollbook.ledger.atropos.stores.memory import AtroposRows, MemoryAtroposTables
from rollbook.ledger.records import (
    BatchRecord,
    GroupRecord,
    MoveRecord,
    OwnerRecord,
    OwnerState,
    ProducerRecord,
    PublicationRecord,
    RunRecord,
    StepRecord,
)
from rollbook.ledger.store import Transaction

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")


class _Tables:
    def __init__(self) -> None:
        self.runs: dict[RunId, RunRecord] = {}
        self.drops: dict[tuple[RunId, str], int] = {}
        self.owners: dict[tuple[RunId, OwnerId], OwnerRecord] = {}
        self.producers: dict[tuple[RunId, str], ProducerRecord] = {}
        self.groups: dict[tuple[RunId, GroupId], GroupRecord] = {}
        self.open: dict[tuple[RunId, GroupId], GroupRecord] = {}
        self.payloads: dict[tuple[RunId, GroupId], bytes] = {}
        self.positions: dict[tuple[RunId, int], bool] = {}
        self.moves: dict[tuple[RunId, GroupId], tuple[MoveRecord, ...]] = {}
        self.batches: dict[tuple[RunId, int], BatchRecord] = {}
        self.steps: dict[tuple[RunId, int, int], StepRecord] = {}
        self.publications: dict[tuple[RunId, PublicationId], PublicationRecord] = {}
        self.atropos = AtroposRows()


class MemoryTransaction:
    """Satisfies `store.Transaction`."""

    def __init__(self, tables: _Tables) -> None:
        self._tables = tables
        self._undo: list[Callable[[], Any]] = []
        self.atropos = MemoryAtroposTables(tables.atropos, put=self._put, delete=self._delete)
        self.announced: set[RunId] = set()

    def roll_back(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _put(self, table: dict[Key, Row], key: Key, row: Row) -> None:
        if key in table:
            before = table[key]
            self._undo.append(lambda: table.__setitem__(key, before))
        else:
            self._undo.append(lambda: table.pop(key, None))
        table[key] = row

    def _delete(self, table: dict[Key, Row], key: Key) -> None:
        if key in table:
            before = table.pop(key)
            self._undo.append(lambda: table.__setitem__(key, before))

    def run(self, run_id: RunId) -> RunRecord | None:
        return self._tables.runs.get(run_id)

    def runs(self) -> list[RunId]:
        return [r.run_id for r in sorted(self._tables.runs.values(), key=lambda r: (r.created_at, r.run_id))]

    def put_run(self, run: RunRecord) -> None:
        self._put(self._tables.runs, run.run_id, run)

    def drops(self, run_id: RunId) -> dict[str, int]:
        return {kind: num for (run, kind), num in self._tables.drops.items() if run == run_id}

    def count_drop(self, run_id: RunId, kind: str) -> None:
        self._put(self._tables.drops, (run_id, str(kind)), self._tables.drops.get((run_id, kind), 0) + 1)

    def owner(self, run_id: RunId, owner_id: OwnerId) -> OwnerRecord | None:
        return self._tables.owners.get((run_id, owner_id))

    def owners_named(self, run_id: RunId, name: str) -> list[OwnerRecord]:
        return [o for o in self._tables.owners.values() if o.run_id == run_id and o.name == name]

    def owners_alive(self, run_id: RunId) -> list[OwnerRecord]:
        return [o for o in self._tables.owners.values() if o.run_id == run_id and o.state is OwnerState.ALIVE]

    def put_owner(self, owner: OwnerRecord) -> None:
        self._put(self._tables.owners, (owner.run_id, owner.owner_id), owner)

    def producers(self, run_id: RunId) -> list[ProducerRecord]:
        known = (p for p in self._tables.producers.values() if p.run_id == run_id)
        return sorted(known, key=lambda p: p.name)

    def put_producer(self, producer: ProducerRecord) -> None:
        self._put(self._tables.producers, (producer.run_id, producer.name), producer)

    def group(self, run_id: RunId, group_id: GroupId) -> GroupRecord | None:
        return self._tables.groups.get((run_id, group_id))

    def known_groups(self, run_id: RunId, group_ids: Sequence[GroupId]) -> dict[GroupId, GroupRecord]:
        found = ((group_id, self.group(run_id, group_id)) for group_id in group_ids)
        return {group_id: group for group_id, group in found if group is not None}

    def put_group(self, group: GroupRecord) -> None:
        key = (group.run_id, group.group_id)
        self._put(self._tables.groups, key, group)
        if group.is_open:
            self._put(self._tables.open, key, group)
        else:
            self._delete(self._tables.open, key)

    def leased_by(self, run_id: RunId, owner: OwnerId) -> list[GroupRecord]:
        return self._open(run_id, lambda g: g.owner == owner)

    def leases_ending_by(self, run_id: RunId, until: float) -> list[GroupRecord]:
        return self._open(run_id, lambda g: g.lease_until is not None and g.lease_until <= until)

    def waiting(self, run_id: RunId, limit: int) -> list[GroupRecord]:
        return self._open(run_id, lambda g: g.state is GroupState.DISPATCHED and g.owner is None)[:limit]

    def oldest_running(self, run_id: RunId) -> int | None:
        return min((g.sequence for g in self.dispatched(run_id)), default=None)

    def queued(self, run_id: RunId) -> list[GroupRecord]:
        return self._open(run_id, lambda g: g.state is GroupState.QUEUED)

    def queued_by_sequence(self, run_id: RunId, limit: int, *, producer: str | None = None) -> list[GroupRecord]:
        return [g for g in self.queued(run_id) if g.producer == producer][:limit]

    def queued_by_arrival(self, run_id: RunId, limit: int) -> list[GroupRecord]:
        return sorted((g for g in self.queued(run_id) if g.producer is None), key=lambda g: g.arrival or 0)[:limit]

    def queued_below(self, run_id: RunId, version: int) -> list[GroupRecord]:
        return [g for g in self.queued(run_id) if g.oldest_version is not None and g.oldest_version < version]

    def dispatched(self, run_id: RunId) -> list[GroupRecord]:
        return self._open(run_id, lambda g: g.state is GroupState.DISPATCHED)

    def groups(self, run_id: RunId, state: GroupState | None, limit: int, offset: int) -> list[GroupRecord]:
        chosen = (g for g in self._tables.groups.values() if g.run_id == run_id and state in (None, g.state))
        return sorted(chosen, key=lambda g: g.sequence)[offset : offset + limit]

    def groups_after(self, run_id: RunId, sequence: int, limit: int) -> list[GroupRecord]:
        later = (g for g in self._tables.groups.values() if g.run_id == run_id and g.sequence > sequence)
        return sorted(later, key=lambda g: g.sequence)[:limit]

    def each_group(self, run_id: RunId) -> Iterator[GroupRecord]:
        chosen = [g for g in self._tables.groups.values() if g.run_id == run_id]
        return iter(sorted(chosen, key=lambda g: g.group_id.encode()))

    def put_payload(
        self, run_id: RunId, group_id: GroupId, body: bytes | memoryview, digest: str | None = None
    ) -> None:
        self._put(self._tables.payloads, (run_id, group_id), bytes(body))

    def payload(self, run_id: RunId, group_id: GroupId) -> bytes | None:
        return self._tables.payloads.get((run_id, group_id))

    def payloads(self, run_id: RunId, group_ids: Sequence[GroupId]) -> list[bytes | memoryview | None]:
        return [self.payload(run_id, group_id) for group_id in group_ids]

    def delete_payload(self, run_id: RunId, group_id: GroupId) -> None:
        self._delete(self._tables.payloads, (run_id, group_id))

    def lost_payloads(self, run_id: RunId) -> list[GroupId]:
        return []

    def releasable(self, run_id: RunId, up_to_step: int, *, dropped_only: bool) -> list[GroupRecord]:
        chosen = (
            g
            for g in self._tables.groups.values()
            if g.run_id == run_id
            and g.has_payload
            and g.release_step is not None
            and g.release_step <= up_to_step
            and (g.state is GroupState.DROPPED or not dropped_only)
        )
        return sorted(chosen, key=lambda g: g.sequence)

    def put_position(self, run_id: RunId, position: int, *, is_settled: bool) -> None:
        self._put(self._tables.positions, (run_id, position), is_settled)

    def position(self, run_id: RunId, position: int) -> bool | None:
        return self._tables.positions.get((run_id, position))

    def positions(self, run_id: RunId) -> list[tuple[int, bool]]:
        return sorted((at, is_settled) for (run, at), is_settled in self._tables.positions.items() if run == run_id)

    def delete_position(self, run_id: RunId, position: int) -> None:
        self._delete(self._tables.positions, (run_id, position))

    def add_move(self, move: MoveRecord) -> None:
        self._put(self._tables.moves, (move.run_id, move.group_id), (*self.moves(move.run_id, move.group_id), move))

    def moves(self, run_id: RunId, group_id: GroupId) -> list[MoveRecord]:
        return list(self._tables.moves.get((run_id, group_id), ()))

    def each_move(self, run_id: RunId) -> Iterator[MoveRecord]:
        groups = sorted((g for run, g in self._tables.moves if run == run_id), key=str.encode)
        return (move for group_id in groups for move in self.moves(run_id, group_id))

    def batch(self, run_id: RunId, step: int) -> BatchRecord | None:
        return self._tables.batches.get((run_id, step))

    def put_batch(self, batch: BatchRecord) -> None:
        key = (batch.run_id, batch.manifest.step)
        if key in self._tables.batches:
            raise ValueError(f"batch {batch.manifest.step} of run {batch.run_id} is recorded already")
        self._put(self._tables.batches, key, batch)

    def each_batch(self, run_id: RunId) -> Iterator[BatchRecord]:
        steps = sorted(step for run, step in self._tables.batches if run == run_id)
        return (self._tables.batches[run_id, step] for step in steps)

    def steps(self, run_id: RunId, step: int | None = None) -> list[StepRecord]:
        chosen = (s for s in self._tables.steps.values() if s.run_id == run_id and step in (None, s.step))
        return sorted(chosen, key=lambda s: (s.step, s.epoch))

    def put_step(self, step: StepRecord) -> None:
        self._put(self._tables.steps, (step.run_id, step.step, step.epoch), step)

    def publication(self, run_id: RunId, publication_id: PublicationId) -> PublicationRecord | None:
        return self._tables.publications.get((run_id, publication_id))

    def publications(self, run_id: RunId, *, effective_from: int = 0) -> list[PublicationRecord]:
        known = (p for p in self._tables.publications.values() if p.run_id == run_id)
        return sorted((p for p in known if p.effective_step >= effective_from), key=lambda p: p.id)

    def put_publication(self, publication: PublicationRecord) -> None:
        self._put(self._tables.publications, (publication.run_id, publication.id), publication)

    def sync_to_disk(self, run_id: RunId | None = None, group_ids: Sequence[GroupId] = ()) -> None:
        """There is no disk, and no promise to break: this store is gone with its process."""

    def announce(self, run_id: RunId) -> None:
        self.announced.add(run_id)

    def _open(self, run_id: RunId, is_wanted: Callable[[GroupRecord], bool]) -> list[GroupRecord]:
        chosen = (g for g in self._tables.open.values() if g.run_id == run_id and is_wanted(g))
        return sorted(chosen, key=lambda g: g.sequence)


class MemoryStore:
    """Satisfies `store.Store`."""

    def __init__(self) -> None:
        self._tables = _Tables()
        self._listeners: list[Callable[[RunId], None]] = []

    async def write(self, work: Callable[[Transaction], T], *, before: Callable[[], None] | None = None) -> T:
        del before  # nobody else is kept waiting
        return self.write_now(work)

    async def read(self, work: Callable[[Transaction], T]) -> T:
        return self.read_now(work)

    def write_now(self, work: Callable[[Transaction], T]) -> T:
        tx = MemoryTransaction(self._tables)
        try:
            result = work(tx)
        except BaseException:
            tx.roll_back()
            raise
        for run_id in tx.announced:
            for heard in self._listeners:
                heard(run_id)
        return result

    def read_now(self, work: Callable[[Transaction], T]) -> T:
        return work(MemoryTransaction(self._tables))

    def listen(self, heard: Callable[[RunId], None]) -> None:
        self._listeners.append(heard)
