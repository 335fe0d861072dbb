"""The transactions of the dialect, against `RunBook`: the trainer's side and the environments' side. PROTOCOL rules 16 and 17."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.contracts.admission import RunId, RunSettings
from rollbook.contracts.batch import BatchManifest
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import BatchPolicy, FreshnessRule
from rollbook.contracts.group import DropKind, DropReason
from rollbook.ledger.atropos.batch_forming import form_batch
from rollbook.ledger.atropos.models import RegisterEnv, Registration
from rollbook.ledger.atropos.records import AtroposRecord, EnvRecord
from rollbook.ledger.rules import runs, trainer
from rollbook.ledger.rules.batches import record_batch
from rollbook.ledger.rules.book import RunBook
from rollbook.ledger.store import Transaction

MIN_ENV_WEIGHT = 0.01
SWEPT_AT_ONCE = 500
"""Groups dropped in one transaction after a reset: others must not wait long for theirs."""

SETTINGS = RunSettings(
    rule=FreshnessRule(groups_per_step=1, max_in_flight=1, max_head_offpolicy_versions=0, policy=BatchPolicy.DROP),
    keep_payloads=False,
    counts_sequences=True,
)
"""Nothing is dispatched by the gate and no version is known, so only the last two matter."""


class GoneStepError(RunError):
    """A trainer wants to go back to a step whose groups are no longer kept."""


class NoTrainerError(RunError):
    """Nobody has said how large a batch is."""


class UnknownEnvError(RunError):
    """No environment of that id is registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A batch to be sent, and the trainer it is sent to."""

    manifest: BatchManifest
    epoch: int


def ensure_run(tx: Transaction, run_id: RunId, *, now: float) -> None:
    run = tx.run(run_id)
    if run is None:
        runs.create_run(tx, run_id, SETTINGS, now=now)
    elif not run.settings.counts_sequences:
        raise RunError(f"run {run_id} is a native one, it cannot be served in the Atropos dialect; name another run")


def record_of(tx: Transaction, run_id: RunId) -> AtroposRecord:
    return tx.atropos.record(run_id) or AtroposRecord(run_id=run_id)


def registration_of(record: AtroposRecord) -> Registration | None:
    return None if record.registration is None else Registration.model_validate_json(record.registration)


# ---------------------------------------------------------------------- trainer


def register(book: RunBook, registration: Registration) -> None:
    """A trainer says what it wants and where it stands: batches after `starting_step` are served, again if need be."""
    record = record_of(book.tx, book.run_id)
    _acknowledge_served(book, record)
    restored, shift = _place_of(book, record, registration.starting_step)
    trainer.take_role(book, restored_step=restored)
    book.tx.atropos.put_record(
        record.changed(
            registration=registration.model_dump_json(),
            handed_step=restored,
            served_step=restored,
            shift=shift,
        )
    )
    _drop_oversized(book, registration.batch_size)


def _place_of(book: RunBook, record: AtroposRecord, starting_step: int) -> tuple[int, int]:
    """The ledger's step to go on from, and what to add to get the trainer's."""
    run = book.run
    wanted = starting_step - record.shift
    if record.registration is None or not record.first_step <= wanted <= run.last_decided:
        return run.last_acknowledged, starting_step - run.last_acknowledged
    if wanted < run.payload_floor:
        raise GoneStepError(
            f"run {run.run_id}: batch {starting_step + 1} was served and its groups are no longer kept (the oldest is "
            f"{run.payload_floor + record.shift + 1}); register with a later starting_step, or call /reset_data to begin anew"
        )
    while book.run.last_acknowledged < wanted:  # it was handed out, and the trainer says that it has it
        _acknowledge(book, book.run.last_acknowledged + 1)
    return wanted, record.shift


def take_batch(book: RunBook, *, env_silence_s: float, keep: int) -> Handed | None:
    """The batch to send now: the last one again unless its body was written to its end, else the next one."""
    record = record_of(book.tx, book.run_id)
    registration = registration_of(record)
    if registration is None:
        raise NoTrainerError(f"run {book.run_id}: no trainer is registered")
    _acknowledge_served(book, record)
    step = book.run.epoch_acknowledged + 1
    known = book.tx.batch(book.run_id, step)
    manifest = known.manifest if known is not None else _decide(book, step, registration, env_silence_s)
    if manifest is not None or not record.is_started:
        handed = record.handed_step if manifest is None else step
        book.tx.atropos.put_record(record.changed(is_started=True, handed_step=handed))
    _let_old_batches_go(book, keep)
    return None if manifest is None else Handed(manifest=manifest, epoch=book.run.epoch)


def served(book: RunBook, step: int, *, epoch: int) -> None:
    """The body of a batch was written to its end. A trainer that registered meanwhile has begun anew."""
    record = record_of(book.tx, book.run_id)
    if epoch == book.run.epoch and step > record.served_step:
        book.tx.atropos.put_record(record.changed(served_step=step))


def reset(book: RunBook) -> None:
    """Forget everything. What is queued is dropped by `sweep`, some at a time."""
    record = record_of(book.tx, book.run_id)
    while book.run.last_acknowledged < book.run.last_decided:
        # A decided batch is never taken back: it counts as trained.
        _acknowledge(book, book.run.last_acknowledged + 1)
    last = book.run.last_decided
    book.tx.atropos.clear(book.run_id)
    book.tx.atropos.put_record(
        AtroposRecord(
            run_id=record.run_id,
            first_step=last,
            handed_step=last,
            served_step=last,
            shift=-last,
            reset_below=book.run.next_sequence,
        )
    )
    book.tx.announce(book.run_id)


def sweep(book: RunBook) -> bool:
    """Drop some of the groups that a reset left behind. True: there may be more."""
    below = record_of(book.tx, book.run_id).reset_below
    queued = book.tx.queued_by_sequence(book.run_id, SWEPT_AT_ONCE) if below else []
    gone = [group for group in queued if group.sequence < below]
    for group in gone:
        book.drop(group, DropReason(DropKind.RESET, "/reset_data"), by="reset")
    return len(gone) == SWEPT_AT_ONCE


def _acknowledge_served(book: RunBook, record: AtroposRecord) -> None:
    step = book.run.epoch_acknowledged + 1
    if step <= min(record.served_step, book.run.last_decided):
        _acknowledge(book, step)


def _acknowledge(book: RunBook, step: int) -> None:
    batch = book.tx.batch(book.run_id, step)
    if batch is None:
        raise RunError(f"run {book.run_id}: batch {step} is not recorded, so it cannot be acknowledged")
    if book.run.epoch_acknowledged < step - 1:
        book.change(epoch_acknowledged=step - 1)
    # Atropos trainers tell no digest of their weights; that of the batch makes a repeated serving a repetition.
    trainer.acknowledge(book, step, batch.manifest.digest, epoch=book.run.epoch)


def _decide(book: RunBook, step: int, registration: Registration, env_silence_s: float) -> BatchManifest | None:
    size = registration.batch_size
    if size < 1:
        return None
    tables = book.tx.atropos
    shelves = [shelf for shelf in tables.shelves(book.run_id) if shelf.size <= size]
    if sum(shelf.size * shelf.num for shelf in shelves) < size:
        return None
    # No batch can need more of one shelf than fit into it, so this never looks at the whole queue.
    queue = [g for s in shelves for g in tables.on_shelf(book.run_id, s.env_id, s.size, size // s.size)]
    chosen = form_batch(
        sorted(queue, key=lambda group: group.place),
        batch_size=size,
        largest=max(shelf.size for shelf in shelves),
        minimums={
            env.env_id: env.min_batch_allocation
            for env in tables.envs(book.run_id)
            if env.is_connected and env.min_batch_allocation is not None and env.last_seen >= book.now - env_silence_s
        },
    )
    if chosen is None:
        return None
    tables.take_shelved(chosen)
    return record_batch(book, step, book.groups([group.group_id for group in chosen]))


def _let_old_batches_go(book: RunBook, keep: int) -> None:
    oldest_kept = book.run.last_acknowledged - keep
    if oldest_kept > book.run.payload_floor and oldest_kept <= book.run.epoch_acknowledged:
        trainer.checkpointed(book, oldest_kept, oldest_kept=oldest_kept, epoch=book.run.epoch)


def _drop_oversized(book: RunBook, batch_size: int) -> None:
    """Groups that came before the trainer said how large a batch is, and fit into none."""
    if batch_size < 1:
        return
    reason = DropReason(DropKind.INVALID, f"it has more sequences than a batch of {batch_size}")
    for shelf in book.tx.atropos.shelves(book.run_id):
        if shelf.size > batch_size:
            groups = book.tx.atropos.on_shelf(book.run_id, shelf.env_id, shelf.size, shelf.num)
            book.tx.atropos.take_shelved(groups)
            for group in groups:
                book.drop(book.group(group.group_id), reason, by="register")


# ---------------------------------------------------------------------- environments


def register_env(book: RunBook, asked: RegisterEnv) -> dict[str, Any] | None:
    """None: no trainer has asked for a batch yet."""
    record = record_of(book.tx, book.run_id)
    registration = registration_of(record)
    if registration is None or not record.is_started:
        return None
    envs = book.tx.atropos.envs(book.run_id)
    same_name = sum(env.desired_name == asked.desired_name for env in envs)
    env = EnvRecord(
        run_id=book.run_id,
        env_id=len(envs),
        desired_name=asked.desired_name,
        real_name=f"{asked.desired_name}_{same_name}",
        max_token_length=asked.max_token_length,
        weight=asked.weight,
        group_size=asked.group_size,
        min_batch_allocation=asked.min_batch_allocation,
        is_connected=True,
        last_seen=book.now,
    )
    book.tx.atropos.put_env(env)
    return {
        "status": "success",
        "env_id": env.env_id,
        "wandb_name": env.real_name,
        "checkpoint_dir": registration.checkpoint_dir,
        "starting_step": record.current_step,
        "checkpoint_interval": registration.save_checkpoint_interval,
        "num_steps": registration.num_steps,
    }


def disconnect_env(book: RunBook, env_id: int) -> None:
    env = book.tx.atropos.env(book.run_id, env_id)
    if env is None:
        raise UnknownEnvError(f"run {book.run_id}: no environment {env_id} is registered")
    book.tx.atropos.put_env(env.changed(is_connected=False))


def heard(book: RunBook, env_ids: Sequence[int]) -> None:
    for env_id in env_ids:
        env = book.tx.atropos.env(book.run_id, env_id)
        if env is not None and env.last_seen < book.now:
            book.tx.atropos.put_env(env.changed(last_seen=book.now))


def status(tx: Transaction, run_id: RunId) -> dict[str, int]:
    record = record_of(tx, run_id)
    if record.registration is None:
        return {"current_step": 0, "queue_size": 0}
    return {
        "current_step": record.current_step,
        "queue_size": sum(shelf.num for shelf in tx.atropos.shelves(run_id)),
    }


def status_env(tx: Transaction, run_id: RunId, env_id: int) -> dict[str, Any]:
    """What an environment steers by: how much of it is queued, beside what others have beyond their minimums."""
    asked = tx.atropos.env(run_id, env_id)
    if asked is None:
        raise UnknownEnvError(f"run {run_id}: no environment {env_id} is registered; call /register-env first")
    record = record_of(tx, run_id)
    registration = registration_of(record)
    batch_size = 0 if registration is None else registration.batch_size
    connected = [env for env in tx.atropos.envs(run_id) if env.is_connected]
    total_weight = sum(env.max_token_length * max(0.0, env.weight) for env in connected)
    shelves = tx.atropos.shelves(run_id)
    largest = max((shelf.size for shelf in shelves), default=1)
    own = sum(shelf.size * shelf.num for shelf in shelves if shelf.env_id == env_id)
    group_size = max([asked.group_size, 1, *(shelf.size for shelf in shelves if shelf.env_id == env_id)])
    minimums = {env.env_id: env.min_batch_allocation for env in connected if env.min_batch_allocation is not None}
    from_others = 0
    for other in {shelf.env_id for shelf in shelves if shelf.env_id != env_id} if largest > 1 else ():
        sequences = sum(shelf.size * shelf.num for shelf in shelves if shelf.env_id == other)
        reserved = int(batch_size * minimums.get(other, 0.0))
        from_others += max(0, math.ceil(sequences / largest) * largest - reserved)
    weight = asked.max_token_length * asked.weight / total_weight if total_weight > 0 else 0.0
    return {
        "current_step": record.current_step,
        "queue_size": (own + from_others) // group_size,
        "unallocated_fraction": 1.0 - min(sum(minimums.values()), 1.0),
        "self_queue_size": own // group_size,
        "max_group_size": largest,
        "env_weight": max(MIN_ENV_WEIGHT, weight),
    }


def latest_example(tx: Transaction, run_id: RunId) -> bytes | None:
    latest = record_of(tx, run_id).latest
    return None if latest is None else tx.payload(run_id, latest)
