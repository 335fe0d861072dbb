"""The audit reports each kind of damage."""

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollbook.contracts.errors import RunError
from rollbook.ledger.store import StoreFaultError
from rollbook.ledger.stores.sql.tables import CHECKED, Table
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.ledger.stores.sqlite.store import open_readonly
from rollbook.ledger.tools.audit import audit
from tests.parts.ledger.groups import RUN, draws, settings
from tests.parts.ledger.run_driver import RunDriver, blocking_sqlite, write_a_run


def found(directory: Path) -> tuple[str, ...]:
    with open_readonly(directory) as file:
        return audit(file, RUN).violations


def test_a_consistent_run_has_no_violations(tmp_path: Path) -> None:
    write_a_run(tmp_path)
    with open_readonly(tmp_path) as file:
        report = audit(file, RUN)
    assert report.violations == ()
    assert report.ok
    assert report.opened == 9
    assert report.law == {"dispatched": 1, "queued": 1, "batched": 2, "trained": 2, "durable": 2, "dropped": 1}
    assert (report.dropped, report.steps, report.max_lag, report.max_head_offpolicy_versions) == (
        {"filtered": 1},
        2,
        0,
        2,
    )


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("DELETE FROM groups WHERE group_id = 'task8@0'", "has a history but no row"),
        ("DELETE FROM groups WHERE group_id = 'task4@0'", "is in batch 2 but has no row"),
        ("DELETE FROM history WHERE group_id = 'task8@0'", "task8@0 has no history"),
        ("DELETE FROM history WHERE group_id = 'task4@0' AND to_state = 'queued'", "when it was dispatched"),
        ("UPDATE groups SET state = 'queued' WHERE group_id = 'task4@0'", "state by its history"),
        ("UPDATE groups SET step = 1 WHERE group_id = 'task4@0'", "its batch: 2, expected 1"),
        ("UPDATE runs SET num_opened = 10", "opened groups by rows: 9, expected 10"),
        ("UPDATE runs SET num_queued = 2", "queued groups by rows: 1, expected 2"),
        ("UPDATE runs SET num_leased = 0, num_waiting = 1", "leased groups by rows: 1, expected 0"),
        ("UPDATE drops SET kind = 'stale'", "dropped groups by kind"),
        ("DELETE FROM payload_places WHERE group_id = 'task8@0'", "task8@0 is queued and its payload is missing"),
        ("UPDATE payload_places SET digest = 0 WHERE group_id = 'task5@0'", "bytes is damaged"),
        ("UPDATE groups SET payload_digest = 'x' WHERE group_id = 'task5@0'", "task5@0: its payload does not match"),
        ("UPDATE batch_entries SET oldest_version = -3 WHERE step = 1", "has lag 3 in batch 1, the bound is 2"),
        ("UPDATE batch_entries SET group_id = 'x' WHERE step = 1 AND place = 0", "batch 1: digest"),
        ("DELETE FROM batch_entries WHERE step = 3 AND place = 1", "batch 3: groups: 1, expected 2"),
        ("DELETE FROM batches WHERE step = 2", "not contiguous"),
        ("DELETE FROM steps WHERE step = 1", "trained steps: [2], expected [1, 2]"),
        ("UPDATE runs SET durable_step = 3", "out of order"),
        ("UPDATE runs SET num_unusable = 1", "unusable groups by rows: 0, expected 1"),
        ("UPDATE runs SET version = 1", "the version of the current publication: 2, expected 1"),
        ("UPDATE runs SET settled_below = 1", "settled positions below the first open one: 0, expected 1"),
        ("DELETE FROM positions", "positions of the cursor"),
        ("DELETE FROM publications WHERE id = 1", "tokens of publication 1, which is missing"),
        ("DELETE FROM publications WHERE id = 2", "publications: [0, 1], expected [0, 1, 2]"),
        ("UPDATE publications SET effective_step = 9 WHERE id = 1", "counts as version 9"),
        ("UPDATE groups SET publications = '0' WHERE group_id = 'task8@0'", "by its payload, the publications"),
        (
            "UPDATE groups SET oldest_version = 1 WHERE group_id = 'task8@0'",
            "task8@0 has the oldest version 1, expected 2",
        ),
        ("UPDATE groups SET oldest_version = 0 WHERE group_id = 'task4@0'", "oldest version in its batch"),
        ("UPDATE groups SET draw = 1 WHERE group_id = 'task4@0'", "by its payload, the draw is 0, not 1"),
        ("UPDATE groups SET payload_bytes = 1 WHERE group_id = 'task4@0'", "task4@0: bytes of its payload"),
        ("UPDATE groups SET outcome = '{}' WHERE group_id = 'task4@0'", "task4@0: its outcome is damaged"),
        (
            "UPDATE groups SET outcome = replace(outcome, '\"reward_mean\":0.5', '\"reward_mean\":0.7') WHERE state = 'queued'",
            "by its payload, the mean reward is 0.5, not 0.7",
        ),
        ("UPDATE groups SET unusable = 'odd' WHERE group_id = 'task4@0'", "task4@0: recorded as unusable: odd"),
        ("UPDATE groups SET drop_reason = 'odd' WHERE state = 'dropped'", "'odd' is not a valid DropKind"),
        ("UPDATE groups SET opened_at = 5 WHERE group_id = 'task4@0'", "task4@0: time of opening"),
        ("UPDATE groups SET state = 'odd' WHERE group_id = 'task4@0'", "task4@0' is damaged: 'odd' is not a valid"),
        ("UPDATE history SET note = 'odd' WHERE group_id = 'task4@0'", "table history with run_id"),
        (
            "UPDATE steps SET digest = 'odd' WHERE step = 1",
            "table steps with run_id 'run-1', step 1, epoch 1 was changed",
        ),
        ("UPDATE owners SET name = 'odd'", "table owners with run_id"),
        ("UPDATE batches SET decided_at = 5 WHERE step = 1", "table batches with run_id 'run-1', step 1 was changed"),
        ("UPDATE groups SET run_id = 'other' WHERE group_id = 'task8@0'", "table groups with run_id 'other'"),
    ],
)
def test_each_kind_of_damage_is_reported(tmp_path: Path, damage: str, sentence: str) -> None:
    write_a_run(tmp_path)
    db = sqlite3.connect(tmp_path / FILE_NAME)
    with db:
        assert db.execute(damage).rowcount != 0
    db.close()
    assert any(sentence in violation for violation in found(tmp_path)), found(tmp_path)


