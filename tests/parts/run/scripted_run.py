"""A run in this process: the supervisor and the ledger are real, the other roles are scripted (`scripted_role.py`)."""

import asyncio
import dataclasses
import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from rollbook.commands.training.train import resolve_run, write_or_check_config
from rollbook.run.config.run import RunConfig
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision.host import HostedProcess, LocalHost, ProcessStart
from rollbook.run.supervision.supervisor import RunOutcome, Supervisor
from rollbook.telemetry.events import EventLog
from tests.parts.run.small import EXAMPLE

MODULES = (
    "rollbook.run.supervision.child_main",
    "rollbook.run.processes.ledger_server",
    "tests.parts.run.scripted_role",
)
"""Modules of its processes."""


class ScriptedHost:
    """Satisfies `ProcessHost`."""

    def __init__(self, real: Sequence[str] = ()) -> None:
        """`real`: roles, besides the ledger, that are not scripted."""
        self._real = ("ledger", *real)

    def awaits(self, process: ProcessStart) -> str:
        return ""

    async def start(self, process: ProcessStart) -> HostedProcess:
        if process.role not in self._real:
            process = dataclasses.replace(process, module="tests.parts.run.scripted_role")
        return await LocalHost().start(process)


def prepared(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run that can be started in the directory `run` of the folder."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 14}), encoding="utf-8")
    loaded, directory = resolve_run(EXAMPLE / "run.toml", folder / "run", ["run.process_template=false", *overrides])
    directory.prepare()
    directory.record_model(model)
    write_or_check_config(loaded, directory, Console(file=io.StringIO()))
    return loaded.config


def make_ready(directory: RunDirectory, *roles: str) -> None:
    for role in roles:
        (directory.path / f"ready-{role}").touch()


@asynccontextmanager
async def supervised(
    config: RunConfig,
    directory: RunDirectory,
    say: Callable[[str], None] = lambda text: None,
    *,
    real: Sequence[str] = (),
    **options: Any,
) -> AsyncIterator[tuple[Supervisor, asyncio.Task[RunOutcome]]]:
    """A run that starts. Its addresses are known; it is stopped at once in the end. `real`: see `ScriptedHost`."""
    with directory.locked():
        host = ScriptedHost(real)
        supervisor = Supervisor(config, directory, log=EventLog("test"), host=host, say=say, **options)
        running = asyncio.create_task(supervisor.run())
        await until(directory.addresses_file.exists)
        try:
            yield supervisor, running
        finally:
            supervisor.interrupt()
            supervisor.interrupt()
            await running


async def until(is_reached: Callable[[], bool]) -> None:
    while not is_reached():  # noqa: ASYNC110  # states of other processes have no event
        await asyncio.sleep(0.02)


def pids(supervisor: Supervisor) -> dict[str, int | None]:
    return {process.role: process.pid for process in supervisor.processes}
