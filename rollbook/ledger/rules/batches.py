"""Deciding the batch of a step: once, durably, by step numbers alone. Rules 9 to 12."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollbook.contracts.admission import EndOfDataRule
from rollbook.contracts.batch import BatchEntry, BatchManifest, EndOfRun
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import DropKind, DropReason, GroupState
from rollbook.ledger.records import BatchRecord, GroupRecord, ProducerRecord
from rollbook.ledger.rules.book import RunBook
from rollbook.ledger.rules.selection import Backlog, Candidate, choose, reserved_places, share_places


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What an attempt to decide came to. `manifest` and `end` are both None while there is too little to decide on."""

    manifest: BatchManifest | None = None
    end: EndOfRun | None = None
    is_new: bool = False
    num_stale: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Groups for a batch, and the producers as they stand once it is decided."""

    groups: list[GroupRecord]
    charged: list[ProducerRecord] = field(default_factory=list)


def decide(book: RunBook, step: int, *, epoch: int) -> Decision:
    """The batch of `step`: the recorded one, or a new one if this step is next and there are enough groups."""
    book.fence(epoch)
    known = book.tx.batch(book.run_id, step)
    if known is not None:
        _refuse_without_payloads(book, step)
        return Decision(manifest=known.manifest)
    end = _end_before(book, step)
    if end is not None:
        return Decision(end=end)
    _refuse_out_of_order(book, step)
    if book.run.settings.counts_sequences:
        raise RunError(
            f"run {book.run_id}: its batches are formed for its Atropos trainer, at GET /batch; batch {step} is not decided yet"
        )
    num_stale = _drop_stale(book, step)
    choice = _choose(book, step)
    if len(choice.groups) == book.run.settings.rule.groups_per_step:
        return Decision(manifest=_record(book, step, choice, is_last=False), is_new=True, num_stale=num_stale)
    if not _is_data_over(book):
        return Decision(num_stale=num_stale)
    if choice.groups and book.run.settings.end_of_data is EndOfDataRule.SHORT_BATCH:
        return Decision(manifest=_record(book, step, choice, is_last=True), is_new=True, num_stale=num_stale)
    for group in choice.groups:
        book.drop(group, DropReason(DropKind.END_OF_DATA, f"too few for batch {step}"), by=f"batch {step}")
    return Decision(end=EndOfRun.END_OF_DATA, num_stale=num_stale)


def record_batch(book: RunBook, step: int, groups: Iterable[GroupRecord]) -> BatchManifest:
    """Write down a batch that was chosen elsewhere: once, in order, and before anybody sees it."""
    _refuse_out_of_order(book, step)
    return _record(book, step, _Choice(groups=list(groups)), is_last=False)


def manifest_digest(entries: Iterable[BatchEntry]) -> str:
    """Covers ids and payload digests, in order."""
    whole = hashlib.blake2b(digest_size=16)
    for entry in entries:
        whole.update(f"{entry.group_id}\n{entry.payload_digest}\n".encode())
    return whole.hexdigest()


def _end_before(book: RunBook, step: int) -> EndOfRun | None:
    run = book.run
    most = run.settings.rule.max_steps
    if run.ended is not None:
        return run.ended
    if most is not None and step > most:
        return EndOfRun.MAX_STEPS
    if run.is_last_short and step > run.last_decided:
        return EndOfRun.END_OF_DATA
    return None


def _refuse_without_payloads(book: RunBook, step: int) -> None:
    if step <= book.run.payload_floor:
        raise RunError(
            f"run {book.run_id}: batch {step} is recorded, but its payloads went with the checkpoint of step "
            f"{book.run.payload_floor}; restore that one or a later one"
        )


def _refuse_out_of_order(book: RunBook, step: int) -> None:
    run = book.run
    if step != run.last_decided + 1:
        raise RunError(f"run {run.run_id}: batch {step} cannot be decided, the next one is {run.last_decided + 1}")
    # Deciding while recorded batches are still to be replayed would judge the queue by a lineage that is not settled yet.
    if run.epoch_acknowledged < run.decided_at_takeover:
        raise RunError(
            f"run {run.run_id}: batch {step} cannot be decided before batches {run.epoch_acknowledged + 1} to "
            f"{run.decided_at_takeover} are replayed and acknowledged"
        )


def _drop_stale(book: RunBook, step: int) -> int:
    """Also when no batch comes of it: groups too old for this step would hold their places in the gate for ever."""
    oldest_allowed = book.run.settings.rule.oldest_allowed(step)
    stale = book.tx.queued_below(book.run_id, oldest_allowed)
    for group in stale:
        detail = f"its oldest version is {group.oldest_version}, batch {step} takes {oldest_allowed} and newer"
        book.drop(group, DropReason(DropKind.STALE, detail), by=f"batch {step}")
    return len(stale)


def _choose(book: RunBook, step: int) -> _Choice:
    """Up to P groups. Producers that registered have their part; everything else follows the run's policy."""
    size = book.run.settings.rule.groups_per_step
    producers = book.tx.producers(book.run_id)
    if not producers:
        return _Choice(groups=_choose_by_policy(book, step))
    queues = {p.name: book.tx.queued_by_sequence(book.run_id, size, producer=p.name) for p in producers}
    backlogs = [
        Backlog(name=p.name, weight=p.weight, min_share=p.min_share, credit=p.credit, ready=len(queues[p.name]))
        for p in producers
    ]
    reserved = sum(reserved_places(backlogs, batch_size=size).values())
    groups = _choose_by_policy(book, step)[: size - reserved]
    shares = share_places(backlogs, places=size - len(groups), batch_size=size)
    for p in producers:
        groups += queues[p.name][: shares.places[p.name]]
    charged = [
        p.changed(credit=shares.credits[p.name], num_batched=p.num_batched + shares.places[p.name]) for p in producers
    ]
    return _Choice(groups=groups, charged=charged)


