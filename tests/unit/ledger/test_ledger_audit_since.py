"""An audit that continues from an earlier one reads what changed since, and finds the same as a complete one."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from rollbook.contracts.admission import AuditReport
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.ledger.stores.sqlite.segments import segment_path
from rollbook.ledger.stores.sqlite.store import open_readonly
from rollbook.ledger.tools.audit import audit, audit_since
from rollbook.ledger.tools.audit_findings import AuditMark
from tests.parts.ledger.groups import RUN, draws, settings
from tests.parts.ledger.run_driver import RunDriver, blocking_sqlite


def audited(directory: Path, mark: AuditMark | None) -> tuple[AuditReport, AuditMark | None]:
    with open_readonly(directory) as file:
        return file.read_now(lambda tx: audit_since(tx, RUN, mark))


def play(directory: Path, *, last: int, checkpoint: int) -> None:
    """Two groups a step, tasks 2 * step and 2 * step + 1. The last step is decided and not trained."""
    file = blocking_sqlite(directory / FILE_NAME)
    driver = RunDriver(file)
    driver.create(settings(staleness_bound=2))
    driver.take_role()
    live = driver.publish(0)
    owner = driver.join()
    for step in range(1, last + 1):
        driver.open(owner, draws(2 * step, 2))
        for at in (0, 1):
            driver.submit(f"task{2 * step + at}", (live.id,))
        driver.decide(step)
        if step < last:
            driver.acknowledge(step)
            live = driver.publish(step)
    driver.checkpointed(checkpoint)
    file.close()


def change(directory: Path, sql: str) -> None:
    db = sqlite3.connect(directory / FILE_NAME)
    with db:
        assert db.execute(sql).rowcount != 0
    db.close()


def test_durable_groups_are_not_read_again(tmp_path: Path) -> None:
    play(tmp_path, last=3, checkpoint=2)
    first, mark = audited(tmp_path, None)
    assert (first.ok, first.known, first.law["durable"]) == (True, 0, 4)
    segment_path(tmp_path, 0).unlink()
    change(tmp_path, "DELETE FROM history WHERE group_id = 'task2@0'")
    change(tmp_path, "UPDATE groups SET has_payload = 0 WHERE group_id IN ('task6@0', 'task7@0')")
    again, _ = audited(tmp_path, mark)
    assert (again.known, again.law) == (4, first.law)
    assert {sentence.split()[1].rstrip(":") for sentence in again.violations if sentence.startswith("group")} == {
        "task6@0",
        "task7@0",
    }
    with open_readonly(tmp_path) as file:
        assert any("task2@0" in sentence for sentence in audit(file, RUN).violations)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("UPDATE runs SET num_opened = 10", "opened groups by rows: 6, expected 10"),
        ("DELETE FROM groups WHERE group_id = 'task6@0'", "task6@0 is in batch 3 but has no row"),
        ("DELETE FROM history WHERE group_id = 'task6@0'", "task6@0 has no history"),
        ("UPDATE groups SET state = 'queued' WHERE group_id = 'task6@0'", "task6@0: state by its history"),
        ("UPDATE groups SET attempt = 7 WHERE group_id = 'task6@0'", "table groups with run_id"),
        ("UPDATE history SET note = 'odd' WHERE group_id = 'task6@0'", "table history with run_id"),
        ("UPDATE batch_entries SET group_id = 'x' WHERE step = 3 AND place = 0", "batch 3: digest"),
        ("DELETE FROM batches WHERE step = 3", "the last decided batch: 2, expected 3"),
        ("DELETE FROM publications WHERE id = 2", "the last confirmed publication 2 is missing"),
        ("UPDATE owners SET name = 'odd'", "table owners with run_id"),
        ("UPDATE runs SET durable_step = 3", "out of order"),
        ("UPDATE runs SET settled_below = 1", "settled positions below the first open one"),
        ("DELETE FROM payload_places WHERE group_id = 'task6@0'", "task6@0 is batched and its payload is missing"),
    ],
)
def test_damage_of_what_may_still_change_is_reported(tmp_path: Path, damage: str, sentence: str) -> None:
    play(tmp_path, last=3, checkpoint=2)
    _, mark = audited(tmp_path, None)
    change(tmp_path, damage)
    report, next_mark = audited(tmp_path, mark)
    assert any(sentence in violation for violation in report.violations), report.violations
    assert next_mark is None


def test_a_run_that_was_resumed_is_audited_from_the_mark(tmp_path: Path) -> None:
    play(tmp_path, last=3, checkpoint=2)
    _, mark = audited(tmp_path, None)
    resumed = blocking_sqlite(tmp_path / FILE_NAME)
    driver = RunDriver(resumed)
    driver.take_role(2)
    driver.acknowledge(3)
    driver.publish(3)
    driver.checkpointed(3)
    resumed.close()
    report, next_mark = audited(tmp_path, mark)
    assert (report.ok, report.known, report.law["durable"], report.steps) == (True, 4, 6, 3)
    again, _ = audited(tmp_path, next_mark)
    assert (again.ok, again.known) == (True, 6)


def test_the_mark_of_another_record_is_ignored(tmp_path: Path) -> None:
    home, copy = tmp_path / "run", tmp_path / "copy"
    home.mkdir()
    play(home, last=3, checkpoint=1)
    shutil.copytree(home, copy)
    for directory, now in ((home, 2_000.0), (copy, 3_000.0)):
        file = blocking_sqlite(directory / FILE_NAME)
        driver = RunDriver(file)
        driver.now = now
        driver.epoch = 1
        driver.acknowledge(3)
        file.close()
    _, mark = audited(home, None)
    assert audited(home, mark)[0].known == 2
    assert audited(copy, mark)[0].known == 0
