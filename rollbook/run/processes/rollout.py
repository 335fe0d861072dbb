"""The dispatcher process: tasks and rollout, a client of the ledger; its workers are processes of their own (`rollout_worker`)."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from rollbook.contracts.admission import RunId
from rollbook.ledger.client.client import open_ledger_client
from rollbook.rollout.dispatch.dispatcher import Dispatcher
from rollbook.rollout.metrics import rollout_metrics
from rollbook.rollout.workers.spec import WorkerSpec
from rollbook.run.atropos_feed import AtroposSource
from rollbook.run.model_location import model_location
from rollbook.run.supervision.child_main import RoleContext
from rollbook.tasks.dataset import build_source, load_tasks
from rollbook.telemetry.metrics import MetricRecorder


async def main(context: RoleContext) -> str:
    config = context.loaded.config
    if config.tasks.is_posted:
        return await _fetch_posts(context)
    tasks = build_source(
        config.tasks,
        load_tasks(config.tasks, base_dir=context.loaded.source_dir),
        mastery_file=context.directory.mastery_file,
    )
    async with open_ledger_client(
        context.addresses["ledger"], RunId(config.run.name), request_s=config.ledger.request_s, log=context.log
    ) as ledger:
        dispatcher = Dispatcher(
            name="dispatcher-0",
            tasks=tasks,
            sink=ledger,
            spec=worker_spec(context),
            config=config.rollout,
            rule=config.gate.settings(max_steps=config.trainer.max_steps).rule,
            log=context.log,
            metrics=MetricRecorder("rollout", rollout_metrics(config.rollout), context.directory.metrics_file),
            spans=context.spans,
            max_attempts=config.gate.max_attempts,
            log_hint=f"the events rollout.group_failed in {context.directory.log_file(context.role)}",
        )
        context.channel.ready("playing")
        return await _run_until_drained(dispatcher.run(), context)


async def _fetch_posts(context: RoleContext) -> str:
    """Nobody plays here: environments of Atropos post, and what they posted is taken over."""
    config = context.loaded.config
    async with open_ledger_client(
        context.addresses["ledger"], RunId(config.run.name), request_s=config.ledger.request_s, log=context.log
    ) as ledger:
        source = AtroposSource(
            ledger,
            url=config.tasks.atropos.url or context.addresses["ledger"],
            config=config.tasks.atropos,
            most_queued=config.gate.groups_per_step * (config.gate.max_head_offpolicy_versions + 1),
            num_steps=config.trainer.max_steps,
            log=context.log,
        )
        context.channel.ready("waiting for environments")
        return await _run_until_drained(source.run(), context)


async def _run_until_drained(work: Coroutine[Any, Any, None], context: RoleContext) -> str:
    """A drain stops at once: what is in flight is played again after a resume, by the ledger's own rule."""
    playing = asyncio.create_task(work, name="rollout.work")
    draining = asyncio.create_task(context.draining.wait(), name="rollout.drain")
    try:
        await asyncio.wait({playing, draining}, return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            await playing
            return "the run is over"
        return "drained"
    finally:
        for task in (playing, draining):
            task.cancel()
        await asyncio.gather(playing, draining, return_exceptions=True)


def worker_spec(context: RoleContext) -> WorkerSpec:
    """What the workers of this run are built from."""
    config = context.loaded.config
    return WorkerSpec(
        builder="rollbook.run.processes.rollout_worker:build_setup",
        config=config.rollout,
        settings={
            "policy_url": context.addresses["policy"],
            "model_dir": str(model_location(context.directory)),
            "inference": config.inference.model_dump(mode="json"),
            "env": _envs(context),
            "rollout": config.rollout.model_dump(mode="json"),
            "log_file": str(context.directory.log_file("rollout-worker")),
        },
        search_path=(str(context.loaded.source_dir),),
    )


def _envs(context: RoleContext) -> dict[str, Any]:
    """Where the workers find their worlds: at the run's own environment server, at one elsewhere, or in themselves."""
    if "env" in context.addresses:
        return {"url": context.addresses["env"]}
    return context.loaded.config.env.model_dump(mode="json", exclude_unset=True)
