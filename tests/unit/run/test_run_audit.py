"""Audits of a run directory: each continues from the last one, also while the run lasts."""

import asyncio
import sqlite3
from contextlib import AsyncExitStack
from pathlib import Path

from rollbook.commands.training.train import audits
from rollbook.ledger.stores.sqlite.file import FILE_NAME
from rollbook.run.directory import RunDirectory
from rollbook.run.reader import audit
from rollbook.telemetry.events import EventLog, read_json_lines
from tests.parts.dashboard.recorded_run import record_run


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
