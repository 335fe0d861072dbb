"""One run, open for one transaction: the run's record with its changes, and the only way a group changes its state.

Everything that moves a group goes through `move`, so that the row, its history, the counters and the settled prefix of the cursor's
order can never tell different stories.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import FencedError, RunError
from rollbook.contracts.group import MOVES, DropReason, GroupId, GroupState
from rollbook.ledger.records import GroupRecord, MoveRecord, RunRecord
from rollbook.ledger.store import Transaction

SETTLED = frozenset({GroupState.BATCHED, GroupState.TRAINED, GroupState.DURABLE, GroupState.DROPPED})


COUNTED = frozenset({"next_sequence", "next_arrival", "num_opened", "num_queued", "num_waiting", "queued_bytes"})
"""Numbers that every submission changes, and that say nothing about the end of a run."""


NUMBER_OF = {state: f"num_{state}" for state in GroupState if state not in (GroupState.DISPATCHED, GroupState.DROPPED)}


class UnknownRunError(RunError):
    """The ledger has no run of that name."""


class RunBook:
    """A run inside one transaction. Rules read `run`, call `change` and `move`; the record is written once, at the end."""

    def __init__(self, tx: Transaction, run: RunRecord, now: float) -> None:
        self.tx = tx
        self.now = now
        self.run_id: RunId = run.run_id
        self._run = run
        self._changes: dict[str, Any] = {}
        """What `run` does not show yet: a record of thirty fields is made anew when it is looked at, not at every count."""
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
        """Add to one of the run's numbers; returns what it was before."""
        before: int = self._changes[name] if name in self._changes else getattr(self._run, name)
        self._changes[name] = before + by
        self._is_changed = True
        return before

    def number(self, name: str) -> int:
        """One of the run's numbers as it stands, without making the record anew."""
        found: int = self._changes[name] if name in self._changes else getattr(self._run, name)
        return found

    def field(self, name: str) -> Any:
        """Any field of the run as it stands, without making the record anew."""
        return self._changes[name] if name in self._changes else getattr(self._run, name)

    @property
    def is_over(self) -> bool:
        """No further batch will be decided."""
        return self._run.is_over if self._changes.keys() <= COUNTED else self.run.is_over

    def save(self) -> None:
        if self._is_changed:
            self.tx.put_run(self.run)
            self._is_changed = False

    def fence(self, epoch: int) -> None:
        """Refuse a trainer that was replaced."""
        if epoch < self.run.epoch:
            raise FencedError(
                f"run {self.run_id}: the trainer of epoch {epoch} was replaced by epoch {self.run.epoch}; it must stop"
            )
        if epoch > self.run.epoch:
            raise RunError(
                f"run {self.run_id}: epoch {epoch} was never handed out (the last one is {self.run.epoch}); take the role first"
            )

    def group(self, group_id: GroupId) -> GroupRecord:
        group = self.tx.group(self.run_id, group_id)
        if group is None:
            raise RunError(f"run {self.run_id}: group {group_id} was never opened; open it before settling it")
        return group

    def groups(self, group_ids: Sequence[GroupId]) -> list[GroupRecord]:
        """Several, in the order asked for."""
        known = self.tx.known_groups(self.run_id, group_ids)
        return [known[group_id] if group_id in known else self.group(group_id) for group_id in group_ids]

    def begin(self, group: GroupRecord, *, note: str, by: str) -> None:
        """Write a group that is new: dispatched, and counted as opened."""
        self.count("num_opened")
        self._count_where(group, +1)
        self.tx.put_group(group)
        self._remember(group, None, GroupState.DISPATCHED, note, by)
        if group.position is not None:
            self._opened(group.position)

    def enter(self, group: GroupRecord, *, note: str, by: str) -> None:
        """Write a group from outside that is new and queued at once: `begin` and `move` in one, and one thing that happened."""
        self.count("num_opened")
        self._count_where(group, +1)
        self.tx.put_group(group)
        self._remember(group, None, group.state, note, by)

    def move(self, group: GroupRecord, to: GroupState, *, note: str, by: str, **fields: Any) -> GroupRecord:
        """Take a group to another state and change `fields` of it. Staying dispatched is a new attempt, or the loss of one."""
        stays = group.state is to is GroupState.DISPATCHED
        if not stays and to not in MOVES[group.state]:
            raise RunError(f"run {self.run_id}: group {group.group_id} cannot move from {group.state} to {to} ({note})")
        if to is not GroupState.DISPATCHED:
            fields = {"owner": None, "lease_until": None, **fields}
        moved = group.changed(state=to, **fields)
        self._count_where(group, -1)
        self._count_where(moved, +1)
        self.tx.put_group(moved)
        self._remember(moved, group.state, to, note, by)
        if to in SETTLED and group.state not in SETTLED and group.position is not None:
            self._settled(group.position)
        return moved

    def drop(self, group: GroupRecord, reason: DropReason, *, by: str, **fields: Any) -> GroupRecord:
        self.tx.count_drop(self.run_id, reason.kind)
        # A dropped group's payload is short-lived: it goes with the next checkpoint that covers the steps decided so far.
        return self.move(
            group,
            GroupState.DROPPED,
            note=str(reason),
            by=by,
            drop_reason=str(reason),
            release_step=self.run.last_decided + 1,
            **fields,
        )

    def _count_where(self, group: GroupRecord, by: int) -> None:
        if group.state is GroupState.DISPATCHED:
            self.count("num_waiting" if group.owner is None else "num_leased", by)
        elif group.state is not GroupState.DROPPED:
            self.count(NUMBER_OF[group.state], by)
        if group.state is GroupState.QUEUED:
            self.count("queued_bytes", by * group.payload_bytes)

    def _remember(self, group: GroupRecord, was: GroupState | None, becomes: GroupState, note: str, by: str) -> None:
        self.tx.add_move(
            MoveRecord(
                run_id=self.run_id,
                group_id=group.group_id,
                at=self.now,
                from_state=was,
                to_state=becomes,
                note=note,
                by=by,
            )
        )
        self.tx.announce(self.run_id)

    def _opened(self, position: int) -> None:
        if position < self.run.opened_below or self.tx.position(self.run_id, position) is not None:
            return
        self.tx.put_position(self.run_id, position, is_settled=False)
        below = self.run.opened_below
        while self.tx.position(self.run_id, below) is not None:
            below += 1
        if below != self.run.opened_below:
            self.change(opened_below=below)

    def _settled(self, position: int) -> None:
        if position < self.run.settled_below:
            return
        self.tx.put_position(self.run_id, position, is_settled=True)
        below = self.run.settled_below
        # What lies below both marks is told by the marks; only the positions above are kept as rows.
        while below < self.run.opened_below and self.tx.position(self.run_id, below):
            self.tx.delete_position(self.run_id, below)
            below += 1
        if below != self.run.settled_below:
            self.change(settled_below=below)


def find_run(tx: Transaction, run_id: RunId) -> RunRecord:
    run = tx.run(run_id)
    if run is None:
        raise UnknownRunError(f"the ledger has no run {run_id!r}; create it first")
    return run


@contextmanager
def opened_book(tx: Transaction, run_id: RunId, now: float) -> Iterator[RunBook]:
    """The book of a run. Its record is written when the block ends without an error."""
    book = RunBook(tx, find_run(tx, run_id), now)
    yield book
    book.save()
