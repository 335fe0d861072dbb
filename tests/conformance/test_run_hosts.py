"""Conformance tests of process hosts. A new host is complete when it is added to the parameters here and passes."""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbook.concurrency.child_process.process import ChildEndedError
from rollbook.concurrency.child_process.template import ProcessTemplate
from rollbook.contracts.plugin import load_on_demand
from rollbook.run.config.cluster import RayConfig
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision.host import HostedProcess, LocalHost, ProcessHost, ProcessStart
from rollbook.telemetry.events import EventLog

RAY_MARKS = [
    pytest.mark.timeout(600),
    # Ray does not close everything that it opens.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
CHILD = "tests.parts.run.hosted_child"


@asynccontextmanager
async def local() -> AsyncIterator[ProcessHost]:
    yield LocalHost()


@asynccontextmanager
async def with_template() -> AsyncIterator[ProcessHost]:
    with tempfile.TemporaryDirectory() as directory:
        template = ProcessTemplate(
            ["argparse"],
            output=Path(directory) / "template.txt",
            on_event=lambda event, fields: None,
        )
        running = asyncio.create_task(template.run())
        await asyncio.sleep(0)
        await template.until_ready(60)
        yield LocalHost(template)
        running.cancel()
        await asyncio.wait({running})


@asynccontextmanager
async def ray_cluster() -> AsyncIterator[ProcessHost]:
    """Ray on this machine, if it is installed."""
    pytest.importorskip("ray", reason="needs rollbook[cluster]")
    open_host = load_on_demand("rollbook.run.supervision.ray_host:open_ray_host")
    async with open_host(RayConfig(address="auto", policy_cpus=0, rollout_cpus=0), log=EventLog("test")) as host:
        yield host


@pytest.fixture(params=[local, with_template, pytest.param(ray_cluster, marks=RAY_MARKS)])
async def host(request: pytest.FixtureRequest) -> AsyncIterator[ProcessHost]:
    opener: Callable[[], AbstractAsyncContextManager[ProcessHost]] = request.param
    async with opener() as opened:
        yield opened


@asynccontextmanager
async def started(host: ProcessHost, tmp_path: Path, role: str) -> AsyncIterator[tuple[HostedProcess, dict[str, Any]]]:
    """A process in this role, and the facts that it sent."""
    directory = RunDirectory(tmp_path)
    directory.write_manifest(name="hosted", source_dir=tmp_path)
    directory.stderr_file("child").parent.mkdir(exist_ok=True)
    process = await host.start(
        ProcessStart(
            name="child", role=role, directory=directory, environment={"HOSTED_VARIABLE": "value"}, module=CHILD
        )
    )
    try:
        yield process, json.loads(await process.receive())
    finally:
        await process.kill()


async def test_a_process_reports_its_messages_its_exit_code_and_its_last_lines(
    host: ProcessHost, tmp_path: Path
) -> None:
    async with started(host, tmp_path, "fails") as (process, facts):
        assert (facts["pid"], facts["variable"]) == (process.pid, "value")
        assert await process.ended() == 7
        with pytest.raises(ChildEndedError, match="exited with status 7"):
            await process.receive()
        assert not process.is_alive
        assert process.last_output(1) == "the last line"


async def test_stopping_waits_for_a_process_that_drains(host: ProcessHost, tmp_path: Path) -> None:
    async with started(host, tmp_path, "drains") as (process, _):
        assert process.is_alive
        assert await process.stop(grace_s=30)
        assert await process.ended() == 0


async def test_stopping_kills_a_process_that_ignores_the_request(host: ProcessHost, tmp_path: Path) -> None:
    async with started(host, tmp_path, "stubborn") as (process, _):
        assert not await process.stop(grace_s=0.1)
        assert await process.ended() == -signal.SIGKILL


async def test_a_kill_also_ends_the_programs_that_the_process_started(host: ProcessHost, tmp_path: Path) -> None:
    async with started(host, tmp_path, "parent") as (process, facts):
        child = psutil.Process(facts["child"])
        process.send_kill()
        assert await process.ended() == -signal.SIGKILL
        _, alive = psutil.wait_procs([child], timeout=20)
        assert alive == []


async def test_a_death_by_signal_is_reported_as_its_negative_number(host: ProcessHost, tmp_path: Path) -> None:
    async with started(host, tmp_path, "waits") as (process, facts):
        os.kill(facts["pid"], signal.SIGABRT)
        assert await process.ended() == -signal.SIGABRT


async def test_the_stacks_name_what_a_process_does(host: ProcessHost, tmp_path: Path) -> None:
    async with started(host, tmp_path, "waits") as (process, _):
        # The process sends its first message before it waits.
        async with asyncio.timeout(60):
            while "wait_for_the_test" not in await process.stack():  # noqa: ASYNC110  # another process reaches it
                await asyncio.sleep(0.05)
        assert process.is_alive
