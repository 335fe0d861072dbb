"""The dispatcher with a curriculum and real workers; a second dispatcher restores the curriculum from the ledger."""

from pathlib import Path

from rollbook.contracts.group import GroupId
from rollbook.tasks.curriculum import Curriculum
from rollbook.tasks.mastery import success_of
from rollbook.telemetry.metrics import read_metrics
from tests.parts.rollout.dispatching import dispatching
from tests.parts.rollout.sink import MemorySink
from tests.parts.tasks.curriculum import rules, tiered


async def test_a_second_dispatcher_continues_the_curriculum_of_the_first(tmp_path: Path) -> None:
    tasks, chosen = tiered(3, 2, secret=3), rules(promote_tries=3, fast_track_tries=2)
    sink = MemorySink(capacity=4, wanted=12)
    for name, wanted in (("first", 12), ("second", 30)):
        sink.wanted = wanted
        curriculum = Curriculum(tasks, chosen, seed=2)
        await dispatching(tmp_path / name, [{}], sink=sink, source=curriculum, worker={"delay_s": 0.01}).run()
    assert len(read_metrics(tmp_path / "second" / "metrics.jsonl")) > 0
    # Each draw of a task occurs once, over both dispatchers, and positions have no gap.
    for task in tasks:
        numbers = sorted(row.draw.number for row in sink.rows.values() if row.draw.task_id == task.id)
        assert numbers == list(range(len(numbers)))
    assert sorted(row.draw.position for row in sink.rows.values()) == list(range(len(sink.rows)))
    # The second dispatcher knows all results, including those of the first.
    for task in tasks:
        drawn = sorted((row for row in sink.rows.values() if row.draw.task_id == task.id), key=lambda r: r.draw.number)
        successes = [success_of(row.outcome) for row in drawn if row.outcome is not None]
        assert curriculum.mastery(task.id).results == tuple(successes[-chosen.task_window :])
    assert all(sink.rows[GroupId(f"a{at}@0")].attempt == 1 for at in range(3))
