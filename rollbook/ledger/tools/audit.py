"""The audit checks a run's records for consistency. Read-only, on a live or a finished run.

The law: opened = dispatched + queued + batched + trained + durable + dropped. It is counted three times, from the run's counters,
from the groups' rows and from their histories, and all must agree. Then the batches, the steps and the payloads are checked.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from rollbook.contracts.admission import RunId
from rollbook.contracts.freshness import lag
from rollbook.contracts.group import MOVES, DropReason, GroupId, GroupState
from rollbook.contracts.group_codec import payload_digest
from rollbook.ledger.records import BatchRecord, GroupRecord, MoveRecord, Origin, RunRecord
from rollbook.ledger.rules.batches import manifest_digest
from rollbook.ledger.rules.run_transaction import find_run
from rollbook.ledger.store import Reader, StoreFaultError, Transaction

MAX_VIOLATIONS = 200
"""A damaged ledger may have one for each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    run_id: RunId
    opened: int
    law: Mapping[str, int]
    """Groups by state."""
    dropped: Mapping[str, int]
    """Dropped groups by kind."""
    steps: int
    """Trained steps."""
    max_lag: int | None
    max_head_offpolicy_versions: int
    violations: tuple[str, ...] = ()
    """One sentence for each. Empty: the records are consistent."""

    @property
    def ok(self) -> bool:
        return not self.violations


def audit(reader: Reader, run_id: RunId) -> AuditReport:
    """Check one run."""
    return reader.read_now(lambda tx: audit_run(tx, run_id))


def audit_run(tx: Transaction, run_id: RunId) -> AuditReport:
    """Check one run inside a transaction: `await ledger.read(lambda tx: audit_run(tx, run_id))`."""
    findings = _Findings(find_run(tx, run_id))
    batches = _check_batches(tx, findings)
    _check_groups(tx, findings, batches)
    _check_law(tx, findings)
    _check_steps(tx, findings)
    return findings.report()


@dataclass(slots=True)
class _Findings:
    run: RunRecord
    violations: list[str] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    histories: Counter[str] = field(default_factory=Counter)
    num_histories: int = 0
    leased: int = 0
    queued_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    max_lag: int | None = None

    def add(self, sentence: str) -> None:
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(sentence)

    def expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.add(f"{what}: {found}, expected {expected}")

    def report(self) -> AuditReport:
        return AuditReport(
            run_id=self.run.run_id,
            opened=self.run.num_opened,
            law={state.value: self.rows[state] for state in GroupState},
            dropped=dict(sorted(self.dropped.items())),
            steps=self.run.last_acknowledged,
            max_lag=self.max_lag,
            max_head_offpolicy_versions=self.run.settings.rule.max_head_offpolicy_versions,
            violations=tuple(self.violations),
        )


def _check_batches(tx: Transaction, findings: _Findings) -> dict[GroupId, int]:
    """Batches are contiguous, full and fresh, and contain no group twice. Returns the step of each batched group."""
    run, rule = findings.run, findings.run.settings.rule
    step_of: dict[GroupId, int] = {}
    last = 0
    for batch in tx.batches.each(run.run_id):
        manifest = batch.manifest
        findings.expect("the batches are not contiguous, next step", manifest.step, last + 1)
        last = manifest.step
        _check_size(batch, findings)
        findings.expect(f"batch {manifest.step}: digest", manifest.digest, manifest_digest(manifest.entries))
        for entry in manifest.entries:
            if entry.group_id in step_of:
                findings.add(
                    f"group {entry.group_id} is in batch {step_of[entry.group_id]} and in batch {manifest.step}"
                )
            step_of[entry.group_id] = manifest.step
            if entry.oldest_version is not None:
                found = lag(step=manifest.step, oldest_version=entry.oldest_version)
                findings.max_lag = max(found, findings.max_lag or 0)
                if not 0 <= found <= rule.max_head_offpolicy_versions:
                    findings.add(
                        f"group {entry.group_id} has lag {found} in batch {manifest.step}, "
                        f"the bound is {rule.max_head_offpolicy_versions}"
                    )
    findings.expect("the last decided batch", last, run.last_decided)
    return step_of


def _check_size(batch: BatchRecord, findings: _Findings) -> None:
    manifest, wanted = batch.manifest, findings.run.settings.rule.groups_per_step
    size = len(manifest.entries)
    if findings.run.settings.counts_sequences:
        return
    if manifest.is_last:
        findings.expect("the short batch must be the last, its step", manifest.step, findings.run.last_decided)
        if not 1 <= size < wanted:
            findings.add(f"batch {manifest.step} is the short last one and has {size} groups of {wanted}")
    else:
        findings.expect(f"batch {manifest.step}: groups", size, wanted)


