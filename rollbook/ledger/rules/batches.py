"""Deciding the batch of a step: once, durably, independent of time. docs/ledger-rules.md, rules 9 to 12, 20 and 21."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rollbook.contracts.admission import EndOfDataRule
from rollbook.contracts.batch import BatchEntry, BatchManifest, EndOfRun
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import BatchPolicy, Candidate, FreshnessRule, choose
from rollbook.contracts.group import DropKind, DropReason, GroupState
from rollbook.ledger.records import BatchRecord, GroupRecord, Origin, ProducerRecord
from rollbook.ledger.rules.publications import Masks
from rollbook.ledger.rules.run_transaction import RunTransaction
from rollbook.ledger.rules.shares import Backlog, reserved_places, share_places


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The result of `decide`. `manifest` and `end` are both None while there are too few groups."""

    manifest: BatchManifest | None = None
    end: EndOfRun | None = None
    is_new: bool = False
    num_stale: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Groups for a batch, and the producers' records after it is decided."""

    groups: list[GroupRecord]
    size: int
    """In groups, or in samples with policy `parts`."""
    charged: list[ProducerRecord] = field(default_factory=list)


def decide(run_tx: RunTransaction, step: int, *, epoch: int) -> Decision:
    """The batch of `step`: the recorded one, or a new one if this step is next and there are enough groups."""
    run_tx.fence(epoch)
    known = run_tx.tx.batches.get(run_tx.run_id, step)
    if known is not None:
        _refuse_without_payloads(run_tx, step)
        return Decision(manifest=known.manifest)
    end = _end_before(run_tx, step)
    if end is not None:
        return Decision(end=end)
    _refuse_out_of_order(run_tx, step)
    if run_tx.run.settings.counts_sequences:
        raise RunError(
            f"run {run_tx.run_id}: its batches count sequences and are formed by the interface its trainer uses; batch {step} is "
            "not decided yet"
        )
    num_stale = _drop_stale(run_tx, step)
    if _num_queued(run_tx) < run_tx.run.settings.rule.batch_size and not _is_data_over(run_tx):
        # A waiting trainer gets here after every commit: the counters answer without reading the queue.
        return Decision(num_stale=num_stale)
    choice = _choose(run_tx, step)
    if choice.size >= run_tx.run.settings.rule.batch_size:
        return Decision(manifest=_record(run_tx, step, choice, is_last=False), is_new=True, num_stale=num_stale)
    if not _is_data_over(run_tx):
        return Decision(num_stale=num_stale)
    if choice.groups and run_tx.run.settings.end_of_data is EndOfDataRule.SHORT_BATCH:
        return Decision(manifest=_record(run_tx, step, choice, is_last=True), is_new=True, num_stale=num_stale)
    for group in choice.groups:
        run_tx.drop(group, DropReason(DropKind.END_OF_DATA, f"too few for batch {step}"), by=f"batch {step}")
    return Decision(end=EndOfRun.END_OF_DATA, num_stale=num_stale)


def record_batch(run_tx: RunTransaction, step: int, groups: Iterable[GroupRecord]) -> BatchManifest:
    """Record a batch that the caller has chosen: once, in order, and before it is delivered."""
    _refuse_out_of_order(run_tx, step)
    chosen = list(groups)
    return _record(run_tx, step, _Choice(groups=chosen, size=len(chosen)), is_last=False)


def manifest_digest(entries: Iterable[BatchEntry], cut: int | None) -> str:
    """Digest of the ids and payload digests, in order, and of what is masked."""
    whole = hashlib.blake2b(digest_size=16)
    if cut is not None:
        whole.update(f"cut {cut}\n".encode())
    for entry in entries:
        masked = f"masked {entry.masked}\n" if entry.masked else ""
        whole.update(f"{entry.group_id}\n{entry.payload_digest}\n{masked}".encode())
    return whole.hexdigest()


def _end_before(run_tx: RunTransaction, step: int) -> EndOfRun | None:
    run = run_tx.run
    most = run.settings.rule.max_steps
    if run.ended is not None:
        return run.ended
    if most is not None and step > most:
        return EndOfRun.MAX_STEPS
    if run.is_last_short and step > run.last_decided:
        return EndOfRun.END_OF_DATA
    return None


def _refuse_without_payloads(run_tx: RunTransaction, step: int) -> None:
    if step <= run_tx.run.payload_floor:
        raise RunError(
            f"run {run_tx.run_id}: batch {step} is recorded, but its payloads were deleted after the checkpoint of step "
            f"{run_tx.run.payload_floor}; restore that one or a later one"
        )


def _refuse_out_of_order(run_tx: RunTransaction, step: int) -> None:
    run = run_tx.run
    if step != run.last_decided + 1:
        raise RunError(f"run {run.run_id}: batch {step} cannot be decided, the next one is {run.last_decided + 1}")
    # Effective versions may still change while recorded batches are being replayed.
    if run.epoch_acknowledged < run.decided_at_takeover:
        raise RunError(
            f"run {run.run_id}: batch {step} cannot be decided before batches {run.epoch_acknowledged + 1} to "
            f"{run.decided_at_takeover} are replayed and acknowledged"
        )


