"""`rollbook top`: the terminal panel of a run that was started elsewhere."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from rich.console import Console

from rollbook.commands.arguments import Argument, Option
from rollbook.commands.output import stderr_console
from rollbook.contracts.errors import RollbookError, UsageError
from rollbook.dashboard.process_files import read_processes
from rollbook.dashboard.run_files import RunReader
from rollbook.dashboard.terminal import ProcessStatus, ProgressRenderer, open_view
from rollbook.run.config.run import RunConfig, load_resolved_config
from rollbook.run.directory import RunDirectory

TICK_S = 0.5


def show_top(run_dir: Path, console: Console, *, once: bool = False) -> None:
    """Show the panel until the run ends or Ctrl-C. `once`: the current state only."""
    directory, config = open_config(run_dir)
    renderer = ProgressRenderer(
        title=config.run.name,
        total_steps=config.trainer.max_steps,
        max_head_offpolicy_versions=config.gate.max_head_offpolicy_versions,
        has_evaluation=config.evaluation.every_steps is not None,
    )
    reader = RunReader(directory.path)
    with open_view(console, renderer) as update:
        for _ in _ticks(directory, once=once):
            update(reader.poll(), _processes(directory))
    if not once:
        console.print("the run has ended")


def _ticks(directory: RunDirectory, *, once: bool) -> Iterator[None]:
    """One tick now, then one for each interval while the run is running, and a last one after its end."""
    was_running = True
    while was_running:
        was_running = directory.is_running() and not once
        yield
        if was_running:
            time.sleep(TICK_S)


def _processes(directory: RunDirectory) -> list[ProcessStatus]:
    return [
        ProcessStatus(
            name=process.name,
            pid=process.pid,
            state=process.state,
            restarts=process.restarts,
            doing="" if process.node is None else f"on {process.node}",
            problems=process.problems,
        )
        for process in read_processes(directory.path)
    ]


def open_config(run_dir: Path) -> tuple[RunDirectory, RunConfig]:
    directory = RunDirectory(run_dir.resolve())
    if not directory.exists:
        raise directory.no_run(f"it has no {directory.manifest_file.name}")
    try:
        return directory, load_resolved_config(directory).config
    except RollbookError as error:
        raise UsageError(f"the configuration of {directory.path} cannot be read: {error}") from error


def top_command(
    run: Annotated[Path, Argument(metavar="RUN_DIR", help="The run directory.")],
    once: Annotated[bool, Option("--once", help="Show the current state and exit.")] = False,
) -> None:
    """Show the live panel of a run that was started elsewhere. Ctrl-C ends the view; the run continues."""
    show_top(run, stderr_console(), once=once)
