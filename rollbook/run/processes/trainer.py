"""The trainer process: trains, publishes weights, writes checkpoints. A client of ledger and policy servers, without rollout
code."""

import asyncio
import os
from contextlib import nullcontext
from functools import partial

from rollbook.concurrency.gpu_launches import prompt_launches
from rollbook.contracts.admission import MemberRole
from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.errors import FencedError, RunError
from rollbook.inference.client.fleet import ReplicaSource
from rollbook.ledger.client.client import LedgerClient
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.run.ledger_clients import ledger_token, member_source, open_run_ledger, open_trainer_batches
from rollbook.run.policy_clients import open_weights, policy_urls, reachable, steering_token
from rollbook.run.supervision.child_main import RoleContext, exit_code_of
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.telemetry.sinks.forwarder import ROLLOUTS_FILE, Forwarder, open_sinks
from rollbook.telemetry.token_records import TokenRecordWriter
from rollbook.trainer.checkpoints.settings_history import split_settings
from rollbook.trainer.data.planner import OpenSource
from rollbook.trainer.files.rollout_table import RolloutTable
from rollbook.trainer.loop import LoopEnd, LoopOutcome, TrainerLoop
from rollbook.trainer.metrics import TRAINER_METRICS
from rollbook.trainer.pipeline import BatchFeed, LoopReports, RankHosts, WeightTargets

REASONS = {
    EndOfRun.MAX_STEPS: "trainer.max_steps is reached",
    EndOfRun.END_OF_DATA: "there are no more tasks",
    EndOfRun.STOPPED: "the run was stopped",
}


async def main(context: RoleContext) -> str:
    config = context.loaded.config
    async with (
        open_run_ledger(
            context.loaded, context.directory, context.addresses["ledger"], log=context.log, is_trainer=True
        ) as ledger,
        open_weights(
            reachable(config),
            context.addresses["policy"],
            directory=context.directory.weights,
            trainer_device=config.trainer.device,
            shares_gpu=not (config.resources.are_separate or config.cluster.has_members),
            token=steering_token(config.inference, own=context.token, source_dir=context.loaded.source_dir),
            log=context.log,
            source=_replica_source(context, ledger),
        ) as weights,
    ):
        loop = TrainerLoop(
            batches=BatchFeed(
                source=ledger,
                max_head_offpolicy_versions=config.gate.max_head_offpolicy_versions,
                open_in_child=_child_source(context) if config.trainer.device == "cuda" else None,
            ),
            targets=WeightTargets(receiver=weights, stage=weights, adapters_only=config.inference.publish == "adapter"),
            config=config.trainer.with_own_shards(context.directory.id),
            model_dir=context.directory.initial_model,
            directory=context.directory.path,
            reports=LoopReports(
                metrics=MetricRecorder("trainer", TRAINER_METRICS, context.directory.metrics_file),
                spans=context.spans,
                log=context.log,
                doing=context.channel.doing,
                progressed=context.channel.progress,
                trained=context.channel.delivered,
                on_trained=_rollout_table(context).add,
                on_split=lambda split: context.directory.record_settings("trainer", split_settings(split)),
                num_shown=config.telemetry.rollouts_per_step,
                token_records=TokenRecordWriter(
                    context.directory.path,
                    every=config.telemetry.token_records,
                    kept=config.telemetry.token_records_kept,
                ),
            ),
            ranks=RankHosts(remote=config.cluster.ranks, host=config.cluster.host, end=partial(_end, context)),
            shared_base=context.shared_base,
            probes=config.trainer.device == "cuda",
        )
        context.channel.ready("loading the model")
        with _forwarder(context), prompt_launches() if config.trainer.device == "cuda" else nullcontext():
            outcome = await _run_until_drained(loop, context)
    return _exit_message(outcome)


def _end(context: RoleContext, error: RunError) -> None:
    """Another rank cannot go on. This one waits for it in a collective, which cannot be interrupted."""
    os._exit(exit_code_of(error, context.channel, context.log, name=context.name, loaded=context.loaded))


def _child_source(context: RoleContext) -> OpenSource:
    return partial(
        open_trainer_batches,
        context.addresses["ledger"],
        context.loaded.config.run.name,
        request_s=context.loaded.config.ledger.request_s,
        token=ledger_token(context.loaded, context.directory, is_trainer=True),
    )


def _replica_source(context: RoleContext, ledger: LedgerClient) -> ReplicaSource | None:
    if not context.loaded.config.cluster.has_members:
        return None
    return member_source(ledger, MemberRole.POLICY, policy_urls(context.addresses["policy"]), in_service_only=False)


def _forwarder(context: RoleContext) -> Forwarder:
    """Forwards the metrics of all processes to TensorBoard and other sinks. The trainer runs it because it lives longest."""
    config = context.loaded.config
    try:
        sinks = open_sinks(
            config.telemetry,
            directory=context.directory.path,
            run_name=config.run.name,
            settings=config.model_dump(mode="json"),
        )
    except (ImportError, OSError) as error:
        raise RunError(str(error)) from error
    return Forwarder(context.directory.path, sinks)


def _rollout_table(context: RoleContext) -> RolloutTable:
    model = context.directory.initial_model
    decode = None
    if (model / "tokenizer.json").is_file():
        tokenizer = ModelTokenizer.from_directory(model)
        decode = partial(tokenizer.decode, skip_special_tokens=False)
    return RolloutTable(context.directory.path / ROLLOUTS_FILE, decode=decode)


async def _run_until_drained(loop: TrainerLoop, context: RoleContext) -> LoopOutcome:
    async def drain() -> None:
        await context.draining.wait()
        context.channel.doing("finishing the step")
        loop.stop_after_step()

    async with asyncio.TaskGroup() as group:
        drainer = group.create_task(drain(), name="trainer.drain")
        outcome = await loop.run()
        drainer.cancel()
    return outcome


def _exit_message(outcome: LoopOutcome) -> str:
    if outcome.end is LoopEnd.FENCED:
        raise FencedError("a newer trainer took over this run")
    if outcome.end is LoopEnd.STOPPED:
        return f"stopped after step {outcome.step}, with a checkpoint to resume from"
    reason = "the run ended" if outcome.reason is None else REASONS[outcome.reason]
    return f"{reason} after step {outcome.step}; digest of the weights {outcome.digest}"
