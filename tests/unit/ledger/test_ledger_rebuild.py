"""A ledger that lost commits: the audit names the damage, nothing overwrites it, and the journal restores it."""

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.errors import RollbookError, RunError
from rollbook.contracts.group import DropKind, DropReason, GroupId
from rollbook.ledger.config import Durability, LedgerConfig
from rollbook.ledger.journal import JOURNAL
from rollbook.ledger.service import Ledger, open_ledger
from rollbook.ledger.store import StoreFaultError, Transaction
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.ledger.stores.sqlite.store import only_service, open_readonly, open_sqlite_store, reclaim
from rollbook.ledger.tools.audit import audit, audit_run
from rollbook.ledger.tools.compaction import compact
from rollbook.ledger.tools.rebuild import rebuild
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, draws, group_of, settings, submission_of

LOG = f"{FILE_NAME}-wal"


async def train(ledger: Ledger, steps: range, *, checkpoint_every: int = 3, restored_step: int = 0) -> None:
    """Steps with one dropped group each."""
    role = await ledger.take_role(RUN, restored_step=restored_step)
    owner = await ledger.join(RUN, "rollout")
    for step in range(restored_step + 1, steps.start):
        await ledger.decide(RUN, step, epoch=role.epoch, wait_s=0)
        await ledger.acknowledge(RUN, step, f"w{step}", epoch=role.epoch)
    publication = await ledger.register(RUN, steps.start - 1, f"w{steps.start - 1}", epoch=role.epoch)
    await ledger.confirm(RUN, publication, epoch=role.epoch)
    for step in steps:
        # Groups that an earlier dispatcher held are granted again.
        for grant in (await ledger.open(RUN, owner, draws(3 * step, 3), limit=6)).grants:
            if grant.group_id == GroupId(f"task{3 * step + 2}@0"):
                await ledger.close(RUN, grant.group_id, DropReason(DropKind.FILTERED, "constant"))
            else:
                group = group_of(grant.task_id, (publication.id,))
                await ledger.submit(RUN, submission_of(group, attempt=grant.attempt))
        assert await ledger.decide(RUN, step, epoch=role.epoch, wait_s=0) is not None
        await ledger.acknowledge(RUN, step, f"w{step}", epoch=role.epoch)
        publication = await ledger.register(RUN, step, f"w{step}", epoch=role.epoch)
        await ledger.confirm(RUN, publication, epoch=role.epoch)
        if step % checkpoint_every == 0:
            await ledger.checkpointed(RUN, step, oldest_kept=step, epoch=role.epoch)


async def in_ledger(
    directory: Path, work: Callable[[Ledger], Any], *, durability: Durability = Durability.PROCESS_CRASH
) -> None:
    async with (
        open_sqlite_store(directory, durability=durability) as store,
        open_ledger(store, LedgerConfig(), clock=SystemClock(), log=EventLog("ledger")) as ledger,
    ):
        await ledger.create_run(RUN, settings(per_step=2, staleness_bound=2))
        await work(ledger)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger of a finished run."""
    directory = tmp_path_factory.mktemp("finished")

    async def work(ledger: Ledger) -> None:
        await train(ledger, range(1, 8))
        await ledger.finish(RUN, EndOfRun.MAX_STEPS, epoch=1)

    asyncio.run(in_ledger(directory, work))
    return directory


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a ledger that was killed after step 8, two steps after a checkpoint."""
    directory, copy = tmp_path_factory.mktemp("live"), tmp_path_factory.mktemp("killed") / "ledger"

    async def work(ledger: Ledger) -> None:
        await train(ledger, range(1, 9))
        shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("*-shm"))

    asyncio.run(in_ledger(directory, work))
    return copy


def copy_of(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "damaged"))


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def report_of(directory: Path) -> tuple[str, ...]:
    try:
        with open_readonly(directory) as reader:
            return audit(reader, RUN).violations
    except RollbookError as error:
        return (str(error),)


