"""The audit of groups: rows, histories, payloads, and the batches that name them."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import msgspec

from rollbook.contracts.batch import BatchEntry
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.group import MOVES, GroupId, GroupOutcome, GroupState
from rollbook.contracts.group_checks import (
    GroupFacts,
    UnusableGroupError,
    false_claims,
    find_obstacle,
    inspect_payload,
)
from rollbook.contracts.group_codec import payload_digest
from rollbook.contracts.policy import PublicationId
from rollbook.ledger.records import GroupRecord, Origin
from rollbook.ledger.rules.parts import wrong_part
from rollbook.ledger.rules.publications import admission_of
from rollbook.ledger.rules.run_transaction import SETTLED
from rollbook.ledger.store import Move, StoreFaultError, Transaction
from rollbook.ledger.tools.audit_findings import Findings
from rollbook.ledger.tools.audit_samples import wrong_mask, wrong_versions

PAGE = 1000
_OUTCOMES = json_decoder(GroupOutcome)
Chain = tuple[tuple[str | None, str], ...]
"""The states before and after each move of a group."""


def changed_groups(tx: Transaction, findings: Findings) -> list[GroupId]:
    """The groups that were not final at the mark."""
    assert findings.mark is not None
    run_id, number = findings.run.run_id, findings.mark.number
    changed: dict[GroupId, None] = {}
    while moves := tx.history.after(number, PAGE):
        number = moves[-1][0]
        changed.update((group_id, None) for _, moved_in, group_id in moves if moved_in == run_id)
    for group in (*tx.groups.dispatched(run_id), *tx.groups.queued(run_id)):
        changed[group.group_id] = None
    for state in (GroupState.BATCHED, GroupState.TRAINED):
        start = 0
        while page := tx.groups.page(run_id, start=start, limit=PAGE, state=state):
            start = page[-1].sequence + 1
            changed.update((group.group_id, None) for group in page)
    return list(changed)


def check_groups(tx: Transaction, findings: Findings, changed: list[GroupId] | None) -> None:
    """Check these groups; None: all."""
    run_id, remaining = findings.run.run_id, dict(findings.entries)
    for groups, histories in _rows(tx, findings, changed):
        _load_publications(tx, findings, groups)
        for group in groups:
            if group.group_id in histories:
                _check_history(group, histories[group.group_id], findings)
            else:
                findings.add(f"group {group.group_id} has no history")
        for group in groups:
            _check_row(group, remaining.pop(group.group_id, (None, None)), findings)
        intact = _intact_payloads(_Payloads(tx, findings, groups), groups, findings)
        for group, facts in _inspected(intact, findings):
            _check_payload(group, facts, findings)
    for group_id, (step, _) in remaining.items():
        try:
            has_row = tx.groups.get(run_id, group_id) is not None
        except StoreFaultError as error:
            findings.add(str(error))
            continue
        if changed is not None and has_row:
            findings.add(f"group {group_id} is in batch {step} and did not change when the batch was decided")
        else:
            findings.add(f"group {group_id} is in batch {step} but has no row")


def check_checksums(tx: Transaction, findings: Findings, changed: list[GroupId] | None) -> None:
    """Read rows and histories and compare them with their checksums, for rows whose values break another check."""
    for _ in _rows(tx, findings, changed):
        pass


def _rows(
    tx: Transaction, findings: Findings, changed: list[GroupId] | None
) -> Iterator[tuple[list[GroupRecord], Mapping[GroupId, list[Move]]]]:
    """The groups and their histories, some at a time. Reports histories without a row and what does not match its checksum."""
    run_id, report = findings.run.run_id, findings.add
    without_row = tx.history.without_row(run_id, changed)
    tx.history.checked(run_id, report, without_row)
    for group_id in without_row:
        report(f"group {group_id} has a history but no row")
    for groups in tx.groups.checked(run_id, report, changed):
        yield groups, tx.history.checked(run_id, report, [group.group_id for group in groups])


def _load_publications(tx: Transaction, findings: Findings, groups: list[GroupRecord]) -> None:
    """Add the publications of the groups that an earlier audit has checked."""
    if findings.mark is None:
        return
    for group in groups:
        admission = admission_of(group)
        for number in (*group.publications, *(() if admission is None else (int(admission),))):
            if 0 <= number < findings.final_publication and number not in findings.publications:
                record = tx.publications.get(findings.run.run_id, PublicationId(number))
                if record is not None:
                    findings.publications[number] = record


class _Payloads:
    """The payloads of some groups: those that must exist and those that their rows claim."""

    def __init__(self, tx: Transaction, findings: Findings, groups: Iterable[GroupRecord]) -> None:
        self._tx = tx
        self._run_id = findings.run.run_id
        floor = findings.run.payload_floor
        self.needed = {
            group.group_id
            for group in groups
            if group.state is GroupState.QUEUED
            or (group.group_id in findings.entries and findings.entries[group.group_id][0] > floor)
        }
        wanted = [group.group_id for group in groups if group.has_payload or group.group_id in self.needed]
        self._found: dict[GroupId, bytes | memoryview | None] | None
        try:
            self._found = dict(zip(wanted, tx.payloads.get_many(self._run_id, wanted), strict=True))
        except StoreFaultError:
            self._found = None  # one of them is damaged: read each separately

    def get(self, group: GroupRecord) -> bytes | None:
        """Raises `StoreFaultError` if it is damaged."""
        if self._found is not None:
            body = self._found.get(group.group_id)
            return None if body is None else bytes(body)
        if group.has_payload or group.group_id in self.needed:
            return self._tx.payloads.get(self._run_id, group.group_id)
        return None


def _check_history(group: GroupRecord, moves: list[Move], findings: Findings) -> None:
    """The moves are a legal chain from the opening to the state of the row."""
    findings.num_histories += 1
    chain = tuple([move[1:] for move in moves])
    for sentence in _illegal_moves(chain, is_external=group.origin is Origin.EXTERNAL):
        findings.add(f"group {group.group_id} {sentence}")
    state = chain[-1][1]
    findings.expect_of(group, "state by its history", state, group.state)
    findings.expect_of(group, "time of opening", moves[0][0], group.opened_at)
    findings.histories[state] += 1


@lru_cache(maxsize=1024)
def _illegal_moves(chain: Chain, *, is_external: bool) -> tuple[str, ...]:
    """Nearly all groups of a run have one of a few chains, so that most are checked once."""
    illegal: list[str] = []
    state: str | None = None
    for before, after in chain:
        if state is None:
            # An external group may be opened in the queued state.
            first = {GroupState.DISPATCHED} | ({GroupState.QUEUED} if is_external else set())
            is_legal = before is None and after in first
        else:
            is_new_attempt = before == after == GroupState.DISPATCHED
            is_legal = before == state and (is_new_attempt or after in MOVES.get(state, ()))  # type: ignore[call-overload]  # a StrEnum is its text
        if not is_legal:
            illegal.append(f"moved from {before} to {after} when it was {state}")
        state = after
    return tuple(illegal)


def _check_row(group: GroupRecord, batched: tuple[int, BatchEntry] | tuple[None, None], findings: Findings) -> None:
    run = findings.run
    batched_in, entry = batched
    findings.count(group)
    if group.task_id in findings.quarantined and group.state not in SETTLED:
        findings.add(f"group {group.group_id} is {group.state}, and its task {group.task_id} is in quarantine")
    is_batched = group.state in (GroupState.BATCHED, GroupState.TRAINED, GroupState.DURABLE)
    if batched_in != (group.step if is_batched else None):
        expected = group.step if is_batched else None
        findings.add(f"group {group.group_id} is {group.state}: its batch: {batched_in}, expected {expected}")
    if batched_in is not None:
        wanted = GroupState.BATCHED
        if batched_in <= run.last_acknowledged:
            wanted = GroupState.DURABLE if batched_in <= run.durable_step else GroupState.TRAINED
        if group.state is not wanted:
            findings.add(f"group {group.group_id} of batch {batched_in}: state: {group.state}, expected {wanted}")
    if entry is not None and batched_in is not None:
        _check_entry(group, batched_in, entry, findings)
    for sentence in wrong_versions(group, findings.version_bounds(group)):
        findings.add(f"group {group.group_id} {sentence}")


def _check_entry(group: GroupRecord, step: int, entry: BatchEntry, findings: Findings) -> None:
    # With masked tokens, the oldest version of the entry is that of the remaining ones.
    oldest = entry.oldest_version if entry.masked else group.oldest_version
    stated = (entry.payload_digest, entry.sequence, entry.oldest_version)
    found = (group.payload_digest or "", group.sequence, oldest)
    findings.expect_of(group, "digest, sequence and oldest version in its batch", stated, found)
    wrong = wrong_mask(group, entry, findings.cuts[step], findings.publications)
    if wrong is not None:
        findings.add(f"group {group.group_id} in batch {step}: {wrong}")


def _intact_payloads(
    payloads: _Payloads, groups: list[GroupRecord], findings: Findings
) -> list[tuple[GroupRecord, bytes]]:
    """The payloads that match their digests."""
    intact: list[tuple[GroupRecord, bytes]] = []
    for group in groups:
        try:
            payload = payloads.get(group)
        except StoreFaultError as error:
            findings.add(f"group {group.group_id}: {error}")
            continue
        if payload is None:
            if group.has_payload or group.group_id in payloads.needed:
                findings.add(f"group {group.group_id} is {group.state} and its payload is missing")
        elif payload_digest(payload) != group.payload_digest:
            findings.add(f"group {group.group_id}: its payload does not match its digest {group.payload_digest}")
        else:
            findings.expect_of(group, "bytes of its payload", len(payload), group.payload_bytes)
            intact.append((group, payload))
    return intact


def _inspected(
    payloads: list[tuple[GroupRecord, bytes]], findings: Findings
) -> list[tuple[GroupRecord, GroupFacts | str | None]]:
    """What each payload contains, or why it cannot be decoded; None if it is not known which groups the trainer can use."""
    if findings.run.settings.counts_sequences:
        return [
            (group, None) for group, _ in payloads
        ]  # another dialect, whose trainer does not report unusable groups
    found: list[tuple[GroupRecord, GroupFacts | str | None]] = []
    for group, payload in payloads:
        try:
            found.append((group, inspect_payload(payload, group.group_id)))
        except UnusableGroupError as error:
            found.append((group, str(error)))
    return found


def _check_payload(group: GroupRecord, facts: GroupFacts | str | None, findings: Findings) -> None:
    """The row states what the payload contains, and the group is usable unless the trainer reported that it is not."""
    try:
        outcome = _OUTCOMES.decode(group.outcome or b"")
    except (msgspec.MsgspecError, ValueError) as error:
        findings.add(f"group {group.group_id}: its outcome is damaged: {error}")
        return
    if facts is None:
        return
    if isinstance(facts, str):
        obstacle: str | None = facts
    else:
        for claim in false_claims(facts, outcome):
            findings.add(f"group {group.group_id}: by its payload, {claim}")
        for what, stated, found in (
            ("the task is", group.task_id, facts.task_id),
            ("the draw is", group.draw, facts.draw),
            ("the publications of the trained tokens are", tuple(sorted(set(group.publications))), facts.publications),
        ):
            if stated != found:
                findings.add(f"group {group.group_id}: by its payload, {what} {found}, not {stated}")
        is_external = group.origin is Origin.EXTERNAL
        rule = findings.run.settings.rule
        wrong = wrong_part(rule, facts, name=group.group_id, group=None if is_external else group)
        if wrong is not None:
            findings.add(f"group {group.group_id}: {wrong}")
        recorded = (group.num_samples, group.baseline)
        findings.expect_of(group, "samples and baseline", recorded, (facts.num_samples, facts.baseline))
        findings.count_left_out(group, facts.left_out)
        obstacle = find_obstacle(facts, findings.run.settings.limits)
    if group.state in (GroupState.TRAINED, GroupState.DURABLE):
        if (group.unusable is None) is not (obstacle is None):
            findings.add(f"group {group.group_id}: recorded as unusable: {group.unusable}, by its payload: {obstacle}")
    elif group.state is not GroupState.DROPPED and obstacle is not None:
        findings.add(f"group {group.group_id} is {group.state} and cannot be trained: {obstacle}")
