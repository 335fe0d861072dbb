"""What an audit has found so far, its report, and the mark from which the next audit continues.

Durable and dropped groups never change. An audit without violations leaves a mark that counts them, and the next audit adds these
counts instead of reading their rows, histories and payloads again.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from rollbook.contracts.admission import AuditReport, RunId, SampleCounts
from rollbook.contracts.batch import BatchEntry
from rollbook.contracts.group import DropReason, GroupId, GroupState
from rollbook.ledger.records import GroupRecord, PublicationRecord, RunRecord
from rollbook.ledger.rules.publications import admission_of
from rollbook.ledger.rules.run_transaction import SETTLED
from rollbook.ledger.store import Transaction
from rollbook.ledger.tools.audit_samples import SampleLedger, SampleTotals, VersionBounds, version_bounds

MAX_VIOLATIONS = 200
"""A damaged ledger may have one for each group."""
FINAL = frozenset({GroupState.DURABLE, GroupState.DROPPED})
"""The states that a group never leaves."""


class AuditMark(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an audit without violations: counts of the groups that were durable or dropped then."""

    run_id: RunId
    created_at: float
    """When the run was created."""
    at: float
    number: int
    """The run's last move in the history."""
    last_run: RunId
    last_group: GroupId
    """The run and the group of that move."""
    last_moves: tuple[float, ...]
    """The times of that group's moves. Another record, such as a restored copy, has others."""
    epoch: int
    durable_step: int
    """Batches and steps up to this one are final."""
    publication: int
    """Publications below this one are final while the trainer is not replaced."""
    final_below: int
    """All groups of the positions below this one are final."""
    positions: tuple[int, ...]
    """Later positions whose groups are final."""
    num_durable: int
    num_unusable: int
    dropped: dict[str, int]
    samples: SampleTotals
    max_lag: int | None
    left_out: dict[str, int] = {}
    """Sequences that a setting leaves out of training, by reason."""

    def is_of(self, tx: Transaction, run: RunRecord) -> bool:
        """Whether the record that `tx` reads has grown out of the one that was audited."""
        if (self.run_id, self.created_at) != (run.run_id, run.created_at) or self.epoch > run.epoch:
            return False
        moves = tx.history.of_group(self.last_run, self.last_group)[: len(self.last_moves)]
        is_there = tx.history.after(self.number - 1, 1) == [(self.number, self.last_run, self.last_group)]
        return is_there and tuple(move.at for move in moves) == self.last_moves


