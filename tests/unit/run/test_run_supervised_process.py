"""The supervisor's view of one process: its output file is bounded, and a cancelled start leaves nothing behind."""

import asyncio
import gc
import io
import json
import os
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from rollbook.commands.training.train import plot_run
from rollbook.concurrency.child_process.process import ChildProcess, ChildSpec
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision import process as supervised
from rollbook.run.supervision.channel import Report, ReportKind
from rollbook.run.supervision.host import ProcessStart
from rollbook.telemetry.events import EventLog


def test_a_file_with_too_much_output_is_cut_to_its_end_while_its_process_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "MAX_OUTPUT_BYTES", 1000)
    monkeypatch.setattr(supervised, "KEPT_OUTPUT_BYTES", 20)
    directory = RunDirectory(tmp_path)
    process = supervised.SupervisedProcess(ProcessStart(name="env", role="env", directory=directory))
    process.limit_output()  # nothing was written yet
    file = directory.stderr_file("env")
    file.parent.mkdir()
    with file.open("ab") as output:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=output)
    assert child.stdin is not None
    child.stdin.write(b"x" * 900)
    child.stdin.flush()
    while file.stat().st_size < 900:
        pass
    process.limit_output()
    assert file.read_bytes() == b"x" * 900, "small enough"
    child.stdin.write(b"y" * 200)
    child.stdin.flush()
    while file.stat().st_size < 1100:
        pass
    process.limit_output()
    child.stdin.write(b"the end")
    child.stdin.close()
    child.wait()
    assert file.read_bytes() == b"(earlier output was deleted)\n" + b"y" * 20 + b"the end"


class LateHost:
    """Its start succeeds although it was cancelled: the process was forked at that moment."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.pid = 0

    def awaits(self, start: ProcessStart) -> str:
        return ""

    async def start(self, start: ProcessStart) -> ChildProcess:
        try:
            self.waits.set()
            return await asyncio.Future()
        except asyncio.CancelledError:
            child = await ChildProcess.start(
                ChildSpec(module="tests.parts.concurrency.child_main", arguments=("echo",))
            )
            self.pid = child.pid
            return child


async def test_a_process_that_starts_at_the_moment_of_a_cancellation_is_ended_and_its_connection_closed(
    tmp_path: Path,
) -> None:
    host = LateHost()
    start = ProcessStart(name="env", role="env", directory=RunDirectory(tmp_path))
    running = asyncio.create_task(supervised.SupervisedProcess(start, host=host).run())
    await host.waits.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(host.pid, 0)
    del running
    gc.collect()  # a connection that was not closed would warn now, and warnings are errors


def test_the_text_of_a_start_has_the_seconds_of_each_process_by_activity(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    policy, env = (
        supervised.SupervisedProcess(ProcessStart(name=name, role=name, directory=directory))
        for name in ("policy", "env")
    )
    policy.start_s = {"starting": 0.04, "importing its modules": 5.1, "loading the model": 3.16}
    assert supervised.start_text([policy, env]) == "8.3 policy (5.1 importing its modules, 3.2 loading the model)"


def test_a_trainer_delivers_with_its_first_step_and_not_with_its_first_publication(tmp_path: Path) -> None:
    trainer, rollout = (
        supervised.SupervisedProcess(ProcessStart(name=name, role=name, directory=RunDirectory(tmp_path)))
        for name in ("trainer", "rollout")
    )
    for process in (trainer, rollout):
        process.move(supervised.ProcessState.STARTING)
        process._take(Report(ReportKind.READY, "loading the model"))
        process._take(Report(ReportKind.PROGRESS, ""))
    assert (trainer.has_delivered.is_set(), rollout.has_delivered.is_set()) == (False, True)
    trainer._take(Report(ReportKind.DOING, "training step 1"))
    trainer._take(Report(ReportKind.DELIVERED, ""))
    assert trainer.has_delivered.is_set()
    assert "training step 1" in trainer.start_s


def test_waiting_is_not_a_part_of_a_start(tmp_path: Path) -> None:
    process = supervised.SupervisedProcess(ProcessStart(name="env", role="env", directory=RunDirectory(tmp_path)))
    process.move(supervised.ProcessState.WAITING, "for the ledger")
    process.move(supervised.ProcessState.STARTING)
    assert process.start_s == {}
    process.move(supervised.ProcessState.RUNNING, "serving")
    assert list(process.start_s) == ["starting"]


def test_plots_that_cannot_be_drawn_are_an_event_of_the_log(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.prepare()
    with closing(EventLog("test", directory.log_file("test"), echo=io.StringIO())) as log:
        plot_run(directory, log)
    (event,) = [json.loads(line) for line in directory.log_file("test").read_text(encoding="utf-8").splitlines()]
    assert event["event"] == "run.plots_failed"
    assert "config.toml" in event["cause"], "the directory has no run"
