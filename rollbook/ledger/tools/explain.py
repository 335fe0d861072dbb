"""The history of a group in sentences: who opened it, which versions sampled it, its attempts, and why it was trained or not."""

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from rollbook.contracts.admission import RunId
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import BatchPolicy, FreshnessRule, lag
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupOutcome, GroupState, part_id
from rollbook.contracts.group import group_id as draw_id
from rollbook.contracts.group_codec import decode_payload
from rollbook.contracts.policy import NOT_SAMPLED, PublicationId
from rollbook.contracts.user_errors import indented, visible
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
    DropKind.QUARANTINED: "an operator quarantined its task",
}


class UnknownGroupError(RunError):
    """The run has no group with that id."""


def explain(reader: Reader, run_id: RunId, group_id: GroupId) -> list[str]:
    return reader.read_now(lambda tx: explain_group(tx, run_id, group_id))


def explain_group(tx: Transaction, run_id: RunId, group_id: GroupId) -> list[str]:
    """Explain one group inside a transaction."""
    run = find_run(tx, run_id)
    group = tx.groups.get(run_id, group_id)
    if group is None:
        raise UnknownGroupError(
            f"run {run_id}: there is no group {visible(group_id)}; it was never opened, or its submission was refused. "
            "`rollbook inspect RUN --groups` lists those of the run"
        )
    sentences = [_opening(group)]
    sentences += _parts(tx, run, group)
    sentences += [_move(move) for move in tx.history.of_group(run_id, group_id)]
    sentences += _versions(tx, run, group)
    sentences += _results(group)
    sentences.append(_current_state(tx, run, group))
    sentences += _masked(tx, group)
    return sentences


def _opening(group: GroupRecord) -> str:
    part = f"part {group.part} of " if group.part > 1 else ""
    subject = f"Group {visible(group.group_id)} is {part}draw {group.draw} of task {visible(group.task_id)}"
    if group.origin is Origin.EXTERNAL:
        sender = f"the producer {visible(group.producer)}" if group.producer else "an unregistered producer"
        return f"{subject}; {sender} submitted it without a grant, which opened it."
    return f"{subject}, at position {group.position} of the cursor; the gate admitted it as number {group.sequence}."


def _parts(tx: Transaction, run: RunRecord, group: GroupRecord) -> list[str]:
    """With policy `parts`: how many samples the part has and why, when it came, and the baseline of its advantages."""
    rule = run.settings.rule
    if rule.policy is not BatchPolicy.PARTS or group.origin is Origin.EXTERNAL:
        return []
    ids = [part_id(draw_id(group.task_id, group.draw), number) for number in range(1, rule.samples_per_group + 1)]
    known = tx.groups.find(run.run_id, ids)
    parts = [known[name] for name in ids if name in known]
    sentences = [_part_size(group, rule, parts)]
    if group.baseline is not None:
        rewards = ", ".join(f"{reward:.4g}" for reward in group.baseline)
        sentences.append(
            f"Its advantages are computed from the rewards of the quorum, the first {len(group.baseline)} scored samples of the "
            f"group: {rewards or 'none'}."
        )
    others = [
        f"{visible(part.group_id)} ({part.state}, {_num_samples(part)})" for part in parts if part.part != group.part
    ]
    if others:
        sentences.append(f"The other parts of the group are {', '.join(others)}.")
    return sentences


def _num_samples(part: GroupRecord) -> str:
    if part.payload_digest is None:
        return f"opened for {part.expected_samples} samples"
    return f"{part.num_samples} sample{'s' if part.num_samples != 1 else ''}"


def _part_size(group: GroupRecord, rule: FreshnessRule, parts: Sequence[GroupRecord]) -> str:
    if group.payload_digest is None:
        return (
            f"It was opened for the {group.expected_samples} samples that the group lacks, of {rule.samples_per_group}."
        )
    size = f"It has {group.num_samples} of the {group.expected_samples} samples that the group lacked"
    if group.part == 1:
        if group.num_samples == rule.samples_per_group:
            return f"{size}: all episodes had ended when it was submitted."
        quorum = rule.quorum or rule.samples_per_group
        return f"{size}: it was submitted early, once the quorum of {quorum} was scored, without waiting for the slower ones."
    waited = group.opened_at - parts[0].opened_at
    return f"{size}: its episodes ended after those of part {group.part - 1}, which was stored {waited:.3g} s after the admission."


