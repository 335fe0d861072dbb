"""The trainer process: trains, publishes weights, writes checkpoints. A client of ledger and policy servers, without rollout
code."""

import asyncio
import os
from typing import Any

from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import FencedError, RunError
from rollbook.ledger.client.client import open_ledger_client
from rollbook.run.policy_clients import open_weights, steering_token
from rollbook.run.supervision.child_main import RoleContext
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.telemetry.sinks.forwarder import Forwarder, open_sinks
from rollbook.trainer.loop import LoopEnd, LoopOutcome, TrainerLoop
from rollbook.trainer.metrics import TRAINER_METRICS


class _ReportingRecorder(MetricRecorder):
    """Also reports each recorded step to the supervisor."""

    def __init__(self, context: RoleContext) -> None:
        super().__init__("trainer", TRAINER_METRICS, context.directory.metrics_file)
        self._channel = context.channel

    def tick(self, **labels: Any) -> dict[str, Any]:
        row = super().tick(**labels)
        self._channel.doing(f"step {labels.get('step')} trained")
        return row


async def main(context: RoleContext) -> str:
    config = context.loaded.config
    async with (
        open_ledger_client(
            context.addresses["ledger"],
            RunId(config.run.name),
            request_s=config.ledger.request_s,
            log=context.log,
            token=context.token,
        ) as ledger,
        open_weights(
            config.inference,
            context.addresses["policy"],
            directory=context.directory.weights,
            trainer_device=config.trainer.device,
            token=steering_token(config.inference, own=context.token, source_dir=context.loaded.source_dir),
            log=context.log,
        ) as weights,
    ):
        loop = TrainerLoop(
            source=ledger,
            receiver=weights,
            stage=weights,
            publishes_adapters=config.inference.publish == "adapter",
            config=config.trainer,
            model_dir=context.directory.initial_model,
            directory=context.directory.path,
            max_head_offpolicy_versions=config.gate.max_head_offpolicy_versions,
            metrics=_ReportingRecorder(context),
            spans=context.spans,
            log=context.log,
        )
        context.channel.ready(f"pid {os.getpid()}, loading")
        with _forwarder(context):
            outcome = await _run_until_drained(loop, context)
    return _exit_message(outcome)


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
    except ImportError as error:
        raise RunError(str(error)) from error
    position = context.directory.path / "telemetry_position"
    return Forwarder(context.directory.metrics_file, sinks, position_file=position)


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
    return f"{outcome.reason} after step {outcome.step}, weights {outcome.digest}"
