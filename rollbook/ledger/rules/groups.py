"""Submitting, closing and releasing groups, and the registered producers that submit without a grant.

See docs/ledger-rules.md, rules 5 to 7.
"""

import math
from collections.abc import Sequence
from typing import TypedDict

import msgspec

from rollbook.contracts.admission import PartReceipt, Receipt
from rollbook.contracts.errors import RollbookError, RunError, TransientError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupOutcome, GroupState
from rollbook.contracts.group_checks import GroupFacts, UnusableGroupError, false_claims, find_obstacle, inspect_frame
from rollbook.contracts.group_codec import LARGEST, MAX_ID_LENGTH, EncodedGroup, payload_digest
from rollbook.contracts.task import TaskId
from rollbook.ledger.records import GroupRecord, Origin, ProducerRecord
from rollbook.ledger.rules.gate import fail_attempt
from rollbook.ledger.rules.parts import open_next, part_receipt, receipt_of_unopened, wrong_part
from rollbook.ledger.rules.publications import VersionRange, admission_of, effective_versions
from rollbook.ledger.rules.run_transaction import RunTransaction
from rollbook.ledger.store import StoreFaultError

QUEUE_FULL_RETRY_S = 1.0
MAX_PRODUCERS = 1_000
"""Deciding a batch reads each of them."""
MAX_NAME_LENGTH = 128


class QueueFullError(TransientError):
    """The queue has reached its limit; try again after the trainer has taken some groups."""


