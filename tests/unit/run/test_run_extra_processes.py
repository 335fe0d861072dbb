"""Additional processes of a run: a process that leaves may take a while, and the next one has another name."""

import asyncio
import signal
from pathlib import Path
from typing import cast

import pytest

from rollbook.concurrency.child_process.process import ChildEndedError
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision import extra_processes
from rollbook.run.supervision.channel import LEAVE_SIGNAL
from rollbook.run.supervision.extra_processes import ExtraProcesses
from rollbook.run.supervision.host import HostedProcess, ProcessStart
from rollbook.run.supervision.scale import Scale
from rollbook.telemetry.events import EventLog
from tests.parts.run.scripted_run import prepared, until


class BusyProcess:
    """Finishes its work, however long that takes, when it is asked to leave. Satisfies `HostedProcess`."""

    pid, is_alive, silent_s = 1, True, 0.0

    def __init__(self) -> None:
        self.is_leaving = False
        self._end = asyncio.Event()

    async def receive(self) -> bytes:
        await self._end.wait()
        raise ChildEndedError("ended")

    async def ended(self) -> int:
        await self._end.wait()
        return 0

    def send_signal(self, number: signal.Signals) -> None:
        self.is_leaving = self.is_leaving or number is LEAVE_SIGNAL

    def send_kill(self) -> None:
        self._end.set()

    async def stop(self, *, grace_s: float) -> bool:
        self._end.set()
        return True

    async def kill(self) -> None:
        self._end.set()

    async def stack(self) -> str:
        return ""

    def last_output(self, max_lines: int = 1) -> str:
        return ""


class BusyHost:
    """Satisfies `ProcessHost`."""

    def __init__(self) -> None:
        self.started: dict[str, BusyProcess] = {}

    def awaits(self, process: ProcessStart) -> str:
        return ""

    async def start(self, process: ProcessStart) -> HostedProcess:
        self.started[process.name] = BusyProcess()
        return cast(HostedProcess, self.started[process.name])


async def test_a_process_that_is_added_while_another_one_leaves_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extra_processes, "POLL_S", 0.01)
    config, directory, host = prepared(tmp_path), RunDirectory(tmp_path / "run"), BusyHost()
    extras = ExtraProcesses(
        config,
        directory,
        {},
        processes=[],
        host=host,
        log=EventLog("test"),
        say=lambda text: None,
        on_change=lambda: None,
        on_members=lambda members: None,
        on_problem=lambda name, awaited, cause: None,
    )
    Scale(rollout=2).write(directory)
    following = asyncio.create_task(extras._follow_scale())
    async with asyncio.timeout(20):
        await until(lambda: len(host.started) == 2)
        Scale(rollout=1).write(directory)
        await until(lambda: host.started["rollout-extra-2"].is_leaving)
        Scale(rollout=2).write(directory)
        await until(lambda: len(host.started) == 3)
    assert [*host.started] == ["rollout-extra-1", "rollout-extra-2", "rollout-extra-3"]
    assert not host.started["rollout-extra-1"].is_leaving
    following.cancel()
    await asyncio.wait({following})
