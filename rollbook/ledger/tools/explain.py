"""The history of a group in sentences: who opened it, which versions sampled it, its attempts, and why it was trained or not."""

from datetime import UTC, datetime

import msgspec

from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import BatchPolicy, lag
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupOutcome, GroupState
from rollbook.contracts.policy import PublicationId
from rollbook.contracts.user_errors import indented
from rollbook.ledger.records import GroupRecord, MoveRecord, Origin, RunRecord
from rollbook.ledger.rules.run_transaction import find_run
from rollbook.ledger.store import Reader, Transaction

REASONS = {
    DropKind.STALE: "it was too old for every later batch",
    DropKind.FILTERED: "a filter of the rollout found nothing to learn in it",
    DropKind.INVALID: "too few of its samples could be scored",
    DropKind.TIMEOUT: "its last attempt did not end in time",
    DropKind.ATTEMPTS: "its last attempt failed",
    DropKind.SURPLUS: "it was not needed",
    DropKind.END_OF_DATA: "the data ended and it did not fill a batch",
    DropKind.END_OF_RUN: "the run was over",
    DropKind.RESET: "the run was reset",
}


class UnknownGroupError(RunError):
    """The run has no group with that id."""


def explain(reader: Reader, run_id: RunId, group_id: GroupId) -> list[str]:
    """Explain one group."""
    return reader.read_now(lambda tx: explain_group(tx, run_id, group_id))


def explain_group(tx: Transaction, run_id: RunId, group_id: GroupId) -> list[str]:
    """Explain one group inside a transaction."""
    run = find_run(tx, run_id)
    group = tx.groups.get(run_id, group_id)
    if group is None:
        raise UnknownGroupError(
            f"run {run_id}: there is no group {group_id}; it was never opened, or its submission was refused"
        )
    sentences = [_opening(group)]
    sentences += [_move(move) for move in tx.history.of_group(run_id, group_id)]
    sentences += _versions(tx, run, group)
    sentences += _results(group)
    sentences.append(_current_state(tx, run, group))
    return sentences


def _opening(group: GroupRecord) -> str:
    subject = f"Group {group.group_id} is draw {group.draw} of task {group.task_id}"
    if group.origin is Origin.EXTERNAL:
        sender = f"the producer {group.producer}" if group.producer else "an unregistered producer"
        return f"{subject}; {sender} submitted it without a grant, which opened it."
    return f"{subject}, at position {group.position} of the cursor; the gate admitted it as number {group.sequence}."


def _move(move: MoveRecord) -> str:
    when = datetime.fromtimestamp(move.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    if move.from_state is None:
        queued = " and queued at once" if move.to_state is GroupState.QUEUED else ""
        return f"{when}: opened by {move.by}{queued} ({move.note})."
    if move.from_state is move.to_state:
        return f"{when}: still {move.to_state} ({move.note}), by {move.by}."
    return f"{when}: {move.from_state} became {move.to_state} ({move.note}), by {move.by}."


def _versions(tx: Transaction, run: RunRecord, group: GroupRecord) -> list[str]:
    if group.payload_digest is None:
        return []
    named = [p for p in group.publications if p >= 0]
    if not named:
        return ["The versions of its trained tokens are unknown, so its lag is not checked."]
    steps = []
    for publication_id in named:
        found = tx.publications.get(run.run_id, PublicationId(publication_id))
        if found is not None:
            demoted = (
                ""
                if found.effective_step == found.step
                else f", which counts as {found.effective_step} since a restart"
            )
            steps.append(f"{found.step} (publication {found.id}{demoted})")
    versions = f"Its trained tokens were sampled by version {', '.join(steps)}"
    return [f"{versions}; its oldest effective version is {group.oldest_version}."]


def _results(group: GroupRecord) -> list[str]:
    if group.outcome is None:
        return []
    outcome = msgspec.json.decode(group.outcome, type=GroupOutcome)
    summary = f"{outcome.num_scorable} of {outcome.num_samples} samples were scored"
    if outcome.reward_mean is not None:
        summary += f", mean reward {outcome.reward_mean:.4g}"
    causes = [indented(f"{count} x {cause}", "  ") for cause, count in sorted(outcome.invalid_causes.items())]
    return ["\n".join([f"{summary}; failed attempts at samples:", *causes])] if causes else [f"{summary}."]


def _current_state(tx: Transaction, run: RunRecord, group: GroupRecord) -> str:
    if group.state is GroupState.DISPATCHED:
        if group.owner is None:
            return "It waits for another attempt."
        return f"{group.owner} is playing attempt {group.attempt}."
    if group.state is GroupState.QUEUED:
        return f"It waits in the queue for batch {run.last_decided + 1} or a later one."
    if group.state is GroupState.DROPPED:
        reason = DropReason.parse(group.drop_reason or "")
        detail = f" ({reason.detail})" if reason.detail else ""
        return f"It was dropped as {reason.kind.value}: {REASONS[reason.kind]}{detail}. It was never trained."
    return _batched(tx, run, group)


def _batched(tx: Transaction, run: RunRecord, group: GroupRecord) -> str:
    step = group.step or 0
    batch = tx.batches.get(run.run_id, step)
    entry = None if batch is None else next((e for e in batch.manifest.entries if e.group_id == group.group_id), None)
    rule = run.settings.rule
    if group.producer is not None:
        order = f"it was the first group of the producer {group.producer}, which had a place"
    elif rule.policy is BatchPolicy.WAIT:
        order = "it was the oldest admitted group that was ready"
    else:
        order = "it was the next group to arrive"
    reason = f"Batch {step} contains it because {order}"
    if entry is not None and entry.oldest_version is not None:
        found = lag(step=step, oldest_version=entry.oldest_version)
        reason += f" and its lag of {found} was within the staleness bound of {rule.max_head_offpolicy_versions}"
    ends = {
        GroupState.BATCHED: "step {step} was not acknowledged yet",
        GroupState.TRAINED: "step {step} was trained, and no checkpoint covers it yet",
        GroupState.DURABLE: "step {step} was trained, and a checkpoint covers it",
    }
    if group.unusable is not None:
        return f"{reason}; step {step} was trained without it, because it cannot be trained: {group.unusable}."
    return f"{reason}; {ends[group.state].format(step=step)}."
