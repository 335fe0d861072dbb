"""docs/ledger-rules.md, rule 20: with `trim`, batches wait for no slow group, and tokens beyond the staleness bound are masked."""

import sqlite3
from pathlib import Path

import pytest

from rollbook.contracts.batch import BatchManifest
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import GroupId, GroupState
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.ledger.stores.sqlite.store import open_readonly
from rollbook.ledger.tools.audit import audit
from rollbook.ledger.tools.explain import explain_group
from tests.parts.ledger.groups import RUN, draws, settings
from tests.parts.ledger.run_driver import RunDriver, blocking_sqlite


def started(driver: RunDriver) -> RunDriver:
    """Staleness bound 1, two groups a step, eight in flight."""
    driver.create(settings(policy=BatchPolicy.TRIM))
    driver.take_role()
    driver.publish(0)
    return driver


@pytest.fixture
def driver() -> RunDriver:
    return started(RunDriver())


def train(driver: RunDriver, step: int, first_task: int, publication: int) -> None:
    """Play two groups with tokens of one publication, train them and publish the result."""
    owner = driver.join(f"worker{step}")
    assert len(driver.open(owner, draws(first_task, 2)).grants) == 2
    for task in (first_task, first_task + 1):
        driver.submit(f"task{task}", (publication,))
    assert driver.decide(step).manifest is not None
    driver.acknowledge(step)
    driver.publish(step)


def test_a_batch_does_not_wait_for_an_older_group_that_is_still_played(driver: RunDriver) -> None:
    driver.open(driver.join(), draws(0, 3))
    driver.submit("task2")
    driver.submit("task1")
    manifest = driver.decide(1).manifest
    assert manifest is not None
    assert [entry.group_id for entry in manifest.entries] == ["task1@0", "task2@0"]
    assert manifest.cut == -1


def decide_with_masked_tokens(driver: RunDriver) -> BatchManifest:
    """Batch 3: a group with tokens of versions 0 to 2, and one of version 2."""
    driver.open(driver.join(), draws(0, 1))
    for step in (1, 2):
        train(driver, step, 10 * step, step - 1)
    driver.open(driver.join("other"), draws(1, 1))
    driver.submit("task0", (0, 1, 2))
    driver.submit("task1", (2,))
    manifest = driver.decide(3).manifest
    assert manifest is not None
    return manifest


def test_tokens_below_the_cut_are_masked_and_the_rest_of_the_group_is_trained(driver: RunDriver) -> None:
    manifest = decide_with_masked_tokens(driver)
    assert manifest.cut == 1
    assert [(e.group_id, e.masked, e.oldest_version) for e in manifest.entries] == [
        ("task0@0", (0,), 1),
        ("task1@0", (), 2),
    ]
    assert driver.decide(3).manifest == manifest
    assert driver.audit().violations == ()
    assert driver.audit().max_lag == 1
    sentences = " ".join(driver.store.read_now(lambda tx: explain_group(tx, RUN, GroupId("task0@0"))))
    assert "the lag of 1 of its oldest token that is not masked was within the staleness bound of 1" in sentences
    assert "its tokens of publication 0 are older and masked, 2 of 6 trained tokens." in sentences


def test_a_group_without_a_fresh_token_is_dropped_as_stale(driver: RunDriver) -> None:
    driver.open(driver.join(), draws(0, 1))
    for step in (1, 2):
        train(driver, step, 10 * step, step - 1)
    driver.submit("task0", (0,))
    assert driver.decide(3).manifest is None
    dropped = driver.group("task0")
    assert dropped.state is GroupState.DROPPED
    assert dropped.drop_reason == "stale: its newest version is 0, batch 3 takes 1 and newer"


