"""Power failures at arbitrary moments: the disk keeps synced data and an arbitrary part of the rest."""

import io
import random
import shutil
from pathlib import Path

import pytest

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.group import DropKind, GroupId
from rollbook.ledger.config import Durability, LedgerConfig
from rollbook.ledger.service import open_ledger
from rollbook.ledger.store import Transaction
from rollbook.ledger.stores.sqlite.segments import DIRECTORY as SEGMENTS
from rollbook.ledger.stores.sqlite.store import open_sqlite_store
from rollbook.ledger.tools.audit import audit_run
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN
from tests.parts.ledger.power_loss import DISK, LEDGER, Disk, Entry, Leaves, record

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the watching library is built with gcc")

CUTS = 40


async def lost_after_a_cut(directory: Path, answers: list[str]) -> list[str]:
    """Open what is left as a restarted ledger would, and name every answer that is not true any more."""

    def look(tx: Transaction) -> list[str]:
        if RUN not in tx.runs.ids():
            return list(answers)
        # The audit compares every payload that counts with its digest: none is damaged, none is missing without a word.
        assert audit_run(tx, RUN).violations == ()
        return [answer for answer in answers if not is_kept(tx, answer)]

    clock, log = SystemClock(), EventLog("ledger", echo=io.StringIO())
    async with open_sqlite_store(directory) as store, open_ledger(store, LedgerConfig(), clock=clock, log=log):
        return await store.read(look)


def is_kept(tx: Transaction, answer: str) -> bool:
    match answer.split():
        case ["group", group_id]:
            group = tx.groups.get(RUN, GroupId(group_id))
            return group is not None and not (group.drop_reason or "").startswith(DropKind.LOST)
        case ["batch", step, digest]:
            batch = tx.batches.get(RUN, int(step))
            return batch is not None and batch.manifest.digest == digest
    raise AssertionError(f"not an answer: {answer}")


def moments(entries: list[Entry], count: int, rng: random.Random) -> set[int]:
    """Right after an answer, where nothing may be left to luck, and anywhere else."""
    answered = [at for at, entry in enumerate(entries, start=1) if entry.path.name == "answered" and entry.kind == "w"]
    chosen = set(rng.sample(answered, min(len(answered), count // 2)))
    return chosen | set(rng.sample(range(1, len(entries) + 1), min(len(entries), count - len(chosen)))) | {len(entries)}


async def cut_again_and_again(directory: Path, durability: Durability, cuts: int, seed: int) -> dict[str, int]:
    """How many groups and batches that had been answered were lost, over all cuts."""
    rng = random.Random(seed)
    entries = record(directory, durability)
    chosen = moments(entries, cuts, rng)
    lost = {"group": 0, "batch": 0, "answers": 0}
    disk = Disk()
    for at, entry in enumerate(entries, start=1):
        disk.play(entry)
        if at not in chosen:
            continue
        for leaves in Leaves:
            where = directory / f"{at}-{leaves.value}"
            disk.write_to(where, leaves, rng)
            for answer in await lost_after_a_cut(where, disk.answers):
                lost[answer.split()[0]] += 1
            shutil.rmtree(where)
        lost["answers"] += len(disk.answers)
    return lost


async def test_with_power_loss_durability_no_power_failure_loses_acknowledged_groups_or_batches(tmp_path: Path) -> None:
    lost = await cut_again_and_again(tmp_path, Durability.POWER_LOSS, CUTS, seed=1)
    assert (lost["group"], lost["batch"]) == (0, 0)
    assert lost["answers"] > 0


def test_the_directories_of_a_new_ledger_are_synced_before_the_first_acknowledgement(tmp_path: Path) -> None:
    entries = record(tmp_path, Durability.PROCESS_CRASH)
    first_answer = next(at for at, entry in enumerate(entries) if entry.path.name == "answered" and entry.kind == "w")
    synced = {entry.path for entry in entries[:first_answer] if entry.kind == "s"}
    disk = tmp_path.resolve() / DISK
    assert {disk, disk / "runs", disk / LEDGER, disk / LEDGER / SEGMENTS} <= synced


async def test_with_process_crash_durability_a_power_failure_may_lose_groups_but_never_a_decided_batch(
    tmp_path: Path,
) -> None:
    lost = await cut_again_and_again(tmp_path, Durability.PROCESS_CRASH, CUTS, seed=2)
    assert lost["batch"] == 0
    # The watching works: in this mode something is there to be lost.
    assert lost["group"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_many_more_power_failures_lose_nothing(tmp_path: Path, seed: int) -> None:
    lost = await cut_again_and_again(tmp_path, Durability.POWER_LOSS, 400, seed=seed)
    assert (lost["group"], lost["batch"]) == (0, 0)