@dataclass(slots=True)
class Findings:
    run: RunRecord
    mark: AuditMark | None = None
    violations: list[str] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    histories: Counter[str] = field(default_factory=Counter)
    num_histories: int = 0
    leased: int = 0
    queued_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    num_unusable: int = 0
    num_final_unusable: int = 0
    positions: dict[int, int] = field(default_factory=dict)
    """Opened positions of the cursor that are not below the mark's, and their number of unsettled parts."""
    changing_positions: set[int] = field(default_factory=set)
    """Those with a group that is neither durable nor dropped."""
    entries: dict[GroupId, tuple[int, BatchEntry]] = field(default_factory=dict)
    """Step and entry of each batched group, without final batches of the mark."""
    cuts: dict[int, int | None] = field(default_factory=dict)
    """The cut of each of these batches."""
    publications: dict[int, PublicationRecord] = field(default_factory=dict)
    """All publications, without those of the mark that no group needs."""
    known_bounds: dict[tuple[tuple[int, ...], int | None], VersionBounds | int] = field(default_factory=dict)
    """The results of `version_bounds` so far."""
    first_open_publication: int = 0
    """Publications below it are final while the trainer is not replaced."""
    max_lag: int | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    """Sequences that a setting leaves out of training, by reason."""
    final_left_out: Counter[str] = field(default_factory=Counter)
    """Those of durable and dropped groups."""
    quarantined: frozenset[str] = frozenset()
    samples: SampleLedger = field(init=False)
    sample_law: SampleCounts | None = None

    def __post_init__(self) -> None:
        self.samples = SampleLedger(self.run)
        mark = self.mark
        if mark is None:
            return
        for counted in (self.rows, self.histories):
            counted.update({GroupState.DURABLE: mark.num_durable, GroupState.DROPPED: sum(mark.dropped.values())})
        self.num_histories = self.rows.total()
        self.num_unusable = self.num_final_unusable = mark.num_unusable
        self.dropped.update(mark.dropped)
        self.positions.update(dict.fromkeys(mark.positions, 0))
        self.samples.final = mark.samples + SampleTotals()
        self.max_lag = mark.max_lag
        self.left_out.update(mark.left_out)
        self.final_left_out.update(mark.left_out)

    @property
    def final_step(self) -> int:
        """Batches and steps up to this one were audited before."""
        return 0 if self.mark is None else self.mark.durable_step

    @property
    def final_publication(self) -> int:
        """Publications below this one were audited before. A new trainer may have demoted them since."""
        return 0 if self.mark is None or self.mark.epoch != self.run.epoch else self.mark.publication

    def add(self, sentence: str) -> None:
        if len(self.violations) < MAX_VIOLATIONS and sentence not in self.violations:
            self.violations.append(sentence)

    def expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.add(f"{what}: {found}, expected {expected}")

    def expect_of(self, group: GroupRecord, what: str, found: object, expected: object) -> None:
        """Like `expect`; the sentence is only composed if it is needed, because composing it costs more than comparing."""
        if found != expected:
            self.add(f"group {group.group_id}: {what}: {found}, expected {expected}")

    def version_bounds(self, group: GroupRecord) -> VersionBounds | int:
        """See `version_bounds`; computed once for all groups with the same publications."""
        key = group.publications, admission_of(group)
        if key not in self.known_bounds:
            self.known_bounds[key] = version_bounds(*key, self.publications)
        return self.known_bounds[key]

    def count(self, group: GroupRecord) -> None:
        """Add a row to the counts."""
        self.rows[group.state] += 1
        is_final = group.state in FINAL
        self.num_unusable += group.unusable is not None
        self.num_final_unusable += group.unusable is not None and is_final
        if group.position is not None:
            unsettled = self.positions.get(group.position, 0) + (group.state not in SETTLED)
            self.positions[group.position] = unsettled
            if not is_final:
                self.changing_positions.add(group.position)
        self.samples.add(group, is_final=is_final)
        self.leased += group.owner is not None
        self.queued_bytes += group.payload_bytes if group.state is GroupState.QUEUED else 0
        if group.state is GroupState.DROPPED:
            try:
                self.dropped[DropReason.parse(group.drop_reason or "").kind.value] += 1
            except ValueError as error:
                self.add(f"group {group.group_id} is dropped: {error}")

    def count_left_out(self, group: GroupRecord, reasons: Iterable[str]) -> None:
        counted = Counter(reasons)
        self.left_out += counted
        if group.state in FINAL:
            self.final_left_out += counted

    def report(self) -> AuditReport:
        mark = self.mark
        return AuditReport(
            run_id=self.run.run_id,
            opened=self.run.num_opened,
            law={state.value: self.rows[state] for state in GroupState},
            dropped=dict(sorted(self.dropped.items())),
            steps=self.run.last_acknowledged,
            max_lag=self.max_lag,
            max_head_offpolicy_versions=self.run.settings.rule.max_head_offpolicy_versions,
            samples=self.sample_law,
            left_out=dict(sorted(self.left_out.items())),
            violations=tuple(self.violations),
            known=0 if mark is None else mark.num_durable + sum(mark.dropped.values()),
            known_at=None if mark is None else mark.at,
        )

    def new_mark(self, tx: Transaction, now: float) -> AuditMark | None:
        """The mark of this audit; None if it found violations, or there is nothing yet."""
        run, number = self.run, tx.history.last_number(self.run.run_id)
        if self.violations or not number:
            return None
        [(_, run_id, group_id)] = tx.history.after(number - 1, 1)
        first = 0 if self.mark is None else self.mark.final_below
        final = self.positions.keys() - self.changing_positions
        final_below = next(at for at in range(first, first + len(final) + 1) if at not in final)
        return AuditMark(
            run_id=run.run_id,
            created_at=run.created_at,
            at=now,
            number=number,
            last_run=run_id,
            last_group=group_id,
            last_moves=tuple(move.at for move in tx.history.of_group(run_id, group_id)),
            epoch=run.epoch,
            durable_step=run.durable_step,
            publication=self.first_open_publication,
            final_below=final_below,
            positions=tuple(sorted(at for at in final if at >= final_below)),
            num_durable=self.rows[GroupState.DURABLE],
            num_unusable=self.num_final_unusable,
            dropped=dict(self.dropped),
            samples=self.samples.final,
            max_lag=self.max_lag,
            left_out=dict(self.final_left_out),
        )
