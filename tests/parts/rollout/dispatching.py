"""A dispatcher with a real ledger and real worker processes."""

import asyncio
import io
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.contracts.freshness import FreshnessRule
from rollbook.contracts.ports import GroupSink, TaskSource
from rollbook.contracts.task import Task, TaskId
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.dispatch.dispatcher import Dispatcher
from rollbook.rollout.metrics import rollout_metrics
from rollbook.rollout.workers.spec import WorkerSpec
from rollbook.tasks.cursor import CursorDataLoader
from rollbook.telemetry.events import EventLog, read_json_lines
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.telemetry.spans import Span, SpanRecorder, read_spans
from tests.parts.rollout.sink import PUBLICATION, LedgerSink

REPOSITORY = str(Path(__file__).parents[3])


def spec_of(config: RolloutConfig, *, judgements: str | None = None, **settings: Any) -> WorkerSpec:
    return WorkerSpec(
        builder="tests.parts.rollout.guessing:build",
        config=config,
        settings=settings,
        search_path=(REPOSITORY,),
        judgements=judgements,
    )


def config_of(**changed: Any) -> RolloutConfig:
    given = {
        "function": "tests.parts.rollout.functions",
        "completions_per_prompt": 4,
        "retry_budget": 0,
        "drop_constant_reward": False,
        "groups_per_worker": 8,
        "worker_stop_s": 2.0,
        "heartbeat_s": 0.1,
        **changed,
    }
    return RolloutConfig.model_validate(given)


@dataclass
class Dispatching:
    dispatcher: Dispatcher
    tasks: CursorDataLoader
    sink: Any
    directory: Path
    log: EventLog
    recorder: SpanRecorder

    async def run(self, within_s: float = 60.0) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self.dispatcher.run()
        finally:
            self.log.close()
            self.recorder.close()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_json_lines(self.directory / "events.jsonl") if event["event"] == name]

    def spans(self, name: str = "rollout.group") -> list[Span]:
        return [span for span in read_spans(self.directory / "spans.jsonl") if span.name == name]


def dispatching(
    directory: Path,
    rows: list[dict[str, Any]],
    *,
    sink: LedgerSink | GroupSink,
    epochs: int | None = 1,
    name: str = "rollout",
    worker: dict[str, Any] | None = None,
    source: TaskSource | None = None,
    rule: FreshnessRule | None = None,
    until_served: Callable[[], Awaitable[None]] | None = None,
    **config: Any,
) -> Dispatching:
    """A dispatcher on a cursor over `rows`, or on `source`."""
    settings = config_of(**config)
    tasks = CursorDataLoader(
        [Task(id=TaskId(f"t{i}"), row={"secret": i % 10, **row}) for i, row in enumerate(rows)],
        epochs=epochs,
        shuffle=False,
    )
    log = EventLog("rollout", directory / "events.jsonl", echo=io.StringIO())
    recorder = SpanRecorder("rollout", directory / "spans.jsonl")
    dispatcher = Dispatcher(
        name=name,
        tasks=source or tasks,
        sink=sink,
        spec=spec_of(settings, **{"publication": PUBLICATION, **(worker or {})}),
        rule=rule or FreshnessRule(groups_per_step=4, max_in_flight=8, max_head_offpolicy_versions=1),
        log=log,
        metrics=MetricRecorder("rollout", rollout_metrics(settings), directory / "metrics.jsonl"),
        spans=recorder,
        max_attempts=sink.max_attempts if isinstance(sink, LedgerSink) else None,
        until_served=until_served,
    )
    return Dispatching(dispatcher, tasks, sink, directory, log, recorder)
