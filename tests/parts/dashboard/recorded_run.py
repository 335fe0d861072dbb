"""A small run directory with a real ledger and metrics, without processes; and a dashboard that serves it."""

import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp

from rollbook.access.server import serve_app
from rollbook.concurrency.clock import SystemClock
from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.group import DropKind, DropReason, GroupId, PromptGroup
from rollbook.contracts.trajectory import RolloutSample, TurnMark
from rollbook.dashboard.server.access import DashboardAccess
from rollbook.dashboard.server.app import build_app
from rollbook.dashboard.server.runs import open_runs
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.service import Ledger, open_ledger
from rollbook.ledger.stores.sqlite.store import open_sqlite_store
from rollbook.run.catalog import open_catalog
from rollbook.run.config.run import RunConfig, dump_toml
from rollbook.run.directory import RunDirectory
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, draws, group_of, settings, submission_of

STEPS = 3
PER_STEP = 2
HOSTILE = "<script>alert(1)</script> \x1b[31mred\x1b[0m \u202eright-to-left [link](javascript:alert(2))"


Change: TypeAlias = Callable[[RolloutSample], RolloutSample]


def played(
    task: str,
    publication: int,
    more_messages: Sequence[Mapping[str, Any]] = (),
    change: Change = lambda sample: sample,
) -> PromptGroup:
    group = group_of(task, (publication,))
    messages = (
        {"role": "user", "content": HOSTILE},
        {"role": "assistant", "content": f"answer of {task}"},
        *more_messages,
    )
    samples = [
        change(
            replace(
                sample,
                messages=messages,
                solved=number == 1,
                turns=(TurnMark(sequence=0, start=2, end=3, seconds=0.5, queue_s=0.1, act_s=0.2),),
                started_at=1000.0 + number,
                ended_at=1002.0 + number,
            )
        )
        for number, sample in enumerate(group.samples)
    ]
    samples = [sample.with_turns(rewards=[sample.reward or 0.0] * len(sample.turns)) for sample in samples]
    return replace(group, samples=tuple(samples))


async def record_run(
    path: Path,
    *,
    ends: bool = True,
    more_messages: Sequence[Mapping[str, Any]] = (),
    change: Change = lambda sample: sample,
) -> RunDirectory:
    """Three trained steps of two groups, one dropped group, and, unless the run ends, one open group.

    `more_messages`: further messages of the first group's samples; `change`: what else is different in them.
    """
    directory = RunDirectory(path)
    directory.prepare()
    config = RunConfig.model_validate(
        {
            "run": {"name": RUN},
            "model": {"path": "model"},
            "tasks": {"source": "tasks.jsonl"},
            "gate": {"groups_per_step": PER_STEP, "max_groups_in_flight": 8, "max_head_offpolicy_versions": 1},
            "trainer": {"max_steps": STEPS},
        }
    )
    directory.config_file.write_text(dump_toml(config), encoding="utf-8")
    directory.write_manifest(name=RUN, source_dir=path)
    log = EventLog("ledger", echo=sys.stdout)
    async with (
        open_sqlite_store(directory.ledger) as store,
        open_ledger(store, LedgerConfig(), clock=SystemClock(), log=log) as ledger,
    ):
        await _train(ledger, partial(played, more_messages=more_messages, change=change))
        if ends:
            await ledger.finish(RUN, EndOfRun.STOPPED, epoch=1)
    rows = [
        {"time": 1000.0 + step, "process": "trainer", "step": step, "rollout/reward": step / 10, "train/tokens": 4.0}
        for step in range(1, STEPS + 1)
    ]
    directory.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    span = {"process": "trainer", "name": "trainer.train", "start": 1001.0, "end": 1002.0, "id": 1, "parent": None}
    directory.span_file("trainer").write_text(json.dumps({**span, "fields": {"step": 1}}) + "\n", encoding="utf-8")
    return directory


async def _train(ledger: Ledger, play_first: Callable[[str, int], PromptGroup]) -> None:
    await ledger.create_run(RUN, settings(per_step=PER_STEP, in_flight=8))
    role = await ledger.take_role(RUN, restored_step=0)
    owner = await ledger.join(RUN, "worker")
    for step in range(STEPS + 1):
        publication = await ledger.register(RUN, step, f"weights-{step}", epoch=role.epoch)
        await ledger.confirm(RUN, publication, epoch=role.epoch)
        if step == STEPS:
            break
        first = step * PER_STEP
        await ledger.open(RUN, owner, draws(first, PER_STEP), limit=PER_STEP)
        for number in range(first, first + PER_STEP):
            play = played if number else play_first
            await ledger.submit(RUN, submission_of(play(f"task{number}", publication.id)))
        await ledger.decide(RUN, step + 1, epoch=role.epoch, wait_s=0)
        await ledger.acknowledge(RUN, step + 1, f"weights-{step + 1}", epoch=role.epoch)
    await ledger.checkpointed(RUN, STEPS - 1, oldest_kept=1, epoch=role.epoch)
    await ledger.open(RUN, owner, draws(STEPS * PER_STEP, 2), limit=2)
    await ledger.close(
        RUN, GroupId(f"task{STEPS * PER_STEP}@0"), DropReason(DropKind.FILTERED, "all rewards are equal")
    )


class DashboardClient:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def get(self, path: str, **options: object) -> tuple[int, object]:
        async with self.session.get(f"{self.url}{path}", **options) as response:  # type: ignore[arg-type]
            return response.status, await response.json()


@asynccontextmanager
async def serving_dashboard(
    target: str, access: DashboardAccess | None = None, *, allows_actions: bool = False
) -> AsyncIterator[DashboardClient]:
    async with AsyncExitStack() as stack:
        runs = await stack.enter_async_context(open_runs(open_catalog(target), allows_actions=allows_actions))
        app = build_app(runs, access or DashboardAccess())
        url = await stack.enter_async_context(serve_app(app, listening_socket("127.0.0.1", 0)))
        yield DashboardClient(url, await stack.enter_async_context(aiohttp.ClientSession()))