@pytest.mark.parametrize("table", CHECKED, ids=lambda table: table.name)
def test_a_changed_value_of_each_column_is_reported_with_its_table(tmp_path: Path, table: Table[Any]) -> None:
    """Whatever the value breaks in other checks."""
    original, damaged = tmp_path / "original", tmp_path / "damaged"
    original.mkdir()
    write_a_run(original)
    with closing(sqlite3.connect(original / FILE_NAME)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        num_rows = db.execute(f"SELECT count(*) FROM {table.name}").fetchone()[0]
    rng = random.Random(0)
    for column in table.columns if num_rows else ():
        shutil.copytree(original, damaged)
        with closing(sqlite3.connect(damaged / FILE_NAME)) as db, db:
            one = f"(SELECT checksum FROM {table.name} ORDER BY checksum LIMIT 1 OFFSET {rng.randrange(num_rows)})"
            value = rng.choice([f"coalesce({column}, 0) + 1000", "'odd'", "x'6f6464'"])
            db.execute(f"UPDATE {table.name} SET {column} = {value} WHERE checksum = {one}")
        try:
            violations = found(damaged)
        except RunError as error:
            violations = (str(error),)
        expected = "no run 'run-1'" if (table.name, column) == ("runs", "run_id") else f"table {table.name} with"
        assert any(expected in violation for violation in violations), (column, value, violations)
        shutil.rmtree(damaged)


def test_a_ledger_in_a_read_only_directory_can_be_audited(tmp_path: Path) -> None:
    write_a_run(tmp_path)
    (tmp_path / FILE_NAME).chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert found(tmp_path) == ()
    finally:
        tmp_path.chmod(0o755)


def test_a_live_file_can_be_audited_while_it_is_written(tmp_path: Path) -> None:
    file = blocking_sqlite(tmp_path / FILE_NAME)
    driver = RunDriver(file).create(settings())
    with open_readonly(tmp_path) as reader:
        assert audit(reader, RUN).opened == 0
        driver.take_role()
        driver.publish(0)
        driver.open(driver.join(), draws(0, 2))
        assert audit(reader, RUN).opened == 2
    file.close()


def test_a_directory_without_a_ledger_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StoreFaultError, match=r"has no ledger\.sqlite"), open_readonly(tmp_path):
        pass


def test_a_file_from_a_newer_release_is_refused_by_readers_too(tmp_path: Path) -> None:
    write_a_run(tmp_path)
    db = sqlite3.connect(tmp_path / FILE_NAME)
    with db:
        db.execute("UPDATE schema_versions SET version = 999")
    db.close()
    with pytest.raises(RunError, match="have schema 999"), open_readonly(tmp_path):
        pass
