"""The audit checks a run's records for consistency. Read-only, on a live or a finished run.

The law: opened = dispatched + queued + batched + trained + durable + dropped. It is counted three times, from the run's counters,
from the groups' rows and from their histories, and all must agree. What a row states about its payload is computed again from the
payload: publications, outcome, digest, and whether the group can be trained. Every row is compared with its checksum.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import msgspec

from rollbook.contracts.admission import ActionKind, RunId, SampleCounts
from rollbook.contracts.batch import BatchEntry
from rollbook.contracts.freshness import lag
from rollbook.contracts.group import MOVES, DropReason, GroupId, GroupOutcome, GroupState
from rollbook.contracts.group_checks import UnusableGroupError, false_claims, find_obstacle, inspect_payload
from rollbook.contracts.group_codec import payload_digest
from rollbook.ledger.records import BatchRecord, GroupRecord, MoveRecord, Origin, PublicationRecord, RunRecord
from rollbook.ledger.rules.batches import manifest_digest
from rollbook.ledger.rules.parts import wrong_part
from rollbook.ledger.rules.run_transaction import SETTLED, find_run
from rollbook.ledger.rules.runs import sample_counts
from rollbook.ledger.store import Reader, StoreFaultError, Transaction
from rollbook.ledger.tools.audit_samples import SampleLedger, wrong_mask, wrong_versions

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
    samples: SampleCounts | None = None
    """The law of samples, only with policy `parts`."""
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
    for check in (
        _check_rows_on_disk,
        _check_publications,
        _check_actions,
        _check_batches,
        _check_groups,
        _check_law,
        _check_steps,
    ):
        try:
            check(tx, findings)
        except StoreFaultError as error:
            # Damaged so much that it cannot be read. The other checks may still find something.
            findings.add(str(error))
        except Exception as error:
            # A damaged row can hold a value of any type.
            if not findings.violations:
                raise
            findings.add(f"the damage hides the rest of the check: {type(error).__name__}: {error}")
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
    num_unusable: int = 0
    positions: dict[int, int] = field(default_factory=dict)
    """Opened positions of the cursor, and their number of unsettled parts."""
    entries: dict[GroupId, tuple[int, BatchEntry]] = field(default_factory=dict)
    """Step and entry of each batched group."""
    cuts: dict[int, int | None] = field(default_factory=dict)
    """The cut of each batch."""
    publications: dict[int, PublicationRecord] = field(default_factory=dict)
    max_lag: int | None = None
    quarantined: frozenset[str] = frozenset()
    samples: SampleLedger = field(init=False)
    sample_law: SampleCounts | None = None

    def __post_init__(self) -> None:
        self.samples = SampleLedger(self.run)

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
            samples=self.sample_law,
            violations=tuple(self.violations),
        )


def _check_rows_on_disk(tx: Transaction, findings: _Findings) -> None:
    for sentence in tx.damage(findings.run.run_id):
        findings.add(sentence)


def _check_publications(tx: Transaction, findings: _Findings) -> None:
    """Ids are contiguous, and the versions of the run are those of its publications."""
    run = findings.run
    found = list(tx.publications.each(run.run_id))
    findings.publications = {int(publication.id): publication for publication in found}
    findings.expect("publications", list(findings.publications), list(range(run.next_publication)))
    for publication in found:
        if not -1 <= publication.effective_step <= publication.step:
            findings.add(
                f"publication {publication.id} of step {publication.step} counts as version {publication.effective_step}"
            )
    current = findings.publications.get(-1 if run.publication is None else run.publication)
    findings.expect("the version of the current publication", None if current is None else current.step, run.version)
    if run.last_confirmed is not None and run.last_confirmed not in findings.publications:
        findings.add(f"the last confirmed publication {run.last_confirmed} is missing")


def _check_actions(tx: Transaction, findings: _Findings) -> None:
    """Actions of operators are contiguous, and the run is as they left it."""
    run = findings.run
    found = tx.actions.page(run.run_id, limit=run.next_action + 1)
    findings.expect("actions", [action.number for action in found], list(range(run.next_action)))
    findings.quarantined = tx.actions.quarantined(run.run_id)
    findings.expect("tasks in quarantine", len(findings.quarantined), run.num_quarantined)
    is_paused = is_draining = is_drained = False
    for action in found:
        if action.kind is ActionKind.PAUSE:
            is_paused = True
        elif action.kind is ActionKind.RESUME:
            is_paused = is_draining = is_drained = False
        elif action.kind is ActionKind.DRAIN:
            is_paused, is_draining, is_drained = False, True, False
        elif action.kind is ActionKind.DRAINED:
            is_drained = True
    findings.expect("admission is paused by the actions", is_paused, run.is_paused)
    # Creating the run again ends a complete drain without an action.
    if not (is_drained and not run.is_draining):
        findings.expect("the run is draining by the actions", is_draining, run.is_draining)


def _check_batches(tx: Transaction, findings: _Findings) -> None:
    """Batches are contiguous, full and fresh, and contain no group twice."""
    run, rule = findings.run, findings.run.settings.rule
    last = 0
    for batch in tx.batches.each(run.run_id):
        manifest = batch.manifest
        findings.expect("the batches are not contiguous, next step", manifest.step, last + 1)
        last = manifest.step
        _check_size(batch, findings)
        findings.cuts[manifest.step] = manifest.cut
        findings.expect(f"batch {manifest.step}: cut", manifest.cut, rule.cut(manifest.step))
        findings.expect(
            f"batch {manifest.step}: digest", manifest.digest, manifest_digest(manifest.entries, manifest.cut)
        )
        for entry in manifest.entries:
            if entry.group_id in findings.entries:
                findings.add(
                    f"group {entry.group_id} is in batch {findings.entries[entry.group_id][0]} and in batch {manifest.step}"
                )
            findings.entries[entry.group_id] = manifest.step, entry
            if entry.oldest_version is not None:
                found = lag(step=manifest.step, oldest_version=entry.oldest_version)
                findings.max_lag = max(found, findings.max_lag or 0)
                if not 0 <= found <= rule.max_head_offpolicy_versions:
                    findings.add(
                        f"group {entry.group_id} has lag {found} in batch {manifest.step}, "
                        f"the bound is {rule.max_head_offpolicy_versions}"
                    )
    findings.expect("the last decided batch", last, run.last_decided)


def _check_size(batch: BatchRecord, findings: _Findings) -> None:
    manifest, wanted = batch.manifest, findings.run.settings.rule.groups_per_step
    size = len(manifest.entries)
    if findings.run.settings.counts_sequences:
        return
    if manifest.is_last:
        findings.expect("the short batch must be the last, its step", manifest.step, findings.run.last_decided)
    if findings.samples.counts_samples:
        return  # checked once the rows are read
    if manifest.is_last:
        if not 1 <= size < wanted:
            findings.add(f"batch {manifest.step} is the short last one and has {size} groups of {wanted}")
    else:
        findings.expect(f"batch {manifest.step}: groups", size, wanted)


def _check_groups(tx: Transaction, findings: _Findings) -> None:
    histories = _histories(tx, findings.run.run_id)
    history = next(histories, None)
    remaining = dict(findings.entries)
    for group in tx.groups.each(findings.run.run_id):
        while history is not None and history[0].encode() < group.group_id.encode():
            findings.add(f"group {history[0]} has a history but no row")
            history = next(histories, None)
        if history is not None and history[0] == group.group_id:
            _check_history(group, history[1], findings)
            history = next(histories, None)
        else:
            findings.add(f"group {group.group_id} has no history")
        if group.task_id in findings.quarantined and group.state not in SETTLED:
            findings.add(f"group {group.group_id} is {group.state}, and its task {group.task_id} is in quarantine")
        _check_row(tx, group, remaining.pop(group.group_id, (None, None)), findings)
    while history is not None:
        findings.add(f"group {history[0]} has a history but no row")
        history = next(histories, None)
    for group_id, (step, _) in remaining.items():
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
    findings.expect(f"group {group.group_id}: time of opening", moves[0].at, group.opened_at)
    if state is not None:
        findings.histories[state] += 1


def _check_row(
    tx: Transaction,
    group: GroupRecord,
    batched: tuple[int, BatchEntry] | tuple[None, None],
    findings: _Findings,
) -> None:
    run = findings.run
    batched_in, entry = batched
    findings.rows[group.state] += 1
    findings.num_unusable += group.unusable is not None
    if group.position is not None:
        unsettled = findings.positions.get(group.position, 0) + (group.state not in SETTLED)
        findings.positions[group.position] = unsettled
    findings.samples.add(group)
    findings.leased += group.owner is not None
    findings.queued_bytes += group.payload_bytes if group.state is GroupState.QUEUED else 0
    if group.state is GroupState.DROPPED:
        try:
            findings.dropped[DropReason.parse(group.drop_reason or "").kind.value] += 1
        except ValueError as error:
            findings.add(f"group {group.group_id} is dropped: {error}")
    is_batched = group.state in (GroupState.BATCHED, GroupState.TRAINED, GroupState.DURABLE)
    findings.expect(
        f"group {group.group_id} is {group.state}: its batch", batched_in, group.step if is_batched else None
    )
    if batched_in is not None:
        wanted = GroupState.BATCHED
        if batched_in <= run.last_acknowledged:
            wanted = GroupState.DURABLE if batched_in <= run.durable_step else GroupState.TRAINED
        findings.expect(f"group {group.group_id} of batch {batched_in}: state", group.state, wanted)
    if entry is not None and batched_in is not None:
        _check_entry(group, batched_in, entry, findings)
    for sentence in wrong_versions(group, findings.publications):
        findings.add(f"group {group.group_id} {sentence}")
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
    else:
        findings.expect(f"group {group.group_id}: bytes of its payload", len(payload), group.payload_bytes)
        _check_payload(payload, group, findings)


def _check_entry(group: GroupRecord, step: int, entry: BatchEntry, findings: _Findings) -> None:
    # With masked tokens, the oldest version of the entry is that of the remaining ones.
    oldest = entry.oldest_version if entry.masked else group.oldest_version
    stated = (entry.payload_digest, entry.sequence, entry.oldest_version)
    found = (group.payload_digest or "", group.sequence, oldest)
    findings.expect(f"group {group.group_id}: digest, sequence and oldest version in its batch", stated, found)
    wrong = wrong_mask(group, entry, findings.cuts[step], findings.publications)
    if wrong is not None:
        findings.add(f"group {group.group_id} in batch {step}: {wrong}")


def _check_payload(payload: bytes, group: GroupRecord, findings: _Findings) -> None:
    """The row states what the payload contains, and the group is usable unless the trainer reported that it is not."""
    try:
        outcome = msgspec.json.decode(group.outcome or b"", type=GroupOutcome)
    except (msgspec.MsgspecError, ValueError) as error:
        findings.add(f"group {group.group_id}: its outcome is damaged: {error}")
        return
    if findings.run.settings.counts_sequences:
        return  # groups of another dialect, for a trainer that does not report unusable groups
    facts = obstacle = None
    try:
        facts = inspect_payload(payload, group.group_id)
    except UnusableGroupError as error:
        obstacle = str(error)
    if facts is not None:
        for claim in false_claims(
            facts, task_id=group.task_id, draw=group.draw, publications=group.publications, outcome=outcome
        ):
            findings.add(f"group {group.group_id}: by its payload, {claim}")
        is_external = group.origin is Origin.EXTERNAL
        rule = findings.run.settings.rule
        wrong = wrong_part(rule, facts, name=group.group_id, group=None if is_external else group)
        if wrong is not None:
            findings.add(f"group {group.group_id}: {wrong}")
        stated = (group.num_samples, group.baseline)
        findings.expect(f"group {group.group_id}: samples and baseline", stated, (facts.num_samples, facts.baseline))
        obstacle = find_obstacle(facts, findings.run.settings.limits)
    if group.state in (GroupState.TRAINED, GroupState.DURABLE):
        if (group.unusable is None) is not (obstacle is None):
            findings.add(f"group {group.group_id}: recorded as unusable: {group.unusable}, by its payload: {obstacle}")
    elif group.state is not GroupState.DROPPED and obstacle is not None:
        findings.add(f"group {group.group_id} is {group.state} and cannot be trained: {obstacle}")


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
    findings.expect("unusable groups by rows", findings.num_unusable, run.num_unusable)
    findings.samples.check(tx, findings.add)
    if findings.samples.counts_samples:
        findings.sample_law = sample_counts(tx, run)
        for batch in tx.batches.each(run.run_id):
            findings.samples.check_batch(batch.manifest, findings.add)
    _check_positions(tx, findings)
    findings.expect("dropped groups by kind", dict(sorted(findings.dropped.items())), dict(sorted(drops.items())))


def _check_positions(tx: Transaction, findings: _Findings) -> None:
    """The cursor's positions are those of the groups. Positions below `settled_below` are settled and have no row."""
    run, positions = findings.run, findings.positions
    open_ones = {at: unsettled for at, unsettled in positions.items() if at >= run.settled_below}
    findings.expect("positions of the cursor", dict(tx.positions.all(run.run_id)), dict(sorted(open_ones.items())))
    settled = sum(unsettled == 0 for at, unsettled in positions.items() if at < run.settled_below)
    findings.expect("settled positions below the first open one", settled, run.settled_below)
    first_gap = next(at for at in range(len(positions) + 1) if at not in positions)
    findings.expect("opened positions below the first gap", run.opened_below, first_gap)


def _check_steps(tx: Transaction, findings: _Findings) -> None:
    run = findings.run
    trained = sorted({step.step for step in tx.steps.each(run.run_id)})
    findings.expect("trained steps", trained, list(range(1, run.last_acknowledged + 1)))
    if not run.durable_step <= run.last_acknowledged <= run.last_decided:
        findings.add(
            f"durable step {run.durable_step}, acknowledged step {run.last_acknowledged} and decided step "
            f"{run.last_decided} are out of order"
        )
