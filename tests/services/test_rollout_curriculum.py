"""The dispatcher with a curriculum and real workers; a second dispatcher restores the curriculum from the ledger."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollbook.contracts.group import GroupId
from rollbook.tasks.curriculum import Curriculum
from rollbook.tasks.mastery import success_of
from rollbook.telemetry.metrics import read_metrics
from tests.parts.rollout.dispatching import dispatching
from tests.parts.rollout.sink import LedgerSink, open_sink
from tests.parts.tasks.curriculum import rules, tiered

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[LedgerSink]:
    async with open_sink(tmp_path) as opened:
        yield opened


async def test_a_second_dispatcher_continues_the_curriculum_of_the_first(tmp_path: Path, sink: LedgerSink) -> None:
    tasks, chosen = tiered(3, 2, secret=3), rules(promote_tries=3, fast_track_tries=2)
    sink.limit(capacity=4)
    for name, num_stored in (("first", 12), ("second", 30)):
        curriculum = Curriculum(tasks, chosen, seed=2)
        play = dispatching(tmp_path / name, [{}], sink=sink, source=curriculum, worker={"delay_s": 0.01})
        running = asyncio.create_task(play.run())
        await sink.until(lambda: sum(row.state == "queued" for row in sink.rows.values()) >= num_stored)  # noqa: B023
        play.dispatcher.leave()
        await running
    await sink.end()
    assert len(read_metrics(tmp_path / "second" / "metrics.jsonl")) > 0
    # Each draw of a task occurs once, over both dispatchers, and positions have no gap.
    for task in tasks:
        numbers = sorted(row.draw for row in sink.rows.values() if row.task_id == task.id)
        assert numbers == list(range(len(numbers)))
    assert sorted(row.position or 0 for row in sink.rows.values()) == list(range(len(sink.rows)))
    # The second dispatcher knows all results, including those of the first.
    for task in tasks:
        drawn = sorted((row for row in sink.rows.values() if row.task_id == task.id), key=lambda r: r.draw)
        successes = [success_of(sink.submitted[row.group_id].outcome) for row in drawn]
        assert curriculum.mastery(task.id).results == tuple(successes[-chosen.task_window :])
    assert all(sink.rows[GroupId(f"a{at}@0")].attempt == 1 for at in range(3))