def content_of(directory: Path) -> dict[str, Any]:
    """All that a run consists of, without the files' own numbers and the places of payloads."""

    def read(tx: Transaction) -> dict[str, Any]:
        groups = list(tx.groups.each(RUN))
        return {
            "run": tx.runs.get(RUN),
            "drops": tx.runs.drops(RUN),
            "positions": tx.positions.all(RUN),
            "groups": groups,
            "moves": {group.group_id: tx.history.of_group(RUN, group.group_id) for group in groups},
            "payloads": [bytes(body) for group in groups if (body := tx.payloads.get(RUN, group.group_id)) is not None],
            "batches": list(tx.batches.each(RUN)),
            "steps": list(tx.steps.each(RUN)),
            "publications": list(tx.publications.each(RUN)),
        }

    with open_readonly(directory) as reader:
        return reader.read_now(read)


def test_after_a_finished_run_every_commit_is_in_the_database_and_none_in_the_log(finished: Path) -> None:
    log = finished / LOG
    assert not log.exists() or log.stat().st_size == 0
    with closing(sqlite3.connect(f"file:{finished / FILE_NAME}?mode=ro&immutable=1", uri=True)) as db:
        assert db.execute("SELECT count(*) FROM steps").fetchone() == (7,)


def test_a_training_checkpoint_empties_the_log(killed: Path) -> None:
    with closing(sqlite3.connect(f"file:{killed / FILE_NAME}?mode=ro&immutable=1", uri=True)) as db:
        assert db.execute("SELECT max(step) FROM steps").fetchone() == (6,)
    assert (killed / LOG).stat().st_size > 0
    assert report_of(killed) == ()


def test_the_journal_restores_a_killed_run_from_any_wrong_bit_of_its_log(killed: Path, tmp_path: Path) -> None:
    content, rng = content_of(killed), random.Random(0)
    for _ in range(12):
        damaged = copy_of(killed, tmp_path)
        flip(damaged / LOG, rng.randrange(8 * (damaged / LOG).stat().st_size))
        found = report_of(damaged)
        assert any("rollbook ledger rebuild" in sentence for sentence in found), found
        with only_service(damaged):
            assert rebuild(damaged).ok
        assert report_of(damaged) == ()
        restored = content_of(damaged)
        # Leases, owners and the last confirmation are later than the last acknowledgement.
        assert restored["steps"] == content["steps"]
        assert restored["batches"] == content["batches"]
        assert restored["payloads"] == content["payloads"]
        assert restored["groups"] == content["groups"]
        assert restored["moves"] == content["moves"]
        assert restored["drops"] == content["drops"]
        shutil.rmtree(damaged)


def empty(database: Path) -> None:
    database.write_bytes(b"")


