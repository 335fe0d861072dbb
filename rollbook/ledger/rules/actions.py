"""Actions of operators: pause, resume, drain, checkpoint, quarantine, readmit, annotate. Each is one transaction.

The record of an action is never changed. What it does is part of the run's record, so it holds after every restart: admission stays
paused until it is resumed, and a requested checkpoint is requested until there is one.
"""

from rollbook.contracts.admission import NEEDS_TASK, ActionKind
from rollbook.contracts.errors import NotFoundError, RunError
from rollbook.contracts.group import DropKind, DropReason, GroupId
from rollbook.ledger.records import ActionRecord
from rollbook.ledger.rules.run_transaction import RunTransaction

AFTER_THE_END = frozenset({ActionKind.ANNOTATE})
"""Actions that are possible when the run is over."""


def act(
    run_tx: RunTransaction,
    kind: ActionKind,
    *,
    author: str,
    nonce: str,
    target: str = "",
    sample: int | None = None,
    note: str = "",
) -> ActionRecord:
    """Record an action and do it. A repetition of the request returns the recorded action and does nothing."""
    known = run_tx.tx.actions.by_nonce(run_tx.run_id, nonce)
    if known is not None:
        return known
    _check(run_tx, kind, author=author, target=target, sample=sample, note=note)
    action = ActionRecord(
        run_id=run_tx.run_id,
        number=run_tx.count("next_action"),
        kind=kind,
        author=author,
        at=run_tx.now,
        target=target,
        sample=sample,
        note=note,
        nonce=nonce,
    )
    run_tx.tx.actions.add(action)
    _do(run_tx, action)
    run_tx.tx.announce(run_tx.run_id)
    return action


def _check(
    run_tx: RunTransaction, kind: ActionKind, *, author: str, target: str, sample: int | None, note: str
) -> None:
    run = f"run {run_tx.run_id}"
    if not author.strip():
        raise RunError(f"{run}: the action {kind} has no author: name one")
    if kind not in AFTER_THE_END and run_tx.is_over:
        raise RunError(f"{run} is over: {kind} would have no effect. Only notes can be added")
    if kind is ActionKind.ANNOTATE:
        group = run_tx.tx.groups.get(run_tx.run_id, GroupId(target))
        if group is None:
            raise NotFoundError(f"{run}: there is no group {target}")
        if not note.strip():
            raise RunError(f"{run}: the note about {target} is empty")
        if sample is not None and not 0 <= sample < max(group.num_samples, 1):
            raise RunError(f"{run}: group {target} has {group.num_samples} samples, there is no sample {sample}")
    elif sample is not None:
        raise RunError(f"{run}: the action {kind} is not about a sample")
    elif (kind in NEEDS_TASK) is not bool(target):
        raise RunError(f"{run}: the action {kind} {'needs a task' if kind in NEEDS_TASK else 'has no target'}")
    is_quarantined = kind in NEEDS_TASK and target in run_tx.tx.actions.quarantined(run_tx.run_id)
    if kind is ActionKind.QUARANTINE and is_quarantined:
        raise RunError(f"{run}: task {target} is in quarantine already")
    if kind is ActionKind.READMIT and not is_quarantined:
        raise RunError(f"{run}: task {target} is not in quarantine")
    if kind is ActionKind.DRAINED and not run_tx.run.is_draining:
        raise RunError(f"{run} is not being drained")


def _do(run_tx: RunTransaction, action: ActionRecord) -> None:
    run = run_tx.run
    match action.kind:
        case ActionKind.PAUSE:
            run_tx.change(is_paused=True)
        case ActionKind.RESUME:
            run_tx.change(is_paused=False, is_draining=False, is_drained=False)
        case ActionKind.DRAIN:
            # Groups that wait for another attempt must end too, so a drain ends a pause.
            run_tx.change(is_paused=False, is_draining=True)
        case ActionKind.DRAINED:
            run_tx.change(is_drained=True)
        case ActionKind.CHECKPOINT:
            is_done = run.durable_step >= run.last_acknowledged
            run_tx.change(checkpoint_requested=None if is_done else run.last_acknowledged)
        case ActionKind.QUARANTINE:
            run_tx.count("num_quarantined")
            reason = DropReason(DropKind.QUARANTINED, f"by {action.author}")
            for group in [*run_tx.tx.groups.dispatched(run_tx.run_id), *run_tx.tx.groups.queued(run_tx.run_id)]:
                if group.task_id == action.target:
                    run_tx.drop(group, reason, by=f"action {action.number}")
        case ActionKind.READMIT:
            run_tx.count("num_quarantined", -1)
        case ActionKind.ANNOTATE:
            pass