def test_unknown_versions_of_a_granted_group_count_as_its_admission_and_are_masked_with_it(driver: RunDriver) -> None:
    driver.open(driver.join(), draws(0, 1))
    for step in (1, 2):
        train(driver, step, 10 * step, step - 1)
    driver.open(driver.join("other"), draws(1, 1))
    driver.submit("task0", (-1, 2))
    driver.submit("task1", (2,))
    manifest = driver.decide(3).manifest
    assert manifest is not None
    assert manifest.entries[0].masked == (-1,)
    assert driver.audit().violations == ()


def test_what_is_masked_does_not_change_when_a_later_trainer_gets_other_weights(driver: RunDriver) -> None:
    driver.open(driver.join(), draws(0, 1))
    for step in (1, 2):
        train(driver, step, 10 * step, step - 1)
    driver.open(driver.join("other"), draws(1, 1))
    driver.submit("task0", (0, 1, 2))
    driver.submit("task1", (1, 2))
    manifest = driver.decide(3).manifest
    # The next trainer starts from the initial weights and does not reproduce step 1.
    driver.take_role(0)
    for step in (1, 2):
        driver.acknowledge(step, f"other{step}")
    assert driver.decide(3).manifest == manifest
    assert driver.audit().violations == ()


def test_the_next_batch_masks_tokens_of_weights_that_no_longer_exist(driver: RunDriver) -> None:
    for step in (1, 2):
        train(driver, step, 10 * step, step - 1)
    driver.open(driver.join(), draws(0, 2))
    driver.submit("task0", (2,))
    driver.submit("task1", (2,))
    driver.take_role(0)
    for step in (1, 2):
        driver.acknowledge(step, f"other{step}")
    driver.publish(2, "other2")
    # Versions 1 and 2 of the first trainer count as version 0 now, and batch 3 takes 1 and newer.
    assert driver.decide(3).manifest is None
    assert driver.group("task0").state is GroupState.DROPPED
    assert driver.audit().violations == ()


def test_groups_admitted_too_long_ago_do_not_keep_new_ones_from_starting(driver: RunDriver) -> None:
    # Four groups are the gate's limit before the first step; all but two of them stay unfinished.
    assert len(driver.open(driver.join(), draws(0, 8)).grants) == 4
    for task in ("task0", "task1"):
        driver.submit(task, (0,))
    driver.decide(1)
    driver.acknowledge(1)
    driver.publish(1)
    assert driver.status().capacity == 2
    train(driver, 2, 20, 1)
    # Version 2: the groups that were admitted at version 0 are older than the bound.
    status = driver.status()
    assert (status.counts.leased, status.counts.aged, status.capacity) == (2, 2, 4)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            "UPDATE batch_entries SET masked = '' WHERE group_id = 'task0@0'",
            "(version 0) are below the cut 1 and not masked",
        ),
        (
            "UPDATE batch_entries SET masked = '0,2' WHERE group_id = 'task0@0'",
            "publication 2 are masked, and they were not older",
        ),
        (
            "UPDATE batch_entries SET masked = '0' WHERE group_id = 'task1@0'",
            "publication 0 are masked, and it has none",
        ),
        ("UPDATE batches SET cut = 0 WHERE step = 3", "batch 3: cut: 0, expected 1"),
        ("UPDATE batches SET cut = 0 WHERE step = 3", "batch 3: digest"),
        (
            "UPDATE groups SET newest_version = 1 WHERE group_id = 'task0@0'",
            "newest version 1, which is not between 2 and 2",
        ),
    ],
)
def test_damage_of_what_is_masked_is_reported(tmp_path: Path, damage: str, sentence: str) -> None:
    file = blocking_sqlite(tmp_path / FILE_NAME)
    driver = started(RunDriver(file))
    decide_with_masked_tokens(driver)
    file.close()
    db = sqlite3.connect(tmp_path / FILE_NAME)
    with db:
        assert db.execute(damage).rowcount == 1
    db.close()
    with open_readonly(tmp_path) as reader:
        violations = audit(reader, RUN).violations
    assert any(sentence in violation for violation in violations), violations