def _masked(tx: Transaction, group: GroupRecord) -> list[str]:
    """What of a batched group was masked out of the loss."""
    batch = None if group.step is None else tx.batches.get(group.run_id, group.step)
    if batch is None or batch.manifest.cut is None:
        return []
    cut = batch.manifest.cut
    entry = next((e for e in batch.manifest.entries if e.group_id == group.group_id), None)
    if entry is None or not entry.masked:
        return [
            f"The cut of batch {group.step} is version {cut}; none of its trained tokens is older, so none is masked."
        ]
    masked = ", ".join("unknown" if number == NOT_SAMPLED else str(number) for number in entry.masked)
    sentence = (
        f"The cut of batch {group.step} is version {cut}: its tokens of publication {masked} are older and masked"
    )
    payload = tx.payloads.get(group.run_id, group.group_id) if group.has_payload else None
    if payload is not None:
        found = decode_payload(payload, group.group_id)
        rows = [row for sample in found.scorable for row in sample.sequences]
        trained = sum(row.num_trained for row in rows)
        num = sum(int((row.loss_mask & np.isin(row.versions, entry.masked)).sum()) for row in rows)
        sentence += f", {num} of {trained} trained tokens"
    return [f"{sentence}. They stay in the context; rewards and advantages do not change."]


def _move(move: MoveRecord) -> str:
    when = datetime.fromtimestamp(move.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    if move.from_state is None:
        queued = " and queued at once" if move.to_state is GroupState.QUEUED else ""
        return f"{when}: opened by {visible(move.by)}{queued} ({move.note})."
    if move.from_state is move.to_state:
        return f"{when}: still {move.to_state} ({move.note}), by {visible(move.by)}."
    return f"{when}: {move.from_state} became {move.to_state} ({move.note}), by {visible(move.by)}."


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
    outcome = json_decoder(GroupOutcome).decode(group.outcome)
    summary = f"{outcome.num_scorable} of {outcome.num_samples} samples were scored"
    if outcome.reward_mean is not None:
        summary += f", mean reward {outcome.reward_mean:.4g}"
    causes = [indented(f"{count} x {cause}", "  ") for cause, count in sorted(outcome.invalid_causes.items())]
    return ["\n".join([f"{summary}; failed attempts at samples:", *causes])] if causes else [f"{summary}."]


def _current_state(tx: Transaction, run: RunRecord, group: GroupRecord) -> str:
    if group.state is GroupState.DISPATCHED:
        if group.owner is None:
            return "It waits for another attempt."
        return f"{visible(group.owner)} is playing attempt {group.attempt}."
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
        order = f"it was the first group of the producer {visible(group.producer)}, which had a place"
    elif group.origin is Origin.EXTERNAL:
        order = "granted groups left a place, and it was the first of the groups without a grant"
    elif rule.policy is not BatchPolicy.DROP:
        order = "it was the oldest admitted group that was ready"
    else:
        order = "it was the next group to arrive"
    reason = f"Batch {step} contains it because {order}"
    if entry is not None and entry.oldest_version is not None:
        found = lag(step=step, oldest_version=entry.oldest_version)
        whose = f"the lag of {found} of its oldest token that is not masked" if entry.masked else f"its lag of {found}"
        reason += f" and {whose} was within the staleness bound of {rule.max_head_offpolicy_versions}"
    ends = {
        GroupState.BATCHED: "step {step} was not acknowledged yet",
        GroupState.TRAINED: "step {step} was trained, and no checkpoint covers it yet",
        GroupState.DURABLE: "step {step} was trained, and a checkpoint covers it",
    }
    if group.unusable is not None:
        return f"{reason}; step {step} was trained without it, because it cannot be trained: {group.unusable}."
    return f"{reason}; {ends[group.state].format(step=step)}."
