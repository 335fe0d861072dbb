"""The dispatcher process: draws tasks and dispatches groups to worker processes (`rollout_worker`). A client of the ledger."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from rollbook.contracts.admission import MemberRole
from rollbook.contracts.errors import RollbookError, TransientError
from rollbook.contracts.policy import NOT_SAMPLED
from rollbook.contracts.task import Task
from rollbook.inference.client.fleet import Fleet, Replica
from rollbook.ledger.atropos.feed import AtroposFeed
from rollbook.rollout.dispatch.dispatcher import Dispatcher
from rollbook.rollout.metrics import rollout_metrics
from rollbook.run.held_out import held_out, record_held_out, training_tasks
from rollbook.run.ledger_clients import client_token, member_source, open_run_ledger
from rollbook.run.policy_clients import open_policy, policy_urls
from rollbook.run.processes.rollout_worker import worker_spec
from rollbook.run.supervision.child_main import RoleContext
from rollbook.run.supervision.membership import membership
from rollbook.tasks.dataset import DatasetError, build_source
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.telemetry.waits import WAITS

REPORT_S = 0.5
POLL_S = 0.1
STATUS_S = 5.0
"""A policy server that does not report its weights within this time does not serve."""
QUIET_S = 60.0
"""After which a policy server that does not serve is reported: until then it loads its model."""


async def main(context: RoleContext) -> str:
    config = context.loaded.config
    if config.tasks.is_posted:
        return await _fetch_posts(context)
    trained = training_tasks(config, context.loaded.source_dir)
    if not context.is_member:
        _record_held_out(context, trained)
    tasks = build_source(
        config.tasks,
        trained,
        # Dispatchers that joined know the same outcomes; one log is enough.
        mastery_file=None if context.is_member else context.directory.mastery_file,
    )
    async with (
        open_run_ledger(context.loaded, context.directory, context.addresses["ledger"], log=context.log) as ledger,
        membership(context, MemberRole.ROLLOUT),
        open_policy(
            config.inference,
            context.addresses["policy"],
            log=context.log,
            token=client_token(config, context.directory),
            source=member_source(ledger, MemberRole.POLICY, policy_urls(context.addresses["policy"]))
            if config.cluster.has_members
            else None,
        ) as policy,
    ):
        dispatcher = Dispatcher(
            name="dispatcher-0" if context.name == "rollout" else f"dispatcher-{context.name}",
            tasks=tasks,
            sink=ledger,
            spec=worker_spec(context),
            rule=config.ledger_settings().rule,
            log=context.log,
            metrics=MetricRecorder(
                context.name, rollout_metrics(config.rollout), context.directory.metrics_of(context.name)
            ),
            spans=context.spans,
            max_attempts=config.gate.max_attempts,
            until_served=partial(_until_served, policy.fleet),
            log_hint=f"the events rollout.group_failed in {context.directory.log_file(context.name)}",
        )
        context.channel.ready("starting workers")
        reporting = asyncio.create_task(_report(dispatcher, context), name="rollout.report")
        try:
            return await _run_until_drained(dispatcher.run(), context, on_leave=dispatcher.leave)
        finally:
            reporting.cancel()


def _record_held_out(context: RoleContext, trained: tuple[Task, ...]) -> None:
    try:
        found = held_out(context.loaded.config, trained, context.loaded.source_dir)
    except DatasetError as error:
        context.log.warning(
            "tasks.held_out", warning=str(error)
        )  # the evaluation reports it; training does not depend on it
        return
    if found is None:
        return
    record_held_out(context.directory, found)
    if found.warning is not None:
        context.log.warning("tasks.held_out", warning=found.warning)


async def _until_served(fleet: Fleet) -> None:
    """Wait until a policy server has weights. A trainer that starts may replay for longer than the deadline of a group."""
    began = time.monotonic()

    async def has_weights(replica: Replica) -> bool:
        try:
            async with asyncio.timeout(STATUS_S):
                publication = (await fleet.protocol.status(replica.connection)).publication
        except (TransientError, TimeoutError) as error:
            if time.monotonic() - began > QUIET_S:
                WAITS.failing(_status_of(replica), str(error) or f"{replica.url} did not respond within {STATUS_S:g} s")
            return False
        except RollbookError:
            publication = None  # a server of another kind: requests show whether it serves
        WAITS.recovered(_status_of(replica))
        return publication is None or publication > NOT_SAMPLED

    while not any(await asyncio.gather(*map(has_weights, fleet.replicas))):  # noqa: ASYNC110 - the servers are other processes
        await asyncio.sleep(POLL_S)


def _status_of(replica: Replica) -> str:
    return f"the status of {replica.url}"


async def _report(dispatcher: Dispatcher, context: RoleContext) -> None:
    """Report what the dispatcher does or waits for. Ends: on cancellation."""
    reported, has_joined = "", False
    while True:
        if dispatcher.has_joined and not has_joined:
            context.channel.progress()
            has_joined = True
        if (doing := dispatcher.doing) != reported:
            context.channel.doing(doing)
            reported = doing
        await asyncio.sleep(REPORT_S)


async def _fetch_posts(context: RoleContext) -> str:
    """Instead of dispatching, fetch the groups that Atropos environments posted."""
    config = context.loaded.config
    async with open_run_ledger(
        context.loaded, context.directory, context.addresses["ledger"], log=context.log
    ) as ledger:
        source = AtroposFeed(
            ledger,
            url=config.tasks.atropos.url or context.addresses["ledger"],
            batch_sequences=config.tasks.atropos.batch_sequences,
            max_token_len=config.tasks.atropos.max_token_len,
            max_queued=config.gate.groups_per_step * (config.gate.max_head_offpolicy_versions + 1),
            num_steps=config.trainer.max_steps,
            log=context.log,
        )
        context.channel.ready("waiting for environments")
        context.channel.progress()
        return await _run_until_drained(source.run(), context)


async def _run_until_drained(
    work: Coroutine[Any, Any, None], context: RoleContext, *, on_leave: Callable[[], None] = lambda: None
) -> str:
    """A drain cancels the work at once: the ledger grants groups in flight again after a resume. `on_leave`: starts to end it."""

    async def leave() -> None:
        await context.leaving.wait()
        on_leave()

    playing = asyncio.create_task(work, name="rollout.work")
    draining = asyncio.create_task(context.draining.wait(), name="rollout.drain")
    leaving = asyncio.create_task(leave(), name="rollout.leave")
    try:
        await asyncio.wait({playing, draining}, return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            await playing
            return "left" if context.leaving.is_set() else "the run is over"
        return "drained"
    finally:
        tasks = (playing, draining, leaving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
