"""`rollbook train`: starts a run from a config file, or resumes a run directory.

Locks the directory, runs the supervisor under a live view, then audits the ledger, draws the plots and returns a report.
"""

import asyncio
import contextlib
import io
import resource
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from rollbook.contracts.errors import RunError, UsageError
from rollbook.contracts.plugin import require_libraries
from rollbook.dashboard.run_files import RunReader, summarise
from rollbook.dashboard.run_metrics import RunSummary
from rollbook.dashboard.terminal import ProcessStatus, ProgressRenderer, open_view
from rollbook.ledger.serve import allow_many_connections
from rollbook.ledger.tools.audit import AuditReport
from rollbook.run.config.run import LoadedConfig, RunConfig, dump_toml, load_config, load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.record import open_run
from rollbook.run.supervision.resume import check_resume
from rollbook.run.supervision.supervisor import RunEnd, RunOutcome, Supervisor, require_posix
from rollbook.telemetry.events import EventLog

VIEW_TICK_S = 0.25
# A process of a small run opens about 60 files; connections of workers and environments come on top.
MIN_OPEN_FILES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """How a run ended."""

    directory: RunDirectory
    config: RunConfig
    outcome: RunOutcome
    audit: AuditReport | None
    """None when a failed run has no ledger that can be read."""
    summary: RunSummary
    plots: tuple[Path, ...]

    @property
    def exit_code(self) -> int:
        if self.outcome.end is RunEnd.INTERRUPTED:
            return 130
        return 0 if self.outcome.end is not RunEnd.FAILED and self.audit is not None and self.audit.ok else 1


def train(source: Path, *, run_dir: Path | None, overrides: Sequence[str], console: Console) -> TrainReport:
    """Train from a config file, or resume a run directory."""
    require_libraries("torch", "transformers")
    require_posix()
    require_open_files()
    loaded, directory = resolve_run(source, run_dir, overrides)
    directory.prepare()
    with directory.locked():
        is_resumed = write_or_check_config(loaded, directory, console)
        # Warnings go to the view and the log file; on stderr they would break the live view.
        log = EventLog("supervisor", directory.log_file("supervisor"), echo=io.StringIO())
        log.info("run.started", resumed=is_resumed)
        supervisor = Supervisor(loaded.config, directory, log=log, say=lambda text: console.print(f"[bold]{text}"))
        outcome = asyncio.run(_run_with_view(supervisor, loaded.config, directory, console))
        log.info("run.ended", how=outcome.end, message=outcome.message, seconds=round(outcome.seconds, 2))
        return _report(loaded.config, directory, outcome, log)


def require_open_files() -> None:
    """Raise the limit of open files, which the processes of the run inherit. Raises `UsageError` if it is too low."""
    limit = allow_many_connections()
    if limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES:
        raise UsageError(
            f"a process may open only {limit} files, but a run needs {MIN_OPEN_FILES}: raise the limit (ulimit -n {MIN_OPEN_FILES})"
        )


def resolve_run(source: Path, run_dir: Path | None, overrides: Sequence[str]) -> tuple[LoadedConfig, RunDirectory]:
    """The configuration and the directory of a run. `source` is a config file, or a run directory to resume."""
    if source.is_dir():
        directory = RunDirectory(source.resolve())
        home = Path(directory.read_manifest()["source_dir"])
        return load_config(directory.config_file, overrides, source_dir=home), directory
    loaded = load_config(source, overrides)
    chosen = run_dir or Path("runs") / f"{loaded.config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return loaded, RunDirectory(chosen.resolve())


def write_or_check_config(loaded: LoadedConfig, directory: RunDirectory, console: Console) -> bool:
    """Write config and manifest of a new run, or check that an existing run can be resumed. True: the run is resumed."""
    is_resumed = directory.exists
    if is_resumed:
        stored = load_resolved_config(directory.config_file, source_dir=loaded.source_dir).config
        changed = check_resume(stored, loaded.config, source=str(directory.path))
        console.print(f"resuming {directory.path}")
        for path, (old, new) in changed.items():
            console.print(f"  {path}: {old!r} → {new!r}")
    directory.config_file.write_text(dump_toml(loaded.config), encoding="utf-8")
    if not is_resumed:
        directory.write_manifest(name=loaded.config.run.name, source_dir=loaded.source_dir)
        console.print(f"run directory: {directory.path}")
    return is_resumed


async def _run_with_view(
    supervisor: Supervisor, config: RunConfig, directory: RunDirectory, console: Console
) -> RunOutcome:
    async with _view(supervisor, config, directory, console):
        return await supervisor.run()


@asynccontextmanager
async def _view(
    supervisor: Supervisor, config: RunConfig, directory: RunDirectory, console: Console
) -> AsyncIterator[None]:
    """The live view during the run. An error in the view is reported once and does not stop the run."""
    renderer = ProgressRenderer(
        title=config.run.name,
        total_steps=config.trainer.max_steps,
        max_head_offpolicy_versions=config.gate.max_head_offpolicy_versions,
    )
    with open_view(console, renderer) as update:
        reader = RunReader(directory.path)

        def show() -> None:
            lines = [
                ProcessStatus(
                    name=p.name, pid=p.pid, state=str(p.state), restarts=p.restarts, doing=p.doing, since_s=p.since_s
                )
                for p in supervisor.processes
            ]
            update(reader.poll(), lines)

        async def keep_showing() -> None:
            try:
                while True:
                    show()
                    await asyncio.sleep(VIEW_TICK_S)
            except Exception as error:
                console.print(f"[yellow]the live view stopped ({type(error).__name__}: {error}); the run continues")

        task = asyncio.create_task(keep_showing(), name="run.view")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            with contextlib.suppress(Exception):
                show()


def _report(config: RunConfig, directory: RunDirectory, outcome: RunOutcome, log: EventLog) -> TrainReport:
    report = _audit(directory, has_failed=outcome.end is RunEnd.FAILED)
    if report is None:
        return TrainReport(
            directory=directory, config=config, outcome=outcome, audit=None, summary=summarise(directory.path), plots=()
        )
    try:
        asyncio.run(Supervisor(config, directory, log=log).run_once("report"))
    except RunError as error:
        log.warning("run.plots_failed", cause=str(error))
    return TrainReport(
        directory=directory,
        config=config,
        outcome=outcome,
        audit=report,
        summary=summarise(directory.path),
        plots=tuple(sorted(directory.plots.glob("*.png"))),
    )


def _audit(directory: RunDirectory, *, has_failed: bool) -> AuditReport | None:
    try:
        with open_run(directory.path) as run:
            return run.audit()
    except RunError:
        # The ledger of a failed run may be missing or unreadable; that must not replace the cause of the failure.
        if has_failed:
            return None
        raise