def _drop_stale(run_tx: RunTransaction, step: int) -> int:
    """Drop stale groups even if no batch is decided: they would occupy the gate's capacity forever."""
    rule = run_tx.run.settings.rule
    oldest_allowed, by_newest = rule.oldest_allowed(step), rule.policy.masks_tokens
    stale = run_tx.tx.groups.queued_below(run_tx.run_id, oldest_allowed, by_newest=by_newest)
    for group in stale:
        found = (
            f"newest version is {group.newest_version}" if by_newest else f"oldest version is {group.oldest_version}"
        )
        detail = f"its {found}, batch {step} takes {oldest_allowed} and newer"
        run_tx.drop(group, DropReason(DropKind.STALE, detail), by=f"batch {step}")
    return len(stale)


def _choose(run_tx: RunTransaction, step: int) -> _Choice:
    """Groups for a full batch, or all that are ready. Registered producers get their share; the rest follows the run's policy."""
    rule = run_tx.run.settings.rule
    size = rule.batch_size
    producers = run_tx.tx.producers.all(run_tx.run_id)
    if not producers:
        groups = _choose_by_policy(run_tx, step)
        return _Choice(groups=groups, size=_size(groups, rule))
    find = run_tx.tx.groups.queued_by_sequence
    queues = {p.name: find(run_tx.run_id, size, origin=Origin.EXTERNAL, producer=p.name) for p in producers}
    backlogs = [
        Backlog(
            name=p.name,
            weight=p.weight,
            min_share=p.min_share,
            credit=p.credit,
            ready=min(size, _size(queues[p.name], rule)),
        )
        for p in producers
    ]
    reserved = sum(reserved_places(backlogs, batch_size=size).values())
    groups = _first(_choose_by_policy(run_tx, step), size - reserved, rule)
    shares = share_places(backlogs, places=max(0, size - _size(groups, rule)), batch_size=size)
    charged: list[ProducerRecord] = []
    for p in producers:
        taken = _first(queues[p.name], shares.places[p.name], rule)
        groups += taken
        # A part is never split, so a producer may get a few samples more than its share. They count for the next batch.
        surplus = _size(taken, rule) - shares.places[p.name]
        charged.append(p.changed(credit=shares.credits[p.name] - surplus, num_batched=p.num_batched + len(taken)))
    return _Choice(groups=groups, size=_size(groups, rule), charged=charged)


def _unit_size(group: GroupRecord, rule: FreshnessRule) -> int:
    return group.num_samples if rule.policy is BatchPolicy.PARTS else 1


def _size(groups: Iterable[GroupRecord], rule: FreshnessRule) -> int:
    return sum(_unit_size(group, rule) for group in groups)


def _first(groups: Sequence[GroupRecord], size: int, rule: FreshnessRule) -> list[GroupRecord]:
    """The first groups that fill `size`, or all."""
    before = accumulate((_unit_size(group, rule) for group in groups), initial=0)
    return [group for group, taken in zip(groups, before, strict=False) if taken < size]


def _choose_by_policy(run_tx: RunTransaction, step: int) -> list[GroupRecord]:
    rule = run_tx.run.settings.rule
    # Every policy takes groups from the front of an order, granted ones first, so the first ones of both suffice.
    groups = run_tx.tx.groups
    find = groups.queued_by_arrival if rule.policy is BatchPolicy.DROP else groups.queued_by_sequence
    front = [group for origin in Origin for group in find(run_tx.run_id, rule.batch_size, origin=origin)]
    by_id = {group.group_id: group for group in front}
    chosen = choose(
        (
            Candidate(
                group_id=group.group_id,
                sequence=group.sequence,
                arrival=group.arrival or 0,
                oldest_version=group.oldest_version,
                newest_version=group.newest_version,
                part=group.part,
                is_external=group.origin is Origin.EXTERNAL,
                size=_unit_size(group, rule),
            )
            for group in front
        ),
        oldest_dispatched=run_tx.tx.groups.oldest_dispatched(run_tx.run_id),
        rule=rule,
        step=step,
    )
    return [by_id[candidate.group_id] for candidate in chosen]


def _num_queued(run_tx: RunTransaction) -> int:
    """In groups, or in samples with policy `parts`. No batch is larger."""
    run = run_tx.run
    return run.queued_samples if run.settings.rule.policy is BatchPolicy.PARTS else run.num_queued


def _is_data_over(run_tx: RunTransaction) -> bool:
    return run_tx.run.exhausted and run_tx.run.counts.running == 0


def _record(run_tx: RunTransaction, step: int, choice: _Choice, *, is_last: bool) -> BatchManifest:
    cut = run_tx.run.settings.rule.cut(step)
    masks = Masks(run_tx, cut)
    entries = tuple(
        BatchEntry(
            group_id=group.group_id,
            sequence=group.sequence,
            payload_digest=group.payload_digest or "",
            oldest_version=masks.oldest_version(group),
            masked=masks.publications(group),
        )
        for group in choice.groups
    )
    digest = manifest_digest(entries, cut)
    manifest = BatchManifest(step=step, entries=entries, digest=digest, is_last=is_last, cut=cut)
    run_tx.tx.batches.put(
        BatchRecord(run_id=run_tx.run_id, manifest=manifest, epoch=run_tx.run.epoch, decided_at=run_tx.now)
    )
    for producer in choice.charged:
        run_tx.tx.producers.put(producer)
    for group in choice.groups:
        run_tx.move(group, GroupState.BATCHED, note=f"batch {step}", by=f"batch {step}", step=step, release_step=step)
    run_tx.change(last_decided=step, is_last_short=is_last)
    run_tx.tx.sync_to_disk(run_tx.run_id, [group.group_id for group in choice.groups])
    return manifest