def _check_groups(tx: Transaction, findings: _Findings, step_of: Mapping[GroupId, int]) -> None:
    histories = _histories(tx, findings.run.run_id)
    history = next(histories, None)
    remaining = dict(step_of)
    for group in tx.groups.each(findings.run.run_id):
        while history is not None and history[0].encode() < group.group_id.encode():
            findings.add(f"group {history[0]} has a history but no row")
            history = next(histories, None)
        if history is not None and history[0] == group.group_id:
            _check_history(group, history[1], findings)
            history = next(histories, None)
        else:
            findings.add(f"group {group.group_id} has no history")
        _check_row(tx, group, remaining.pop(group.group_id, None), findings)
    while history is not None:
        findings.add(f"group {history[0]} has a history but no row")
        history = next(histories, None)
    for group_id, step in remaining.items():
        findings.add(f"group {group_id} is in batch {step} but has no row")


def _histories(tx: Transaction, run_id: RunId) -> Iterator[tuple[GroupId, list[MoveRecord]]]:
    for group_id, moves in groupby(tx.history.each(run_id), key=lambda move: move.group_id):
        yield group_id, list(moves)


def _check_history(group: GroupRecord, moves: list[MoveRecord], findings: _Findings) -> None:
    """The moves are a legal chain from the opening to the state of the row."""
    findings.num_histories += 1
    state: GroupState | None = None
    for move in moves:
        is_new_attempt = move.from_state is move.to_state is GroupState.DISPATCHED
        if state is None:
            # An external group may be opened in the queued state.
            first = {GroupState.DISPATCHED} | ({GroupState.QUEUED} if group.origin is Origin.EXTERNAL else set())
            is_legal = move.from_state is None and move.to_state in first
        else:
            is_legal = move.from_state is state and (is_new_attempt or move.to_state in MOVES[state])
        if not is_legal:
            findings.add(f"group {group.group_id} moved from {move.from_state} to {move.to_state} when it was {state}")
        state = move.to_state
    findings.expect(f"group {group.group_id}: state by its history", state, group.state)
    if state is not None:
        findings.histories[state] += 1


def _check_row(tx: Transaction, group: GroupRecord, batched_in: int | None, findings: _Findings) -> None:
    run = findings.run
    findings.rows[group.state] += 1
    findings.leased += group.owner is not None
    findings.queued_bytes += group.payload_bytes if group.state is GroupState.QUEUED else 0
    if group.state is GroupState.DROPPED:
        findings.dropped[DropReason.parse(group.drop_reason or "").kind.value] += 1
    is_batched = group.state in (GroupState.BATCHED, GroupState.TRAINED, GroupState.DURABLE)
    findings.expect(
        f"group {group.group_id} is {group.state}: its batch", batched_in, group.step if is_batched else None
    )
    if batched_in is not None:
        wanted = GroupState.BATCHED
        if batched_in <= run.last_acknowledged:
            wanted = GroupState.DURABLE if batched_in <= run.durable_step else GroupState.TRAINED
        findings.expect(f"group {group.group_id} of batch {batched_in}: state", group.state, wanted)
    is_needed = group.state is GroupState.QUEUED or (batched_in is not None and batched_in > run.payload_floor)
    try:
        payload = tx.payloads.get(run.run_id, group.group_id) if is_needed or group.has_payload else None
    except StoreFaultError as error:
        findings.add(f"group {group.group_id}: {error}")
        return
    if payload is None:
        if is_needed or group.has_payload:
            findings.add(f"group {group.group_id} is {group.state} and its payload is missing")
    elif payload_digest(payload) != group.payload_digest:
        findings.add(f"group {group.group_id}: its payload does not match its digest {group.payload_digest}")


def _check_law(tx: Transaction, findings: _Findings) -> None:
    run = findings.run
    drops = tx.runs.drops(run.run_id)
    counted = {
        GroupState.DISPATCHED: run.num_leased + run.num_waiting,
        GroupState.QUEUED: run.num_queued,
        GroupState.BATCHED: run.num_batched,
        GroupState.TRAINED: run.num_trained,
        GroupState.DURABLE: run.num_durable,
        GroupState.DROPPED: sum(drops.values()),
    }
    findings.expect("opened groups by rows", findings.rows.total(), run.num_opened)
    findings.expect("opened groups by histories", findings.num_histories, run.num_opened)
    findings.expect("opened groups by the counters of states", sum(counted.values()), run.num_opened)
    for state, number in counted.items():
        findings.expect(f"{state} groups by rows", findings.rows[state], number)
        findings.expect(f"{state} groups by histories", findings.histories[state], number)
    findings.expect("leased groups by rows", findings.leased, run.num_leased)
    findings.expect("queued bytes by rows", findings.queued_bytes, run.queued_bytes)
    findings.expect("dropped groups by kind", dict(sorted(findings.dropped.items())), dict(sorted(drops.items())))


def _check_steps(tx: Transaction, findings: _Findings) -> None:
    run = findings.run
    trained = sorted({step.step for step in tx.steps.each(run.run_id)})
    findings.expect("trained steps", trained, list(range(1, run.last_acknowledged + 1)))
    if not run.durable_step <= run.last_acknowledged <= run.last_decided:
        findings.add(
            f"durable step {run.durable_step}, acknowledged step {run.last_acknowledged} and decided step "
            f"{run.last_decided} are out of order"
        )
