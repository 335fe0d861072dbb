"""`rollbook study`: trains the cells of a study, several at once, and writes the report.

The directory of a study has one run directory per cell and seed. Finished cells are skipped and others are resumed, so the same
command continues a study that was stopped.

study.toml       a copy of the study's file
sft/             the shared warm start
cells/CELL/seed-N/      a run directory; next to it seed-N.json, how the run ended, and seed-N.log, its output
cells/CELL/run-N.json   in a study of recorded runs: the curves of the replay of run N, from 0 on
report/          report.md, results.json, curves.svg, cells.svg
"""

import asyncio
import json
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rollbook.commands.arguments import Argument, AsJson, Option, Overrides
from rollbook.commands.output import result, result_json, say, stderr_console
from rollbook.commands.training.sft import run_sft
from rollbook.commands.training.study_replays import ReplayStudyReport, write_replay_report
from rollbook.commands.training.study_report import StudyReport, write_report
from rollbook.concurrency.blocking import run_blocking
from rollbook.concurrency.child_process.process import ChildProcess, ChildSpec
from rollbook.contracts.errors import RunError, UsageError
from rollbook.contracts.plugin import require_libraries
from rollbook.dashboard.run_files import RunReader
from rollbook.dashboard.terminal import duration
from rollbook.run.config.run import load_config
from rollbook.run.config.sft import FINAL
from rollbook.run.config.study import Cell, Study, load_study
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.preflight.report import check_run, print_preflight