def _choose_by_policy(book: RunBook, step: int) -> list[GroupRecord]:
    rule = book.run.settings.rule
    # Both policies take from the front of one order, so the first P of it are all that can be chosen.
    if rule.policy is BatchPolicy.DROP:
        front = book.tx.queued_by_arrival(book.run_id, rule.groups_per_step)
    else:
        front = book.tx.queued_by_sequence(book.run_id, rule.groups_per_step)
    by_id = {group.group_id: group for group in front}
    chosen = choose(
        (
            Candidate(
                group_id=group.group_id,
                sequence=group.sequence,
                arrival=group.arrival or 0,
                oldest_version=group.oldest_version,
            )
            for group in front
        ),
        oldest_running=book.tx.oldest_running(book.run_id),
        rule=rule,
        step=step,
    )
    return [by_id[candidate.group_id] for candidate in chosen]


def _is_data_over(book: RunBook) -> bool:
    return book.run.exhausted and book.run.counts.running == 0


def _record(book: RunBook, step: int, choice: _Choice, *, is_last: bool) -> BatchManifest:
    entries = tuple(
        BatchEntry(
            group_id=group.group_id,
            sequence=group.sequence,
            payload_digest=group.payload_digest or "",
            oldest_version=group.oldest_version,
        )
        for group in choice.groups
    )
    manifest = BatchManifest(step=step, entries=entries, digest=manifest_digest(entries), is_last=is_last)
    book.tx.put_batch(BatchRecord(run_id=book.run_id, manifest=manifest, epoch=book.run.epoch, decided_at=book.now))
    for producer in choice.charged:
        book.tx.put_producer(producer)
    for group in choice.groups:
        book.move(group, GroupState.BATCHED, note=f"batch {step}", by=f"batch {step}", step=step, release_step=step)
    book.change(last_decided=step, is_last_short=is_last)
    book.tx.sync_to_disk(book.run_id, [group.group_id for group in choice.groups])
    return manifest