class Submission(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A finished group with a checked payload. Made by `of`."""

    group: EncodedGroup
    facts: GroupFacts

    @classmethod
    def of(cls, group: EncodedGroup) -> "Submission":
        """Raises `UnusableGroupError` if the payload is damaged, is not a group, or differs from what the producer declares."""
        digest = payload_digest(group.payload)
        if digest != group.digest:
            raise UnusableGroupError(
                f"group {group.id}: the payload is damaged: its digest is {digest}, not {group.digest}"
            )
        facts = inspect_frame(group.payload, group.id)
        if not 0 < len(facts.task_id) <= MAX_ID_LENGTH or "\x00" in facts.task_id or facts.draw > LARGEST:
            raise UnusableGroupError(f"group {group.id}: no store can keep its task or its draw")
        if wrong := false_claims(facts, group.outcome):
            raise UnusableGroupError(f"group {group.id}: its payload contradicts its producer: {'; '.join(wrong)}")
        return cls(group=group, facts=facts)

    @property
    def task_id(self) -> TaskId:
        return TaskId(self.facts.task_id)


def submit(
    run_tx: RunTransaction, submission: Submission, *, max_queued: int, max_queued_bytes: int | None = None
) -> PartReceipt:
    """Store a group unless it is settled. The first submission wins, whichever attempt it is.

    With batch policy `parts`, the receipt contains the part that the group lacks now.
    """
    group = run_tx.tx.groups.get(run_tx.run_id, submission.group.id)
    receipt = _submit(run_tx, submission, group, max_queued, max_queued_bytes)
    return part_receipt(run_tx, submission.group.id, submission.facts, receipt, before=group)


def submit_each(
    run_tx: RunTransaction, submissions: Sequence[Submission], *, max_queued: int, max_queued_bytes: int | None = None
) -> list[PartReceipt | RollbookError]:
    """Submit several groups independently: an error of `submit` is raised before anything of that group is written."""
    # One query for all groups: each `get` of them is answered from memory.
    run_tx.tx.groups.find(run_tx.run_id, [submission.group.id for submission in submissions])
    results: list[PartReceipt | RollbookError] = []
    for submission in submissions:
        try:
            results.append(submit(run_tx, submission, max_queued=max_queued, max_queued_bytes=max_queued_bytes))
        except StoreFaultError:
            raise
        except (RunError, TransientError) as error:
            results.append(error)
    return results


def close(run_tx: RunTransaction, group_id: GroupId, reason: DropReason, *, outcome: GroupOutcome | None) -> Receipt:
    """Settle a group that will not be submitted."""
    group = run_tx.group(group_id)
    if group.state is GroupState.DISPATCHED:
        fields = {} if outcome is None else {"outcome": msgspec.json.encode(outcome)}
        run_tx.drop(group, reason, by=group.owner or "close", **fields)
        return Receipt.STORED
    return Receipt.ALREADY_SETTLED if group.state is GroupState.DROPPED else Receipt.ALREADY_STORED


def release(run_tx: RunTransaction, group_id: GroupId, *, attempt: int, cause: str) -> None:
    """Return a group for another attempt. Releasing an attempt that is not current has no effect."""
    group = run_tx.group(group_id)
    if group.state is GroupState.DISPATCHED and group.owner is not None and group.attempt == attempt:
        fail_attempt(run_tx, group, DropReason(DropKind.ATTEMPTS, f"attempt {attempt}: {cause}"), by=group.owner)


def mark_exhausted(run_tx: RunTransaction) -> None:
    """The task source has no more draws, and all of them were opened."""
    if not run_tx.run.exhausted:
        run_tx.change(exhausted=True)
        run_tx.tx.announce(run_tx.run_id)


def drop_lost(run_tx: RunTransaction) -> int:
    """After a start: drop the groups whose payload was lost in a power failure. Returns their number.

    Batched groups are never lost: deciding a batch syncs the payloads of its groups first.
    """
    num_lost = 0
    for group_id in run_tx.tx.payloads.lost(run_tx.run_id):
        group = run_tx.tx.groups.get(run_tx.run_id, group_id)
        if group is None or not group.has_payload:
            continue
        if group.state is GroupState.QUEUED:
            run_tx.tx.payloads.delete(run_tx.run_id, group_id)
            reason = DropReason(DropKind.LOST, "its payload was lost in a power failure")
            run_tx.drop(group, reason, by="start", has_payload=False)
            num_lost += 1
        elif group.state in (GroupState.DROPPED, GroupState.DURABLE):
            run_tx.tx.payloads.delete(run_tx.run_id, group_id)
            run_tx.tx.groups.put(group.changed(has_payload=False))
    return num_lost


def delete_payloads(
    run_tx: RunTransaction, up_to_step: int, *, dropped_only: bool, limit: int = 1 << 31
) -> tuple[int, int]:
    """Delete up to `limit` payloads that no step after `up_to_step` needs. Returns their number and their bytes."""
    groups = run_tx.tx.groups.releasable(run_tx.run_id, up_to_step, limit, dropped_only=dropped_only)
    for group in groups:
        run_tx.tx.payloads.delete(run_tx.run_id, group.group_id)
        run_tx.tx.groups.put(group.changed(has_payload=False))
    if not dropped_only:
        run_tx.change(payload_floor=max(run_tx.run.payload_floor, up_to_step))
    return len(groups), sum(group.payload_bytes for group in groups)


def register_producer(run_tx: RunTransaction, name: str, *, weight: float, min_share: float) -> ProducerRecord:
    """Register a producer, or change its weight and minimum share. Its credit is kept."""
    run_id = run_tx.run_id
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise RunError(f"run {run_id}: a producer's name has 1 to {MAX_NAME_LENGTH} characters, this one {len(name)}")
    if not (math.isfinite(weight) and weight > 0):
        raise RunError(f"run {run_id}: producer {name!r} has weight {weight}; it must be above 0")
    if not 0 <= min_share <= 1:
        raise RunError(f"run {run_id}: producer {name!r} has minimum share {min_share}; it must be between 0 and 1")
    producers = {known.name: known for known in run_tx.tx.producers.all(run_id)}
    others = sum(known.min_share for known in producers.values() if known.name != name)
    # A tolerance for binary fractions: three thirds are one.
    if others + min_share > 1 + 1e-9:
        raise RunError(
            f"run {run_id}: producer {name!r} requests a minimum share of {min_share:g}, the others have {others:g}; "
            "together they cannot have more than 1"
        )
    known = producers.get(name)
    if known is None and len(producers) >= MAX_PRODUCERS:
        raise RunError(f"run {run_id}: {MAX_PRODUCERS} producers are registered, which is the maximum")
    if known is None:
        record = ProducerRecord(run_id=run_id, name=name, weight=weight, min_share=min_share, registered_at=run_tx.now)
    else:
        record = known.changed(weight=weight, min_share=min_share)
    if record != known:
        run_tx.tx.producers.put(record)
    return record


def _submit(
    run_tx: RunTransaction,
    submission: Submission,
    group: GroupRecord | None,
    max_queued: int,
    max_queued_bytes: int | None,
) -> Receipt:
    facts = submission.facts
    if group is None and facts.part > 1:
        return receipt_of_unopened(run_tx, submission.group.id, facts)
    if group is not None and group.state is GroupState.DROPPED:
        return Receipt.ALREADY_SETTLED
    if group is not None and group.state is not GroupState.DISPATCHED:
        return Receipt.ALREADY_STORED
    wrong = wrong_part(run_tx.field("settings").rule, facts, name=submission.group.id, group=group)
    if wrong is not None:
        raise UnusableGroupError(f"run {run_tx.run_id}: group {submission.group.id} cannot be stored: {wrong}")
    if submission.group.drop is None:
        obstacle = find_obstacle(facts, run_tx.field("settings").limits)
        if obstacle is not None:
            raise UnusableGroupError(f"run {run_tx.run_id}: group {submission.group.id} cannot be trained: {obstacle}")
    versions = effective_versions(
        run_tx, facts.publications, group_id=submission.group.id, admitted_at=admission_of(group)
    )
    if group is None:
        _refuse_when_full(run_tx, submission, max_queued, max_queued_bytes)
        if submission.group.producer is not None:
            _require_producer(run_tx, submission.group.producer)
        if run_tx.is_over:
            group = _open_external(run_tx, submission)
            run_tx.drop(group, DropReason(DropKind.END_OF_RUN, "submitted after the end"), by="submit")
            return Receipt.ALREADY_SETTLED
        submission = _dropped_in_quarantine(run_tx, submission)
        if submission.group.drop is None:
            _open_queued(run_tx, submission, versions)
            return Receipt.STORED
        group = _open_external(run_tx, submission)
    by = group.owner or group.producer or "submit"
    run_tx.tx.payloads.put(run_tx.run_id, submission.group.id, submission.group.payload, submission.group.digest)
    # First, so that the group always has an unsettled part until its last one is settled.
    open_next(run_tx, group, facts, submission.group.outcome, by=by)
    fields = _submitted_fields(run_tx, submission, versions)
    if submission.group.drop is not None:
        run_tx.drop(group, submission.group.drop, by=by, **fields)
    else:
        run_tx.move(group, GroupState.QUEUED, note=f"attempt {submission.group.attempt} submitted", by=by, **fields)
    return Receipt.STORED


def _dropped_in_quarantine(run_tx: RunTransaction, submission: Submission) -> Submission:
    """An external group of a task in quarantine is stored as dropped. Granted ones were dropped with the quarantine."""
    if run_tx.field("num_quarantined") and submission.task_id in run_tx.tx.actions.quarantined(run_tx.run_id):
        dropped = msgspec.structs.replace(submission.group, drop=DropReason(DropKind.QUARANTINED))
        return msgspec.structs.replace(submission, group=dropped)
    return submission


class _SubmittedFields(TypedDict):
    publications: tuple[int, ...]
    oldest_version: int | None
    newest_version: int | None
    num_samples: int
    baseline: tuple[float, ...] | None
    outcome: bytes
    payload_digest: str
    payload_bytes: int
    has_payload: bool
    arrival: int


def _submitted_fields(run_tx: RunTransaction, submission: Submission, versions: VersionRange) -> _SubmittedFields:
    if _counts_samples(run_tx):
        run_tx.count("stored_samples", submission.facts.num_samples)
    return _SubmittedFields(
        publications=submission.facts.publications,
        oldest_version=versions.oldest,
        newest_version=versions.newest,
        num_samples=submission.facts.num_samples,
        baseline=submission.facts.baseline,
        outcome=msgspec.json.encode(submission.group.outcome),
        payload_digest=submission.group.digest,
        payload_bytes=len(submission.group.payload),
        has_payload=True,
        arrival=run_tx.count("next_arrival"),
    )


def _counts_samples(run_tx: RunTransaction) -> bool:
    policy: BatchPolicy = run_tx.field("settings").rule.policy
    return policy is BatchPolicy.PARTS


def _open_queued(run_tx: RunTransaction, submission: Submission, versions: VersionRange) -> None:
    """Open an external group in the queued state: the most frequent path, so it writes one row."""
    run_tx.tx.payloads.put(run_tx.run_id, submission.group.id, submission.group.payload, submission.group.digest)
    group = GroupRecord(
        run_id=run_tx.run_id,
        group_id=submission.group.id,
        task_id=submission.task_id,
        draw=submission.facts.draw,
        position=None,
        origin=Origin.EXTERNAL,
        state=GroupState.QUEUED,
        opened_at=run_tx.now,
        attempt=submission.group.attempt,
        admission_version=run_tx.field("version"),
        admission_publication=run_tx.field("publication"),
        producer=submission.group.producer,
        sequence=run_tx.count("next_sequence"),
        expected_samples=submission.facts.num_samples if _counts_samples(run_tx) else 0,
        **_submitted_fields(run_tx, submission, versions),
    )
    run_tx.open(group, note=f"attempt {submission.group.attempt} submitted", by=submission.group.producer or "submit")


def _refuse_when_full(
    run_tx: RunTransaction, submission: Submission, max_queued: int, max_queued_bytes: int | None
) -> None:
    # Groups with a grant are never refused: under the policy `wait`, batches may depend on the refused group.
    num_queued, queued_bytes = run_tx.field("num_queued"), run_tx.field("queued_bytes")
    is_full = num_queued >= max_queued
    # An empty queue accepts a group of any size; a group above the limit would otherwise be retried forever.
    if max_queued_bytes is not None and num_queued:
        is_full |= queued_bytes + len(submission.group.payload) > max_queued_bytes
    if is_full:
        raise QueueFullError(
            f"run {run_tx.run_id}: the queue is full ({num_queued} groups, {queued_bytes} bytes); "
            f"submit {submission.group.id} again later",
            retry_after_s=QUEUE_FULL_RETRY_S,
        )


def _open_external(run_tx: RunTransaction, submission: Submission) -> GroupRecord:
    group = GroupRecord(
        run_id=run_tx.run_id,
        group_id=submission.group.id,
        task_id=submission.task_id,
        draw=submission.facts.draw,
        position=None,
        origin=Origin.EXTERNAL,
        state=GroupState.DISPATCHED,
        sequence=run_tx.count("next_sequence"),
        opened_at=run_tx.now,
        attempt=submission.group.attempt,
        admission_version=run_tx.run.version,
        admission_publication=run_tx.run.publication,
        producer=submission.group.producer,
        expected_samples=submission.facts.num_samples if _counts_samples(run_tx) else 0,
    )
    run_tx.open(group, note="opened by its submission", by=submission.group.producer or "submit")
    return group


def _require_producer(run_tx: RunTransaction, name: str) -> None:
    if not any(known.name == name for known in run_tx.tx.producers.all(run_tx.run_id)):
        raise RunError(
            f"run {run_tx.run_id}: producer {name!r} is not registered; register it, or send its groups without a name"
        )