def truncate(database: Path) -> None:
    database.write_bytes(database.read_bytes()[: database.stat().st_size // 2])


def delete(database: Path) -> None:
    database.unlink()


def replace_by_an_older_one(database: Path) -> None:
    with closing(sqlite3.connect(database)) as db:
        for table in ("steps", "batches", "batch_entries"):
            db.execute(f"DELETE FROM {table} WHERE step > 4")
        db.execute("DELETE FROM history WHERE id > 40")
        db.commit()


@pytest.mark.parametrize("damage", [empty, truncate, delete, replace_by_an_older_one])
def test_a_lost_database_is_named_refused_by_a_service_and_rebuilt(
    damage: Callable[[Path], None], finished: Path, tmp_path: Path
) -> None:
    content, damaged = content_of(finished), copy_of(finished, tmp_path)
    damage(damaged / FILE_NAME)
    assert report_of(damaged)

    async def resume() -> None:
        async with open_sqlite_store(damaged):
            pass

    segments = sorted(path.name for path in (damaged / "payloads").iterdir())
    with pytest.raises(StoreFaultError, match="rollbook ledger rebuild"):
        asyncio.run(resume())
    assert sorted(path.name for path in (damaged / "payloads").iterdir()) == segments, "payload files must survive"
    report = rebuild(damaged)
    assert report.ok
    assert [run.steps for run in report.runs] == [7]
    assert content_of(damaged) == content


@pytest.mark.parametrize("durability", list(Durability))
def test_a_service_does_not_overwrite_a_damaged_log(durability: Durability, killed: Path, tmp_path: Path) -> None:
    damaged = copy_of(killed, tmp_path)
    flip(damaged / LOG, 8 * 5_000)
    before = (damaged / LOG).read_bytes()

    async def resume() -> None:
        async with open_sqlite_store(damaged, durability=durability):
            pass

    with pytest.raises(StoreFaultError, match=r"rollbook ledger rebuild"):
        asyncio.run(resume())
    assert (damaged / LOG).read_bytes() == before


def test_a_log_that_a_power_failure_tore_behind_its_last_sync_is_no_damage(killed: Path, tmp_path: Path) -> None:
    """Without syncs, commits after the last journal entry may be lost; the service continues without them."""
    torn = copy_of(killed, tmp_path)
    content = (torn / LOG).read_bytes()
    lost = bytearray(content)
    lost[-3 * 4120 : -2 * 4120] = bytes(4120)
    (torn / LOG).write_bytes(lost)
    assert report_of(torn)

    async def resume() -> None:
        async with open_sqlite_store(torn, durability=Durability.PROCESS_CRASH) as store:
            assert await store.read(lambda tx: audit_run(tx, RUN).violations) == ()

    asyncio.run(resume())
    assert report_of(torn) == ()


@pytest.mark.parametrize("durability", list(Durability))
def test_a_rebuilt_run_continues_and_can_be_rebuilt_again(durability: Durability, killed: Path, tmp_path: Path) -> None:
    damaged = copy_of(killed, tmp_path)
    for _ in range(2):
        (damaged / FILE_NAME).unlink()
        assert rebuild(damaged).ok
        steps = len(content_of(damaged)["batches"])
        more = range(steps + 1, steps + 4)
        asyncio.run(in_ledger(damaged, lambda ledger: train(ledger, more, restored_step=6), durability=durability))  # noqa: B023
        assert report_of(damaged) == ()
        assert len(content_of(damaged)["batches"]) == more.stop - 1


def test_a_killed_ledger_with_an_intact_log_is_not_rebuilt(killed: Path, tmp_path: Path) -> None:
    directory = copy_of(killed, tmp_path)
    with pytest.raises(RunError, match="passes its audit and was not changed"):
        rebuild(directory)


def test_without_a_journal_the_error_says_what_to_do(finished: Path, tmp_path: Path) -> None:
    directory = copy_of(finished, tmp_path)
    for path in directory.glob("journal*"):
        path.unlink()
    with pytest.raises(RunError, match="restore the directory from a copy"):
        rebuild(directory)


def test_damaged_entries_of_the_journal_are_left_out_and_the_audit_says_what_is_missing(
    finished: Path, tmp_path: Path
) -> None:
    directory = copy_of(finished, tmp_path)
    (directory / FILE_NAME).unlink()
    flip(directory / JOURNAL, 8 * (directory / JOURNAL).stat().st_size // 2)
    report = rebuild(directory)
    assert not report.ok
    assert report.runs[0].violations


def test_compaction_rewrites_the_journal_because_payloads_move(killed: Path, tmp_path: Path) -> None:
    directory = copy_of(killed, tmp_path)

    async def delete_payloads() -> None:
        async with open_sqlite_store(directory) as store:
            await compact(store, now=0.0, run_id=RUN, up_to_step=4)

    asyncio.run(delete_payloads())
    before = (directory / JOURNAL).stat().st_size
    reclaim(directory)
    assert (directory / JOURNAL).stat().st_size < before
    content = content_of(directory)
    (directory / FILE_NAME).unlink()
    assert rebuild(directory).ok
    assert content_of(directory) == content
