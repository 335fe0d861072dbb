"""Audits of a run directory: each continues from the last one, also while the run lasts."""

import asyncio
import json
import shutil
import sqlite3
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from rollbook.commands.training.train import audits
from rollbook.contracts.batch import BatchManifest
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.run.directory import RunDirectory
from rollbook.run.reader import StoredEpisodes, audit, open_run
from rollbook.telemetry.events import EventLog, read_json_lines
from rollbook.trainer.files.step_chain import StepChainWriter
from tests.parts.dashboard.recorded_run import STEPS, record_run


async def test_an_audit_continues_from_the_last_one(tmp_path: Path) -> None:
    directory = await record_run(tmp_path / "run")
    first = await asyncio.to_thread(audit, directory.path)
    assert (first.ok, first.known) == (True, 0)
    again = await asyncio.to_thread(audit, directory.path)
    assert (again.ok, again.known) == (True, again.law["durable"] + again.law["dropped"])
    assert again.known > 0
    assert (await asyncio.to_thread(audit, directory.path, full=True)).known == 0
    directory.audit_file.write_text("{}", encoding="utf-8")
    assert (await asyncio.to_thread(audit, directory.path)).known == 0


def add_chain(directory: RunDirectory, *, steps: int = STEPS) -> None:
    """The trainer's own record of the recorded run."""
    writer = StepChainWriter(directory.path)
    with open_run(directory.path) as run:
        for step in range(1, steps + 1):
            writer.add(run.manifest(step), epoch=1, weights=f"weights-{step}", unusable={})


async def test_a_ledger_behind_its_checkpoints_or_metrics_or_steps_is_a_violation_with_a_way_back(
    tmp_path: Path,
) -> None:
    directory = await record_run(tmp_path / "run")
    await asyncio.to_thread(add_chain, directory)
    assert (await asyncio.to_thread(audit, directory.path)).ok
    checkpoint = directory.checkpoints / f"step-{STEPS + 2:06d}" / "checkpoint.json"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text(json.dumps({"step": STEPS + 2, "weights_digest": "w"}), encoding="utf-8")
    [sentence] = (await asyncio.to_thread(audit, directory.path)).violations
    assert f"the ledger is behind its run: it ends at step {STEPS}, checkpoints/ has step {STEPS + 2}" in sentence
    assert f"rollbook ledger rebuild --store {directory.path}" in sentence
    shutil.rmtree(checkpoint.parent)
    with directory.metrics_file.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"process": "trainer", "step": STEPS + 1}) + "\n")
    [sentence] = (await asyncio.to_thread(audit, directory.path)).violations
    assert f"metrics.jsonl has step {STEPS + 1}" in sentence


async def test_digests_and_counts_of_the_ledger_are_those_of_the_trainer(tmp_path: Path) -> None:
    directory = await record_run(tmp_path / "run")
    writer = StepChainWriter(directory.path)
    manifest = await asyncio.to_thread(_manifest, directory, 2)
    writer.add(manifest, epoch=1, weights="other", unusable={})
    writer.add(replace(manifest, step=STEPS, digest="another"), epoch=1, weights=f"weights-{STEPS}", unusable={})
    found = "\n".join((await asyncio.to_thread(audit, directory.path)).violations)
    assert "step 2 of epoch 1: weights weights-2 in the ledger, other in steps.jsonl" in found
    assert f"step {STEPS}: batch " in found
    assert "6 groups were trained by the ledger, 4 by steps.jsonl" in found


async def test_a_changed_or_missing_line_of_the_trainers_record_is_found(tmp_path: Path) -> None:
    directory = await record_run(tmp_path / "run")
    await asyncio.to_thread(add_chain, directory)
    file = directory.path / "steps.jsonl"
    first, second, third = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text(first + third, encoding="utf-8")
    [sentence] = (await asyncio.to_thread(audit, directory.path)).violations
    assert sentence == "steps.jsonl: line 2 (step 3) does not continue the line before it"
    file.write_text(first + second.replace('"groups":2', '"groups":1') + third, encoding="utf-8")
    assert not (await asyncio.to_thread(audit, directory.path)).ok
    # A kill in the middle of a line loses that line only; the next trainer continues the chain.
    file.write_text(first + second + third[:30], encoding="utf-8")
    assert (await asyncio.to_thread(audit, directory.path)).ok
    StepChainWriter(directory.path).add(
        await asyncio.to_thread(_manifest, directory, 3), epoch=1, weights="weights-3", unusable={}
    )
    assert (await asyncio.to_thread(audit, directory.path)).ok
    assert len(file.read_text(encoding="utf-8").splitlines()) == 3


async def test_a_missing_database_of_a_trained_run_is_a_violation_not_an_error(tmp_path: Path) -> None:
    directory = await record_run(tmp_path / "run")
    (directory.ledger / FILE_NAME).unlink()
    report = await asyncio.to_thread(audit, directory.path)
    assert not report.ok
    assert "has no ledger.sqlite" in report.violations[0]
    assert "the ledger is behind its run: it ends at step 0" in report.violations[1]


def _manifest(directory: RunDirectory, step: int) -> BatchManifest:
    with open_run(directory.path) as run:
        return run.manifest(step)


async def test_the_episodes_of_a_run_are_counted_by_its_ledger(tmp_path: Path) -> None:
    directory = await record_run(tmp_path / "run")

    def count() -> StoredEpisodes:
        with open_run(directory.path) as run:
            return run.episodes()

    found = await asyncio.to_thread(count)
    with_payload = 2 * STEPS
    assert (found.played, found.unscorable) == (2 * with_payload, 0)


async def test_a_run_is_audited_while_it_lasts_and_violations_are_logged(tmp_path: Path) -> None:
    directory = await record_run(tmp_path / "run", ends=False)
    log = EventLog("supervisor", directory.log_file("supervisor"))
    async with AsyncExitStack() as stack:
        stack.callback(log.close)
        await stack.enter_async_context(audits(directory, log, has_begun=lambda: True, every_s=0.01))
        await _logged(directory, "run.audited")
        db = sqlite3.connect(directory.ledger / FILE_NAME)
        with db:
            assert db.execute("UPDATE groups SET attempt = 9 WHERE state = 'dispatched'").rowcount == 1
        db.close()
        assert "its checksum does not match" in (await _logged(directory, "run.audit_violated"))["violation"]


async def test_audits_begin_when_the_run_is_in_the_ledger(tmp_path: Path) -> None:
    directory, is_recorded = RunDirectory(tmp_path / "run"), False
    checked = asyncio.Event()
    log = EventLog("supervisor", directory.log_file("supervisor"))

    def has_begun() -> bool:
        checked.set()
        return is_recorded

    async with AsyncExitStack() as stack:
        stack.callback(log.close)
        await stack.enter_async_context(audits(directory, log, has_begun=has_begun, every_s=0.01))
        for _ in range(3):
            await asyncio.wait_for(checked.wait(), 60)
            checked.clear()
        await record_run(directory.path, ends=False)
        is_recorded = True
        await _logged(directory, "run.audited")
    events = [row["event"] for row in read_json_lines(directory.log_file("supervisor"))]
    assert set(events) == {"run.audited"}


async def _logged(directory: RunDirectory, event: str) -> dict[str, str]:
    async with asyncio.timeout(60):
        while True:
            for row in read_json_lines(directory.log_file("supervisor")):
                if row["event"] == event:
                    return dict(row)
            await asyncio.sleep(0.01)
