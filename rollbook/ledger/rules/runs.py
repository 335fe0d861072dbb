"""Creating a run and reporting its status, its draw progress and its past outcomes."""

import re
from dataclasses import replace
from itertools import groupby

from rollbook.contracts.admission import (
    DrawProgress,
    GateState,
    LedgerStatus,
    PastDraw,
    RunId,
    RunSettings,
    SampleCounts,
)
from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import GroupState
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.ledger.records import GroupRecord, RunChanges, RunRecord
from rollbook.ledger.rules.parts import group_outcome
from rollbook.ledger.rules.run_transaction import find_run
from rollbook.ledger.store import Transaction

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_OUTCOMES = 10_000
"""Outcomes in one page: some megabytes."""


def require_run_id(run_id: RunId) -> None:
    if not RUN_ID.fullmatch(run_id):
        raise RunError(f"{run_id!r} is not a run id: use letters, digits, '.', '_' and '-', at most 128 characters")


def create_run(tx: Transaction, run_id: RunId, settings: RunSettings, *, now: float) -> None:
    """Create a run, or resume it with new settings. Settings that give recorded batches their meaning cannot change."""
    require_run_id(run_id)
    run = tx.runs.get(run_id)
    if run is None:
        tx.runs.put(RunRecord(run_id=run_id, settings=settings, created_at=now))
        return
    _refuse_changes(run, settings)
    resumed = run.changed(settings=settings, ended=_still_ended(run, settings))
    if run.is_drained:
        resumed = resumed.changed(is_draining=False, is_drained=False)
    if resumed != run:
        tx.runs.put(resumed)
        tx.announce(run_id)


def _refuse_changes(run: RunRecord, settings: RunSettings) -> None:
    owner = run.settings.directory_id
    if owner and settings.directory_id != owner:
        raise RunError(
            f"run {run.run_id} exists in this ledger and belongs to another run directory (its run.json has the id {owner}). "
            "Resume that directory, or choose another run.name"
        )
    old, new = run.settings.rule, settings.rule
    limits: tuple[tuple[str, object, object], ...] = ()
    if run.last_decided and run.settings.limits != TrainingLimits():
        # Recorded batches were trained without the groups outside of the limits.
        before_limits, after_limits = run.settings.limits, settings.limits
        limits = tuple(
            (name, getattr(before_limits, name), getattr(after_limits, name))
            for name in TrainingLimits.__dataclass_fields__
        )
    parts: tuple[tuple[str, object, object], ...] = ()
    if old.policy is BatchPolicy.PARTS:
        parts = (
            ("samples per group", old.samples_per_group, new.samples_per_group),
            ("quorum", old.quorum, new.quorum),
        )
    changed = [
        f"{name} was {before} and would be {after}"
        for name, before, after in (
            ("groups per step", old.groups_per_step, new.groups_per_step),
            ("batch policy", old.policy.value, new.policy.value),
            ("staleness bound", old.max_head_offpolicy_versions, new.max_head_offpolicy_versions),
            ("admission share", old.admission_share.value, new.admission_share.value),
            *parts,
            *limits,
        )
        if before != after
    ]
    if changed:
        raise RunError(
            f"run {run.run_id} exists with other settings: {'; '.join(changed)}. Start a new run to change them"
        )


def _still_ended(run: RunRecord, settings: RunSettings) -> EndOfRun | None:
    """A run that was stopped, or whose maximum of steps was raised, continues when it is created again."""
    most = settings.rule.max_steps
    if run.ended is EndOfRun.STOPPED:
        return None
    if run.ended is EndOfRun.MAX_STEPS and (most is None or most > run.last_decided):
        return None
    return run.ended


def count_aged(tx: Transaction, run: RunRecord) -> int:
    """Running groups, or samples with policy `parts`, that were admitted more than O versions ago.

    Most of their tokens will be masked, so they must not keep new groups from starting. Only with policies that mask tokens.
    """
    rule = run.settings.rule
    if run.version is None or not rule.policy.masks_tokens:
        return 0
    groups, samples = tx.groups.aged(run.run_id, run.version - rule.max_head_offpolicy_versions)
    return samples if rule.policy is BatchPolicy.PARTS else groups


def gate_of(run: RunRecord, *, aged: int) -> tuple[GateState, int]:
    """The gate's state and how many new groups may begin. `aged` is the result of `count_aged`."""
    if run.is_over:
        return GateState.ENDED, 0
    if run.is_paused:
        return GateState.PAUSED, 0
    if run.is_draining:
        return GateState.DRAINING, 0
    if run.version is None:
        return GateState.NO_POLICY, 0
    rule, counts = run.settings.rule, replace(run.counts, aged=aged)
    capacity = rule.capacity(counts, version=run.version)
    is_open = capacity > 0 or rule.retry_capacity(counts) > 0
    return (GateState.OPEN if is_open else GateState.FULL), capacity


