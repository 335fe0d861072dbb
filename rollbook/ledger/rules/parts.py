"""Parts of a group, with batch policy `parts`: what a part may contain, and which part comes next. docs/ledger-rules.md, rule 21.

A group is opened as part 1, for all of its samples. Storing a part opens the next one for the samples that are left, in the same
transaction, so that the ledger always knows what a group lacks. The number of samples left is computed here and never taken from a
sender: two attempts at the same group may both send parts.
"""

import re

import msgspec

from rollbook.contracts.admission import OpenPart, PartReceipt, Receipt
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.errors import RunError, TransientError
from rollbook.contracts.freshness import BatchPolicy, FreshnessRule
from rollbook.contracts.group import GroupId, GroupOutcome, GroupState, group_id, merge_outcomes, part_id
from rollbook.contracts.group_checks import GroupFacts, UnusableGroupError
from rollbook.contracts.task import TaskId
from rollbook.ledger.records import GroupRecord, Origin
from rollbook.ledger.rules.run_transaction import RunTransaction

RETRY_S = 0.2
PART_SUFFIX = re.compile(r"/\d+$")


class PartNotOpenError(TransientError):
    """The part before it is not stored yet. Submit the parts of a group one after the other."""


def wrong_part(rule: FreshnessRule, facts: GroupFacts, *, name: GroupId, group: GroupRecord | None) -> str | None:
    """Why these samples cannot be stored under this id; None if they can. `group` is None for an external group."""
    if rule.policy is not BatchPolicy.PARTS:
        if facts.part != 1 or facts.baseline is not None:
            return f"it is part {facts.part} of a group, with its own baseline; the batch policy is {rule.policy}, not parts"
        return None
    if group is None:
        if PART_SUFFIX.search(name):
            return "an id that ends with a slash and a number is that of a part; choose another one"
        return None if facts.baseline is None else "an external group has no quorum, so it cannot have a baseline"
    if facts.part != group.part:
        return f"its payload is part {facts.part}, the part with this id is {group.part}"
    if facts.num_samples > group.expected_samples:
        return f"it has {facts.num_samples} samples, and the group lacks only {group.expected_samples}"
    expected = quorum_rewards(rule, facts) if group.part == 1 else group.baseline
    if group.origin is Origin.DRAWN and facts.baseline != expected:
        return f"its baseline is {facts.baseline}, the rewards of the group's quorum are {expected}"
    return None


def quorum_rewards(rule: FreshnessRule, facts: GroupFacts) -> tuple[float, ...]:
    """The rewards of the first scorable samples of part 1: as many as the quorum has, or all if there are fewer."""
    return facts.rewards[: rule.quorum or rule.samples_per_group]


def open_next(run_tx: RunTransaction, group: GroupRecord, facts: GroupFacts, outcome: GroupOutcome, *, by: str) -> None:
    """Open the next part for the samples that `group`, which is about to be stored, does not contain.

    It is leased like `group`: the same attempt goes on with the episodes that have not finished.
    """
    left = group.expected_samples - facts.num_samples
    if left <= 0:
        return
    number = group.part + 1
    earlier = outcome if group.earlier is None else merge_outcomes(_outcome(group.earlier), outcome)
    following = group.changed(
        group_id=part_id(group_id(group.task_id, group.draw), number),
        part=number,
        opened_at=run_tx.now,
        expected_samples=left,
        baseline=facts.baseline,
        earlier=msgspec.json.encode(earlier),
    )
    run_tx.open(following, note=f"part {number}, for the {left} samples that are left", by=by)


def receipt_of_unopened(run_tx: RunTransaction, name: GroupId, facts: GroupFacts) -> Receipt:
    """The receipt of a part that has no record: the group has ended, or an earlier part is missing."""
    root = group_id(TaskId(facts.task_id), facts.draw)
    first = run_tx.tx.groups.get(run_tx.run_id, root)
    if name != part_id(root, facts.part):
        raise UnusableGroupError(f"run {run_tx.run_id}: part {facts.part} of group {root} cannot have the id {name}")
    if first is None:
        raise RunError(f"run {run_tx.run_id}: group {root} was never opened, so it has no part {facts.part}")
    last = run_tx.tx.groups.last_part(run_tx.run_id, first.sequence)
    if last is not None and last.state is GroupState.DISPATCHED:
        raise PartNotOpenError(
            f"run {run_tx.run_id}: part {facts.part} of group {root} is not open yet: part {last.part} comes first",
            retry_after_s=RETRY_S,
        )
    return Receipt.ALREADY_SETTLED


def part_receipt(
    run_tx: RunTransaction, name: GroupId, facts: GroupFacts, receipt: Receipt, *, before: GroupRecord | None
) -> PartReceipt:
    """The receipt, with the part that the group lacks now. `before` is the record before the submission, if there was one."""
    if run_tx.field("settings").rule.policy is not BatchPolicy.PARTS:
        return PartReceipt(receipt=receipt)
    root = GroupId(PART_SUFFIX.sub("", name))
    if receipt is Receipt.STORED:
        if before is None or facts.num_samples >= before.expected_samples:
            return PartReceipt(receipt=receipt)
        last = run_tx.tx.groups.get(run_tx.run_id, part_id(root, before.part + 1))
    else:
        group = run_tx.tx.groups.get(run_tx.run_id, root)
        last = None if group is None else run_tx.tx.groups.last_part(run_tx.run_id, group.sequence)
    is_open = last is not None and last.state is GroupState.DISPATCHED
    return PartReceipt(receipt=receipt, next_part=open_part(last) if last is not None and is_open else None)


def open_part(part: GroupRecord) -> OpenPart:
    return OpenPart(
        group_id=part.group_id,
        number=part.part,
        num_samples=part.expected_samples or None,
        baseline=part.baseline,
        outcome=None if part.earlier is None else _outcome(part.earlier),
    )


def group_outcome(last: GroupRecord) -> GroupOutcome | None:
    """The outcome of a whole group, from its last part. None if none of its samples was stored."""
    own = None if last.outcome is None else _outcome(last.outcome)
    if last.earlier is None:
        return own
    earlier = _outcome(last.earlier)
    return earlier if own is None else merge_outcomes(earlier, own)


def _outcome(raw: bytes) -> GroupOutcome:
    return json_decoder(GroupOutcome).decode(raw)