TRAINED, REPLAYED = "rollbook.commands.training.study_cell", "rollbook.run.processes.replay_cell"
"""The processes of a cell."""
STATUS_S = 30.0
"""Seconds between progress lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyDirectory:
    path: Path

    @property
    def warm_start(self) -> Path:
        return self.path / "sft"

    def run_dir(self, cell: Cell) -> Path:
        return self.path / "cells" / cell.folder

    def result_file(self, cell: Cell) -> Path:
        return self.run_dir(cell).with_suffix(".json")

    def result(self, cell: Cell) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self.result_file(cell).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found

    def is_finished(self, cell: Cell) -> bool:
        is_there = cell.replayed is not None or self.run_dir(cell).is_dir()
        return is_there and (self.result(cell) or {}).get("end") == "finished"


def study(
    file: Path,
    *,
    out: Path | None = None,
    jobs: int = 1,
    only: str | None = None,
    minutes: float | None = None,
    overrides: Sequence[str] = (),
    trains: bool = True,
    console: Console | None = None,
    on_result: Callable[[dict[str, Any]], None] = lambda row: None,
) -> StudyReport | ReplayStudyReport:
    """Train the cells of a study that are not finished, `jobs` at once, and write the report.

    `only` is a pattern of cell names, such as `*dapo*`. After `minutes` running cells are stopped, and can be resumed. Without
    `trains` only the report is written. `on_result` gets a row when a cell has ended.
    """
    console = console or Console(stderr=True, highlight=False)
    plan = load_study(file, overrides)
    directory = StudyDirectory(path=(out or Path("runs") / plan.name).resolve())
    chosen = _matching(plan.cells, only)
    is_interrupted = False
    if trains:
        require_libraries("torch", "transformers")
        until = None if minutes is None else time.monotonic() + 60 * minutes
        is_interrupted = _train(plan, chosen, directory, console, jobs=jobs, until=until, on_result=on_result)
    results = {cell: directory.result(cell) for cell in plan.cells}
    if plan.config is None:
        return write_replay_report(plan, directory.path, results, is_interrupted=is_interrupted)
    report = write_report(plan, directory.path, {cell: (directory.run_dir(cell), results[cell]) for cell in results})
    return report.interrupted() if is_interrupted else report


def _train(
    plan: Study,
    cells: Sequence[Cell],
    directory: StudyDirectory,
    console: Console,
    *,
    jobs: int,
    until: float | None,
    on_result: Callable[[dict[str, Any]], None],
) -> bool:
    """Returns whether the study was stopped before its end."""
    pending = [cell for cell in cells if not directory.is_finished(cell)]
    (directory.path / "cells").mkdir(parents=True, exist_ok=True)
    with RunDirectory(directory.path).locked():
        shared: tuple[str, ...] = ()
        if plan.sft is not None:
            model = directory.warm_start / FINAL
            if not model.is_dir() and run_sft(plan.sft, out=directory.warm_start, overrides=()).exit_code != 0:
                return True
            shared = (f"model={{path = {json.dumps(str(model))}}}",)
        _check_finished(cells, directory, shared)
        shutil.copy(plan.file, directory.path / "study.toml")
        done = len(cells) - len(pending)
        console.print(f"study {plan.name}: {len(cells)} runs, {done} finished; {directory.path}", markup=False)
        if not pending:
            return False
        if plan.config is not None and all(not directory.run_dir(cell).exists() for cell in cells):
            first = pending[0]
            loaded = load_config(plan.config, (*first.overrides, *shared))
            print_preflight(check_run(loaded, first.overrides), console)
        runner = _Runner(plan, pending, directory, console, shared=shared, until=until, on_result=on_result)
        return run_blocking(runner.run(jobs), on_interrupt=runner.stop)


def _check_finished(cells: Sequence[Cell], directory: StudyDirectory, shared: Sequence[str]) -> None:
    """Finished runs must have the settings of the file, or the report would compare something else than the file says."""
    for cell in cells:
        found = directory.result(cell)
        if found is None or not directory.is_finished(cell):
            continue
        if changed := sorted(set(found["overrides"]) ^ {*_settings_of(cell), *shared}):
            raise RunError(
                f"{directory.run_dir(cell)} was trained with other settings than {cell.name} has now ({', '.join(changed)}): "
                "choose another directory with --out, or delete that run and its .json file"
            )


def _matching(cells: Sequence[Cell], only: str | None) -> list[Cell]:
    chosen = [cell for cell in cells if only is None or fnmatch(cell.name, only)]
    if not chosen:
        names = ", ".join(dict.fromkeys(cell.name for cell in cells))
        raise UsageError(f"no cell matches --only {only!r}; the study has {names}")
    return chosen


def _settings_of(cell: Cell) -> list[str]:
    """What the result of a cell depends on."""
    return [*cell.overrides, *([] if cell.replayed is None else [f"batches of {cell.replayed}"])]


class _Runner:
    """Trains the pending cells. Stopping lets the running ones write a checkpoint; stopping again kills them."""

    def __init__(
        self,
        plan: Study,
        pending: Sequence[Cell],
        directory: StudyDirectory,
        console: Console,
        *,
        shared: Sequence[str],
        until: float | None,
        on_result: Callable[[dict[str, Any]], None],
    ) -> None:
        self._plan = plan
        self._pending = deque(pending)
        self._directory = directory
        self._console = console
        self._shared = shared
        self._until = until
        self._on_result = on_result
        self._running: dict[Cell, ChildProcess] = {}
        self._num_stops = 0

    async def run(self, jobs: int) -> bool:
        """Returns whether it was stopped before the last cell ended."""
        loop = asyncio.get_running_loop()
        caught = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        for number in caught:
            loop.add_signal_handler(number, self.stop)
        try:
            async with asyncio.TaskGroup() as group:
                limit = group.create_task(self._stop_in_time(), name="study.limit")
                status = group.create_task(self._print_status(), name="study.status")
                workers = [group.create_task(self._work(), name=f"study.cells.{n}") for n in range(jobs)]
                await asyncio.wait(workers)
                limit.cancel()
                status.cancel()
        finally:
            for number in caught:
                loop.remove_signal_handler(number)
        return self._num_stops > 0

    def stop(self) -> None:
        self._num_stops += 1
        if self._num_stops == 1 and self._running:
            self._say("stopping: running cells write a checkpoint (Ctrl-C again stops at once)")
        for child in self._running.values():
            child.send_signal(signal.SIGTERM)

    async def _stop_in_time(self) -> None:
        if self._until is not None:
            await asyncio.sleep(max(0.0, self._until - time.monotonic()))
            self._say("the time limit is reached")
            self.stop()

    async def _work(self) -> None:
        while self._pending and not self._num_stops:
            await self._train_cell(self._pending.popleft())

    async def _train_cell(self, cell: Cell) -> None:
        run_dir, result = self._directory.run_dir(cell), self._directory.result_file(cell)
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        result.unlink(missing_ok=True)
        request, log = run_dir.with_suffix(".request"), run_dir.with_suffix(".log")
        write_json(
            request,
            {
                "config": str(self._plan.config),
                "run_dir": str(run_dir),
                "run": str(cell.replayed),
                "overrides": [*cell.overrides, *self._shared],
                "settings": [*_settings_of(cell), *self._shared],
                "result": str(result),
            },
        )
        began = time.monotonic()
        self._say(f"{cell.title}: {'resumed' if run_dir.exists() else 'started'}")
        child = await ChildProcess.start(
            ChildSpec(
                module=TRAINED if cell.replayed is None else REPLAYED,
                arguments=[str(request)],
                has_own_group=True,
                output=log,
            )
        )
        self._running[cell] = child
        if self._num_stops:
            child.send_signal(signal.SIGTERM)  # the study was stopped while the process started
        try:
            await child.ended()
        finally:
            await child.kill()
            del self._running[cell]
            request.unlink(missing_ok=True)
        found = self._directory.result(cell)
        if found is None:
            end = "interrupted" if self._num_stops else "failed"
            found = {"end": end, "message": f"{child.exit_reason}; see {log}", "overrides": _settings_of(cell)}
            write_json(result, found)
        named = {"seed": cell.seed} if cell.replayed is None else {"run": str(cell.replayed)}
        row = {"cell": cell.name, **named, "wall_s": round(time.monotonic() - began, 1), **found}
        row.pop("lines", None)  # the curves of a replay
        self._say(f"{cell.title}: {_ended(row)}")
        self._on_result(row)

    async def _print_status(self) -> None:
        readers: dict[Cell, RunReader] = {}
        while True:
            await asyncio.sleep(STATUS_S)
            readers = {cell: readers.get(cell) or RunReader(self._directory.run_dir(cell)) for cell in self._running}
            states = {cell: await asyncio.to_thread(reader.poll) for cell, reader in readers.items()}
            doing = [
                cell.title if cell.replayed is not None else f"{cell.title} step {state.last_step}"
                for cell, state in states.items()
            ]
            self._say(f"  running: {'; '.join(doing)}; {len(self._pending)} to start")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _ended(row: dict[str, Any]) -> str:
    what = f"{row['end']} after {duration(row['wall_s'])}"
    if "steps" not in row:
        return f"{what}: {row['message']}"
    held_out = "" if row["held_out_solved"] is None else f", held out {row['held_out_solved']:.1%}"
    return f"{what}, {row['steps']} steps, reward {row['reward_first']} → {row['reward_last']}{held_out}"


SHOWN_COLUMNS = 5


def study_command(
    file: Annotated[
        Path, Argument(metavar="STUDY.toml", help="A run config or recorded runs, a grid of settings, and seeds.")
    ],
    *,
    out: Annotated[
        Path | None,
        Option("--out", help="The directory of the study; default: runs/NAME. An existing one is resumed."),
    ] = None,
    jobs: Annotated[int, Option("--jobs", short="-j", min=1, help="Runs that are trained at once.")] = 1,
    only: Annotated[
        str | None, Option("--only", metavar="PATTERN", help="Only cells whose name matches, such as '*dapo*'.")
    ] = None,
    minutes: Annotated[
        float | None, Option("--minutes", min=0, help="Stop after this time; the same command continues.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Check everything and list the cells.")] = False,
    report: Annotated[bool, Option("--report", help="Train nothing: write the report of what is there.")] = False,
    override: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Train every combination of a grid with every seed, and compare them: means with intervals, as a table and as SVG. Or train
    the recorded batches of runs with every combination.

    Finished runs are kept and others resumed, so the same command continues a study. The first Ctrl-C lets the running ones write
    a checkpoint, the second stops at once.
    """
    if dry_run:
        cells = _matching(load_study(file, override or ()).cells, only)
        if as_json:
            for cell in cells:
                result_json({"cell": cell.name, "seed": cell.seed, "settings": _settings_of(cell)})
            return 0
        common = [one for one in cells[0].overrides if all(one in cell.overrides for cell in cells)]
        result(f"all cells  {' '.join(common)}")
        for cell in cells:
            result(f"{cell.title}  {' '.join(one for one in cell.overrides if one not in common)}")
        return 0
    found = study(
        file,
        out=out,
        jobs=jobs,
        only=only,
        minutes=minutes,
        overrides=override or (),
        trains=not report,
        console=stderr_console(),
        on_result=result_json if as_json else lambda row: None,
    )
    # The columns after these are in the report: a terminal is too narrow.
    shown = Table(title=escape(f"{found.measure} of {file}"), title_justify="left")
    for number, heading in enumerate(found.headings[:SHOWN_COLUMNS]):
        shown.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
    for line in found.table():
        shown.add_row(*map(escape, line[:SHOWN_COLUMNS]))
    stderr_console().print(shown)
    for path in found.files:
        say(f"written: {path}")
    if found.is_interrupted:
        say(f"stopped: {len(found.unfinished)} runs are not finished; the same command continues")
    if as_json:
        result_json(found.row())
    return found.exit_code
