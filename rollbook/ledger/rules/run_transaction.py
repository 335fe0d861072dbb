"""One run within one transaction: its record with pending changes, and the only code that changes the state of a group.

All state changes go through `move`, so that a group's row, its history, the run's counters and the settled prefix of the cursor
always agree.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import FencedError, RunError
from rollbook.contracts.group import MOVES, DropReason, GroupId, GroupState
from rollbook.ledger.records import GroupRecord, MoveRecord, Origin, RunRecord
from rollbook.ledger.store import Transaction

SETTLED = frozenset({GroupState.BATCHED, GroupState.TRAINED, GroupState.DURABLE, GroupState.DROPPED})
SUBMISSION_COUNTERS = frozenset(
    {
        "next_sequence",
        "next_arrival",
        "num_opened",
        "num_queued",
        "num_waiting",
        "queued_bytes",
        "queued_samples",
        "external_queued",
        "external_queued_samples",
        "waiting_samples",
        "expected_samples",
        "stored_samples",
    }
)
"""Fields that every submission changes and that do not affect whether a run is over."""
COUNTER_OF = {state: f"num_{state}" for state in GroupState if state not in (GroupState.DISPATCHED, GroupState.DROPPED)}


class UnknownRunError(RunError):
    """The ledger has no run of that name."""


class RunTransaction:
    """Rules read `run` and call `change` and `move`; the run's record is written once, by `save`."""

    def __init__(self, tx: Transaction, run: RunRecord, now: float) -> None:
        self.tx = tx
        self.now = now
        self.run_id: RunId = run.run_id
        self._run = run
        self._changes: dict[str, Any] = {}
        """Not in `_run` yet: the record of thirty fields is rebuilt when it is read, not at every count."""
        self._is_changed = False

    @property
    def run(self) -> RunRecord:
        if self._changes:
            self._run = self._run.changed(**self._changes)
            self._changes.clear()
        return self._run

    def change(self, **fields: Any) -> None:
        self._changes.update(fields)
        self._is_changed = True

    def count(self, name: str, by: int = 1) -> int:
        """Add to one of the run's counters; returns the value before."""
        before: int = self.field(name)
        self._changes[name] = before + by
        self._is_changed = True
        return before

    def field(self, name: str) -> Any:
        """The current value of a field of the run, without rebuilding the record."""
        return self._changes[name] if name in self._changes else getattr(self._run, name)

    @property
    def is_over(self) -> bool:
        """No more batches will be decided."""
        return self._run.is_over if self._changes.keys() <= SUBMISSION_COUNTERS else self.run.is_over

    def save(self) -> None:
        if self._is_changed:
            self.tx.runs.put(self.run)
            self._is_changed = False

    def fence(self, epoch: int) -> None:
        """Refuse a trainer that was replaced."""
        if epoch < self.run.epoch:
            raise FencedError(
                f"run {self.run_id}: the trainer of epoch {epoch} was replaced by epoch {self.run.epoch}; it must stop"
            )
        if epoch > self.run.epoch:
            raise RunError(
                f"run {self.run_id}: epoch {epoch} was never assigned (the last one is {self.run.epoch}); take the role first"
            )

    def group(self, group_id: GroupId) -> GroupRecord:
        group = self.tx.groups.get(self.run_id, group_id)
        if group is None:
            raise RunError(f"run {self.run_id}: group {group_id} was never opened; open it before settling it")
        return group

    def groups(self, group_ids: Sequence[GroupId]) -> list[GroupRecord]:
        """In the order of the ids."""
        known = self.tx.groups.find(self.run_id, group_ids)
        return [known[group_id] if group_id in known else self.group(group_id) for group_id in group_ids]

    def open(self, group: GroupRecord, *, note: str, by: str) -> None:
        """Write a new group, or part of one: dispatched, or, from an external producer, queued at once."""
        self.count("num_opened")
        if group.part == 1 and group.expected_samples:
            self.count("expected_samples", group.expected_samples)
        self._count_state(group, +1)
        self.tx.groups.put(group)
        self._add_history(group, None, group.state, note, by)
        if group.position is not None:
            self._open_position(group.position)

    def move(self, group: GroupRecord, to: GroupState, *, note: str, by: str, **fields: Any) -> GroupRecord:
        """Change the state and other fields of a group. Dispatched to dispatched starts or ends an attempt."""
        is_attempt = group.state is to is GroupState.DISPATCHED
        if not is_attempt and to not in MOVES[group.state]:
            raise RunError(f"run {self.run_id}: group {group.group_id} cannot move from {group.state} to {to} ({note})")
        if to is not GroupState.DISPATCHED:
            fields = {"owner": None, "lease_until": None, **fields}
        moved = group.changed(state=to, **fields)
        self._count_state(group, -1)
        self._count_state(moved, +1)
        self.tx.groups.put(moved)
        self._add_history(moved, group.state, to, note, by)
        if to in SETTLED and group.state not in SETTLED and group.position is not None:
            self._settle_position(group.position)
        return moved

    def drop(self, group: GroupRecord, reason: DropReason, *, by: str, **fields: Any) -> GroupRecord:
        # Samples of an open part that will not come. A part that is dropped with its payload is submitted, so none is missing.
        is_missing = group.state is GroupState.DISPATCHED and not fields.get("num_samples")
        self.tx.runs.count_drop(self.run_id, reason.kind, missing=group.expected_samples if is_missing else 0)
        # The payload of a dropped group is deleted with the next checkpoint that covers the steps decided so far.
        return self.move(
            group,
            GroupState.DROPPED,
            note=str(reason),
            by=by,
            drop_reason=str(reason),
            release_step=self.run.last_decided + 1,
            **fields,
        )

    def _count_state(self, group: GroupRecord, by: int) -> None:
        if group.state is GroupState.DISPATCHED:
            self.count("num_waiting" if group.owner is None else "num_leased", by)
            if group.expected_samples:
                self.count("waiting_samples" if group.owner is None else "leased_samples", by * group.expected_samples)
        elif group.state is not GroupState.DROPPED:
            self.count(COUNTER_OF[group.state], by)
        if group.state is GroupState.QUEUED:
            self.count("queued_bytes", by * group.payload_bytes)
            self.count("queued_samples", by * group.num_samples)
            if group.origin is Origin.EXTERNAL:
                self.count("external_queued", by)
                self.count("external_queued_samples", by * group.num_samples)

    def _add_history(
        self, group: GroupRecord, before: GroupState | None, after: GroupState, note: str, by: str
    ) -> None:
        self.tx.history.add(
            MoveRecord(
                run_id=self.run_id,
                group_id=group.group_id,
                at=self.now,
                from_state=before,
                to_state=after,
                note=note,
                by=by,
            )
        )
        self.tx.announce(self.run_id)

    def _open_position(self, position: int) -> None:
        """Count an unsettled part at this position of the cursor."""
        if position < self.run.settled_below:
            return
        known = self.tx.positions.get(self.run_id, position)
        self.tx.positions.put(self.run_id, position, unsettled=(known or 0) + 1)
        below = self.run.opened_below
        while known is None and self.tx.positions.get(self.run_id, below) is not None:
            below += 1
        if below != self.run.opened_below:
            self.change(opened_below=below)

    def _settle_position(self, position: int) -> None:
        """A part at this position is settled. The position is settled with the last one."""
        if position < self.run.settled_below:
            return
        unsettled = max(0, (self.tx.positions.get(self.run_id, position) or 0) - 1)
        self.tx.positions.put(self.run_id, position, unsettled=unsettled)
        below = self.run.settled_below
        # Positions below both limits are implied by the limits; only those above are stored as rows.
        while below < self.run.opened_below and self.tx.positions.get(self.run_id, below) == 0:
            self.tx.positions.delete(self.run_id, below)
            below += 1
        if below != self.run.settled_below:
            self.change(settled_below=below)


def find_run(tx: Transaction, run_id: RunId) -> RunRecord:
    run = tx.runs.get(run_id)
    if run is None:
        raise UnknownRunError(f"the ledger has no run {run_id!r}; create it first")
    return run


@contextmanager
def run_transaction(tx: Transaction, run_id: RunId, now: float) -> Iterator[RunTransaction]:
    """The run's record is written when the block ends without an error."""
    run_tx = RunTransaction(tx, find_run(tx, run_id), now)
    yield run_tx
    run_tx.save()
