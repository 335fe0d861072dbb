"""The dispatcher over a curriculum: played with real workers, and taken up again by another process from the ledger alone."""

from pathlib import Path

from rollbook.contracts.group import GroupId
from rollbook.tasks.curriculum import Curriculum
from rollbook.tasks.mastery import success_of
from rollbook.telemetry.metrics import read_metrics
from tests.parts.rollout.dispatching import dispatching
from tests.parts.rollout.sink import MemorySink
from tests.parts.tasks.curriculum import rules, tiered


async def test_a_second_dispatcher_takes_the_curriculum_up_where_the_first_left_it(tmp_path: Path) -> None:
    tasks, chosen = tiered(3, 2, secret=3), rules(promote_tries=3, fast_track_tries=2)
    sink = MemorySink(capacity=4, wanted=12)
    for name, wanted in (("first", 12), ("second", 30)):
        sink.wanted = wanted
        curriculum = Curriculum(tasks, chosen, seed=2)
        await dispatching(tmp_path / name, [{}], sink=sink, source=curriculum, worker={"delay_s": 0.01}).run()
    assert len(read_metrics(tmp_path / "second" / "metrics.jsonl")) > 0
    # Every draw of a task once, in order, over both processes; positions without a gap.
    for task in tasks:
        numbers = sorted(row.draw.number for row in sink.rows.values() if row.draw.task_id == task.id)
        assert numbers == list(range(len(numbers)))
    assert sorted(row.draw.position for row in sink.rows.values()) == list(range(len(sink.rows)))
    # The second knows of every result, those of the first process too.
    for task in tasks:
        drawn = sorted((row for row in sink.rows.values() if row.draw.task_id == task.id), key=lambda r: r.draw.number)
        successes = [success_of(row.outcome) for row in drawn if row.outcome is not None]
        assert curriculum.mastery(task.id).results == tuple(successes[-chosen.task_window :])
    assert all(sink.rows[GroupId(f"a{at}@0")].attempt == 1 for at in range(3))