def status(tx: Transaction, run_id: RunId) -> LedgerStatus:
    run = find_run(tx, run_id)
    aged = count_aged(tx, run)
    gate, capacity = gate_of(run, aged=aged)
    dropped = tx.runs.drops(run_id)
    return LedgerStatus(
        run_id=run_id,
        gate=gate,
        capacity=capacity,
        counts=replace(run.counts, aged=aged),
        opened=run.num_opened,
        by_state={
            GroupState.DISPATCHED.value: run.num_leased + run.num_waiting,
            GroupState.QUEUED.value: run.num_queued,
            GroupState.BATCHED.value: run.num_batched,
            GroupState.TRAINED.value: run.num_trained,
            GroupState.DURABLE.value: run.num_durable,
            GroupState.DROPPED.value: sum(dropped.values()),
        },
        dropped=dropped,
        queued_bytes=run.queued_bytes,
        version=run.version,
        publication=run.publication,
        epoch=run.epoch,
        acknowledged_step=run.last_acknowledged,
        durable_step=run.durable_step,
        unusable=run.num_unusable,
        samples=sample_counts(tx, run) if run.settings.rule.policy is BatchPolicy.PARTS else None,
        exhausted=run.exhausted,
        ended=run.ended is not None,
        checkpoint_requested=run.checkpoint_requested,
        quarantined=tuple(sorted(tx.actions.quarantined(run_id))) if run.num_quarantined else (),
        actions=run.next_action,
    )


def sample_counts(tx: Transaction, run: RunRecord) -> SampleCounts:
    return SampleCounts(
        expected=run.expected_samples,
        open=run.leased_samples + run.waiting_samples,
        stored=run.stored_samples,
        missing=tx.runs.missing(run.run_id),
    )


def progress(tx: Transaction, run_id: RunId) -> DrawProgress:
    """The state to rebuild the task cursor from. Reads only positions above the settled prefix."""
    run = find_run(tx, run_id)
    positions = tx.positions.all(run_id)
    return DrawProgress(
        opened_below=run.opened_below,
        opened_beyond=tuple(at for at, _ in positions if at >= run.opened_below),
        settled_below=run.settled_below,
        settled_beyond=tuple(at for at, unsettled in positions if unsettled == 0),
        exhausted=run.exhausted,
    )


def changes(tx: Transaction, run_id: RunId, *, after: int | None, limit: int) -> RunChanges:
    """The groups of a run that changed after the move with the number `after`, as they are now.

    Reads at most `limit` moves, of all runs of the store: moves are numbered together and have no index by run. None: no groups,
    only the number to continue after.

    The next page begins after a move of this run: a shared store may commit a move of this run after moves of other runs that have
    higher numbers. Only a full page without a move of this run is skipped, since reading it again would give the same page.
    """
    find_run(tx, run_id)
    if after is None:
        return RunChanges(next=tx.history.last_number(run_id), is_complete=True, groups=())
    moves = tx.history.after(after, limit)
    own = [(number, group_id) for number, run, group_id in moves if run == run_id]
    is_complete = len(moves) < limit
    changed = tuple(dict.fromkeys(group_id for _, group_id in own))
    found = tx.groups.find(run_id, changed)
    skipped = after if is_complete else moves[-1][0]
    return RunChanges(
        next=own[-1][0] if own else skipped,
        is_complete=is_complete,
        groups=tuple(found[group_id] for group_id in changed if group_id in found),
    )


def outcomes(tx: Transaction, run_id: RunId, *, after: int, limit: int) -> list[PastDraw]:
    """Past draws with a sequence above `after`, lowest first, to rebuild a curriculum. `after` = -1 begins; an empty list ends."""
    if limit < 1:
        raise RunError(f"run {run_id}: a page of {limit} outcomes was requested; request at least 1")
    find_run(tx, run_id)
    page = tx.groups.page(run_id, start=after + 1, limit=min(limit, MAX_OUTCOMES))
    return [_past_draw(list(parts)) for _, parts in groupby(page, key=lambda group: group.sequence)]


def _past_draw(parts: list[GroupRecord]) -> PastDraw:
    """One draw from all parts of its group. Its state is that of the part that is least far; dropped if all are."""
    first, last = parts[0], parts[-1]
    states = {part.state for part in parts}
    return PastDraw(
        group_id=first.group_id,
        task_id=first.task_id,
        number=first.draw,
        position=first.position,
        sequence=first.sequence,
        state=next(state for state in GroupState if state in states),
        outcome=None if last.state is GroupState.DISPATCHED else group_outcome(last),
    )
