"""The transactions of the dialect, for its trainer and its environments. docs/ledger-rules.md, rules 16 and 17."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollbook.contracts.admission import RunId, RunSettings
from rollbook.contracts.batch import BatchManifest
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import BatchPolicy, FreshnessRule
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupState
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.ledger.atropos.batch_forming import form_batch, in_order
from rollbook.ledger.atropos.models import RegisterEnv, Registration
from rollbook.ledger.atropos.records import AtroposRecord, EnvRecord
from rollbook.ledger.atropos.tables import AtroposTables
from rollbook.ledger.records import Origin, RunRecord
from rollbook.ledger.rules import runs, trainer
from rollbook.ledger.rules.batches import record_batch
from rollbook.ledger.rules.run_transaction import RunTransaction
from rollbook.ledger.store import Transaction

MIN_ENV_WEIGHT = 0.01
SERVING_LEASE_S = 10.0
"""Renewed while a batch is sent. A front end that is killed delays the next batch by at most this time."""
SWEEP_SIZE = 500
"""Groups dropped in one transaction after a reset; bounds how long other writes wait."""

SETTINGS = RunSettings(
    rule=FreshnessRule(groups_per_step=1, max_in_flight=1, max_head_offpolicy_versions=0, policy=BatchPolicy.DROP),
    keep_payloads=False,
    counts_sequences=True,
)
"""The gate dispatches nothing and versions are unknown, so only the last two settings matter."""


class NoTrainerError(RunError):
    """No trainer is registered, so the batch size is unknown."""


class UnknownEnvError(RunError):
    """No environment with that id is registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A batch to send, and the epoch of its trainer."""

    manifest: BatchManifest
    epoch: int


def ensure_run(tx: Transaction, run_id: RunId, limits: TrainingLimits, *, now: float) -> None:
    run = tx.runs.get(run_id)
    if run is None:
        runs.create_run(tx, run_id, replace(SETTINGS, limits=limits), now=now)
    else:
        _refuse_native(run)


def _refuse_native(run: RunRecord) -> None:
    if not run.settings.counts_sequences:
        raise RunError(
            f"run {run.run_id} is a native run, it cannot be served in the Atropos dialect; choose another run"
        )


def registration_of(record: AtroposRecord) -> Registration | None:
    return None if record.registration is None else Registration.model_validate_json(record.registration)


# ---------------------------------------------------------------------- trainer


def take_batch(run_tx: RunTransaction, *, server: str, env_silence_s: float, keep: int) -> Handed | None:
    """The batch to send now: the last one again unless its body was sent completely, else the next one.

    None while another front end is sending a batch, too. `server` is the front end of this request.
    """
    tables = AtroposTables(run_tx.tx)
    record = tables.record(run_tx.run_id)
    registration = registration_of(record)
    if registration is None:
        raise NoTrainerError(f"run {run_tx.run_id}: no trainer is registered")
    if record.server not in (None, server) and record.serving_until > run_tx.now:
        return None
    acknowledge_served(run_tx, record)
    step = run_tx.run.epoch_acknowledged + 1
    known = run_tx.tx.batches.get(run_tx.run_id, step)
    manifest = known.manifest if known is not None else _decide(run_tx, step, registration, env_silence_s)
    if manifest is not None:
        until = run_tx.now + SERVING_LEASE_S
        tables.put_record(record.changed(is_started=True, handed_step=step, server=server, serving_until=until))
    elif not record.is_started:
        tables.put_record(record.changed(is_started=True))
    _delete_old_batches(run_tx, keep)
    return None if manifest is None else Handed(manifest=manifest, epoch=run_tx.run.epoch)


def renew_serving(run_tx: RunTransaction, handed: Handed, *, server: str) -> bool:
    """The front end is still sending. False: another one, or another trainer, has taken over."""
    tables = AtroposTables(run_tx.tx)
    record = tables.record(run_tx.run_id)
    if record.server != server or handed.epoch != run_tx.run.epoch:
        return False
    tables.put_record(record.changed(serving_until=run_tx.now + SERVING_LEASE_S))
    return True


def end_serving(run_tx: RunTransaction, handed: Handed, *, server: str, is_sent: bool) -> None:
    """The body was sent completely or not. Ignored if another front end or trainer has taken over meanwhile."""
    tables = AtroposTables(run_tx.tx)
    record = tables.record(run_tx.run_id)
    if record.server == server and handed.epoch == run_tx.run.epoch:
        served = max(record.served_step, handed.manifest.step) if is_sent else record.served_step
        tables.put_record(record.changed(served_step=served, server=None))
        run_tx.tx.announce(run_tx.run_id)


def free_serving(run_tx: RunTransaction) -> None:
    """After a start on a store with one front end: the former front end has ended and sends nothing."""
    tables = AtroposTables(run_tx.tx)
    record = tables.stored_record(run_tx.run_id)
    if record is not None and record.server is not None:
        tables.put_record(record.changed(server=None))


def reset(run_tx: RunTransaction) -> None:
    """Start over. `sweep` drops the queued groups, some at a time."""
    _refuse_native(run_tx.run)
    tables = AtroposTables(run_tx.tx)
    record = tables.record(run_tx.run_id)
    while run_tx.run.last_acknowledged < run_tx.run.last_decided:
        # A decided batch is final; it counts as trained.
        acknowledge(run_tx, run_tx.run.last_acknowledged + 1)
    last = run_tx.run.last_decided
    tables.clear(run_tx.run_id)
    tables.put_record(
        AtroposRecord(
            run_id=record.run_id,
            first_step=last,
            handed_step=last,
            served_step=last,
            shift=-last,
            reset_below=run_tx.run.next_sequence,
        )
    )
    run_tx.tx.announce(run_tx.run_id)


def sweep(run_tx: RunTransaction) -> bool:
    """Drop some of the queued groups from before a reset. True: there may be more."""
    below = AtroposTables(run_tx.tx).record(run_tx.run_id).reset_below
    queued = run_tx.tx.groups.queued_by_sequence(run_tx.run_id, SWEEP_SIZE, origin=Origin.EXTERNAL) if below else []
    old = [group for group in queued if group.sequence < below]
    for group in old:
        run_tx.drop(group, DropReason(DropKind.RESET, "/reset_data"), by="reset")
    return len(old) == SWEEP_SIZE


def acknowledge_served(run_tx: RunTransaction, record: AtroposRecord) -> None:
    step = run_tx.run.epoch_acknowledged + 1
    if step <= min(record.served_step, run_tx.run.last_decided):
        acknowledge(run_tx, step)


def acknowledge(run_tx: RunTransaction, step: int, *, unusable: Mapping[GroupId, str] | None = None) -> None:
    batch = run_tx.tx.batches.get(run_tx.run_id, step)
    if batch is None:
        raise RunError(f"run {run_tx.run_id}: batch {step} is not recorded, so it cannot be acknowledged")
    if run_tx.run.epoch_acknowledged < step - 1:
        run_tx.change(epoch_acknowledged=step - 1)
    # Atropos trainers report no digest of their weights. The batch's digest makes a repeated acknowledgement idempotent.
    trainer.acknowledge(run_tx, step, batch.manifest.digest, epoch=run_tx.run.epoch, unusable=unusable)


def _decide(
    run_tx: RunTransaction, step: int, registration: Registration, env_silence_s: float
) -> BatchManifest | None:
    size = registration.batch_size
    if size < 1:
        return None
    tables = AtroposTables(run_tx.tx)
    buckets = [bucket for bucket in tables.buckets(run_tx.run_id) if bucket.size <= size]
    if sum(bucket.size * bucket.num for bucket in buckets) < size:
        return None
    # A batch needs at most `size // bucket.size` groups of a bucket, so this never reads the whole queue.
    queue = [g for s in buckets for g in tables.in_bucket(run_tx.run_id, s.env_id, s.size, size // s.size)]
    envs = tables.envs(run_tx.run_id)
    chosen = form_batch(
        in_order(queue, {env.env_id: env.weight for env in envs}, seed=step),
        batch_size=size,
        largest=max(bucket.size for bucket in buckets),
        minimums={
            env.env_id: env.min_batch_allocation
            for env in envs
            if env.is_connected and env.min_batch_allocation is not None and env.last_seen >= run_tx.now - env_silence_s
        },
    )
    if chosen is None:
        return None
    tables.remove_queued(chosen)
    groups = run_tx.groups([group.group_id for group in chosen])
    if any(group.state is not GroupState.QUEUED for group in groups):
        # A group was dropped because its payload was lost. Its entry is removed now; the others are queued again.
        tables.put_queued([c for c, group in zip(chosen, groups, strict=True) if group.state is GroupState.QUEUED])
        return _decide(run_tx, step, registration, env_silence_s)
    return record_batch(run_tx, step, groups)


def forget_lost(run_tx: RunTransaction) -> None:
    """After a start: remove the groups whose payload was lost in a power failure.

    Unconfirmed posts are deleted, so that a repeated post of a lost group is stored again.
    """
    tables = AtroposTables(run_tx.tx)
    lost = [tables.queued(run_tx.run_id, group_id) for group_id in run_tx.tx.payloads.lost(run_tx.run_id)]
    found = [group for group in lost if group is not None]
    if found:
        tables.remove_queued(found)
        tables.delete_all_unconfirmed(run_tx.run_id)


def _delete_old_batches(run_tx: RunTransaction, keep: int) -> None:
    oldest_kept = run_tx.run.last_acknowledged - keep
    if oldest_kept > run_tx.run.payload_floor and oldest_kept <= run_tx.run.epoch_acknowledged:
        trainer.checkpointed(run_tx, oldest_kept, oldest_kept=oldest_kept, epoch=run_tx.run.epoch)


# ---------------------------------------------------------------------- environments


def register_env(
    run_tx: RunTransaction, request: RegisterEnv, *, wait_for_batch: bool = False
) -> dict[str, Any] | None:
    """None: no trainer is registered; with `wait_for_batch`, or none has requested a batch yet."""
    tables = AtroposTables(run_tx.tx)
    record = tables.record(run_tx.run_id)
    registration = registration_of(record)
    if registration is None or (wait_for_batch and not record.is_started):
        return None
    envs = tables.envs(run_tx.run_id)
    same_name = sum(env.desired_name == request.desired_name for env in envs)
    env = EnvRecord(
        run_id=run_tx.run_id,
        env_id=len(envs),
        desired_name=request.desired_name,
        real_name=f"{request.desired_name}_{same_name}",
        max_token_length=request.max_token_length,
        weight=request.weight,
        group_size=request.group_size,
        min_batch_allocation=request.min_batch_allocation,
        is_connected=True,
        last_seen=run_tx.now,
    )
    tables.put_env(env)
    return {
        "status": "success",
        "env_id": env.env_id,
        "wandb_name": env.real_name,
        "checkpoint_dir": registration.checkpoint_dir,
        "starting_step": record.current_step,
        "checkpoint_interval": registration.save_checkpoint_interval,
        "num_steps": registration.num_steps,
    }


def disconnect_env(run_tx: RunTransaction, env_id: int) -> None:
    tables = AtroposTables(run_tx.tx)
    env = tables.env(run_tx.run_id, env_id)
    if env is None:
        raise UnknownEnvError(f"run {run_tx.run_id}: no environment {env_id} is registered")
    tables.put_env(env.changed(is_connected=False))


def touch_envs(run_tx: RunTransaction, env_ids: Sequence[int]) -> None:
    tables = AtroposTables(run_tx.tx)
    for env_id in env_ids:
        env = tables.env(run_tx.run_id, env_id)
        if env is not None and env.last_seen < run_tx.now:
            tables.put_env(env.changed(last_seen=run_tx.now))


def status(tx: Transaction, run_id: RunId) -> dict[str, int]:
    tables = AtroposTables(tx)
    record = tables.record(run_id)
    if record.registration is None:
        return {"current_step": 0, "queue_size": 0}
    return {
        "current_step": record.current_step,
        "queue_size": sum(bucket.num for bucket in tables.buckets(run_id)),
    }


def status_env(tx: Transaction, run_id: RunId, env_id: int) -> dict[str, Any]:
    """How many groups the environment has queued, and how many the others have beyond their minimum allocations."""
    tables = AtroposTables(tx)
    env = tables.env(run_id, env_id)
    if env is None:
        raise UnknownEnvError(f"run {run_id}: no environment {env_id} is registered; call /register-env first")
    record = tables.record(run_id)
    registration = registration_of(record)
    batch_size = 0 if registration is None else registration.batch_size
    connected = [env for env in tables.envs(run_id) if env.is_connected]
    total_weight = sum(env.max_token_length * max(0.0, env.weight) for env in connected)
    buckets = tables.buckets(run_id)
    largest = max((bucket.size for bucket in buckets), default=1)
    own = sum(bucket.size * bucket.num for bucket in buckets if bucket.env_id == env_id)
    group_size = max([env.group_size, 1, *(bucket.size for bucket in buckets if bucket.env_id == env_id)])
    minimums = {env.env_id: env.min_batch_allocation for env in connected if env.min_batch_allocation is not None}
    from_others = 0
    for other in {bucket.env_id for bucket in buckets if bucket.env_id != env_id} if largest > 1 else ():
        sequences = sum(bucket.size * bucket.num for bucket in buckets if bucket.env_id == other)
        reserved = int(batch_size * minimums.get(other, 0.0))
        from_others += max(0, math.ceil(sequences / largest) * largest - reserved)
    weight = env.max_token_length * env.weight / total_weight if total_weight > 0 else 0.0
    return {
        "current_step": record.current_step,
        "queue_size": (own + from_others) // group_size,
        "unallocated_fraction": 1.0 - min(sum(minimums.values()), 1.0),
        "self_queue_size": own // group_size,
        "max_group_size": largest,
        "env_weight": max(MIN_ENV_WEIGHT, weight),
    }


def latest_example(tx: Transaction, run_id: RunId) -> bytes | None:
    latest = AtroposTables(tx).record(run_id).latest
    return None if latest is None else tx.payloads.get(run_id, latest)
