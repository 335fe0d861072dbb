"""The audit checks a run's records for consistency. Read-only, on a live or a finished run.

The law: opened = dispatched + queued + batched + trained + durable + dropped. It is counted three times, from the run's counters,
from the groups' rows and from their histories, and all must agree. What a row states about its payload is computed again from the
payload: publications, outcome, digest, and whether the group can be trained. Every row is compared with its checksum.

An audit that continues from the mark of an earlier one reads what changed since: durable and dropped groups, their batches and
their payloads are not read again.
"""

import time
from contextlib import suppress

from rollbook.contracts.admission import ActionKind, AuditReport, RunId
from rollbook.contracts.freshness import lag
from rollbook.contracts.group import GroupId, GroupState
from rollbook.ledger.records import BatchRecord
from rollbook.ledger.rules.batches import manifest_digest
from rollbook.ledger.rules.run_transaction import find_run
from rollbook.ledger.rules.runs import sample_counts
from rollbook.ledger.store import ChangedRows, Reader, StoreFaultError, Transaction
from rollbook.ledger.tools.audit_findings import AuditMark, Findings
from rollbook.ledger.tools.audit_groups import changed_groups, check_checksums, check_groups


def audit(reader: Reader, run_id: RunId) -> AuditReport:
    """Check one run completely."""
    return reader.read_now(lambda tx: audit_run(tx, run_id))


def audit_run(tx: Transaction, run_id: RunId) -> AuditReport:
    """Check one run completely, inside a transaction: `await ledger.read(lambda tx: audit_run(tx, run_id))`."""
    return audit_since(tx, run_id, None)[0]


def audit_since(tx: Transaction, run_id: RunId, mark: AuditMark | None) -> tuple[AuditReport, AuditMark | None]:
    """Check what changed since the mark, and return the next mark. A mark of another record is ignored."""
    run = find_run(tx, run_id)
    findings = Findings(run, mark if mark is not None and mark.is_of(tx, run) else None)
    changed = None if findings.mark is None else changed_groups(tx, findings)
    for check in (
        _check_rows_on_disk,
        _check_publications,
        _check_actions,
        _check_batches,
        check_groups,
        _check_law,
        _check_steps,
    ):
        try:
            check(tx, findings, changed)
        except StoreFaultError as error:
            # Damaged so much that it cannot be read. The other checks may still find something.
            findings.add(str(error))
        except Exception as error:
            # A damaged row can hold a value of any type.
            with suppress(Exception):
                check_checksums(tx, findings, changed)
            if not findings.violations:
                raise
            findings.add(f"the damage hides the rest of the check: {type(error).__name__}: {error}")
    return findings.report(), findings.new_mark(tx, time.time())


def _check_rows_on_disk(tx: Transaction, findings: Findings, changed: list[GroupId] | None) -> None:
    rows = None
    if changed is not None:
        rows = ChangedRows(after_step=findings.final_step, publication=findings.final_publication)
    for sentence in tx.damage(findings.run.run_id, rows):
        findings.add(sentence)


def _check_publications(tx: Transaction, findings: Findings, _: object) -> None:
    """Ids are contiguous, and the versions of the run are those of its publications."""
    run, first = findings.run, findings.final_publication
    found = list(tx.publications.each(run.run_id, start=first))
    findings.publications = {int(publication.id): publication for publication in found}
    findings.expect("publications", list(findings.publications), list(range(first, run.next_publication)))
    is_open = (int(publication.id) for publication in found if publication.step > run.durable_step)
    findings.first_open_publication = next(is_open, run.next_publication)
    for publication in found:
        if not -1 <= publication.effective_step <= publication.step:
            findings.add(
                f"publication {publication.id} of step {publication.step} counts as version {publication.effective_step}"
            )
    current = None if run.publication is None else tx.publications.get(run.run_id, run.publication)
    findings.expect("the version of the current publication", None if current is None else current.step, run.version)
    if run.last_confirmed is not None and tx.publications.get(run.run_id, run.last_confirmed) is None:
        findings.add(f"the last confirmed publication {run.last_confirmed} is missing")


def _check_actions(tx: Transaction, findings: Findings, _: object) -> None:
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


def _check_batches(tx: Transaction, findings: Findings, _: object) -> None:
    """Batches are contiguous, full and fresh, and contain no group twice."""
    run, rule = findings.run, findings.run.settings.rule
    last = findings.final_step
    for batch in tx.batches.each(run.run_id, after=last):
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


def _check_size(batch: BatchRecord, findings: Findings) -> None:
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


def _check_law(tx: Transaction, findings: Findings, _: object) -> None:
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
    if findings.mark is not None:
        findings.samples.find_neighbours(tx)
    findings.samples.check(tx, findings.add)
    if findings.samples.counts_samples:
        findings.sample_law = sample_counts(tx, run)
        for batch in tx.batches.each(run.run_id, after=findings.final_step):
            findings.samples.check_batch(batch.manifest, findings.add)
    _check_positions(tx, findings)
    findings.expect("dropped groups by kind", dict(sorted(findings.dropped.items())), dict(sorted(drops.items())))


def _check_positions(tx: Transaction, findings: Findings) -> None:
    """The cursor's positions are those of the groups. Positions below `settled_below` are settled and have no row."""
    run, positions = findings.run, findings.positions
    known = 0 if findings.mark is None else findings.mark.final_below
    open_ones = {at: unsettled for at, unsettled in positions.items() if at >= run.settled_below}
    findings.expect("positions of the cursor", dict(tx.positions.all(run.run_id)), dict(sorted(open_ones.items())))
    settled = known + sum(unsettled == 0 for at, unsettled in positions.items() if at < run.settled_below)
    findings.expect("settled positions below the first open one", settled, run.settled_below)
    first_gap = next(at for at in range(known, known + len(positions) + 1) if at not in positions)
    findings.expect("opened positions below the first gap", run.opened_below, first_gap)


def _check_steps(tx: Transaction, findings: Findings, _: object) -> None:
    run = findings.run
    trained = sorted({step.step for step in tx.steps.each(run.run_id, after=findings.final_step)})
    findings.expect("trained steps", trained, list(range(findings.final_step + 1, run.last_acknowledged + 1)))
    if not run.durable_step <= run.last_acknowledged <= run.last_decided:
        findings.add(
            f"durable step {run.durable_step}, acknowledged step {run.last_acknowledged} and decided step "
            f"{run.last_decided} are out of order"
        )
