"""A whole run on a curriculum whose dispatcher is killed: no draw is repeated or skipped.

`test_rollout_curriculum.py` is the quick form: two dispatchers with real workers, one after the other.
"""

import sqlite3
from collections import defaultdict
from pathlib import Path

import pytest

from rollbook.dashboard.run_files import read_mastery
from tests.parts.run.small import CONFIG, SmallRun

CURRICULUM = """
order = "curriculum"

[tasks.curriculum]
tier_field = "secret"
promote_rate = 0.02
promote_tries = 3
fast_track_rate = 0.02
fast_track_tries = 1
demote_rate = 0.0
"""


@pytest.mark.slow
def test_a_run_continues_its_curriculum_after_the_dispatcher_is_killed(tmp_path: Path) -> None:
    config = CONFIG.replace("args = { low = 0, high = 7 }\n", "args = { low = 0, high = 7 }\n" + CURRICULUM)
    assert "tier_field" in config
    run = SmallRun(tmp_path, ["trainer.max_steps=7", "env.args.step_s=0.01"], config=config).start()
    try:
        run.until(lambda: run.step() >= 3, what="step 3")
        run.kill("rollout")
        summary = run.wait()
    finally:
        run.stop()
    assert (summary["exit_code"], summary["audit"]) == (0, "ok"), summary["stderr"]
    with sqlite3.connect(f"file:{run.directory / 'ledger' / 'ledger.sqlite'}?mode=ro", uri=True) as db:
        rows = db.execute("SELECT task_id, draw, position FROM groups WHERE part = 1 ORDER BY position").fetchall()
    db.close()
    assert [position for _, _, position in rows] == list(range(len(rows)))
    numbers = defaultdict(list)
    for task, number, _ in rows:
        numbers[task].append(number)
    assert all(drawn == list(range(len(drawn))) for drawn in numbers.values()), (
        "the draw numbers continue after the kill"
    )
    assert list(numbers) == [f"guess-{secret}-0" for secret in range(len(numbers))], "tiers are drawn in order"
    assert len(numbers) > 1
    tiers = read_mastery(run.directory)
    assert list(tiers) == [str(secret) for secret in range(8)]
    assert tiers["1"][-1].is_open
    assert tiers["0"][-1].draws > 20
    assert (run.directory / "plots" / "mastery.png").stat().st_size > 5_000
