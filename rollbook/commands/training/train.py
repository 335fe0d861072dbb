"""`rollbook.train` and `rollbook train`: start a run, or resume a run directory.

Locks the directory, runs the supervisor under a live view, then audits the ledger, draws the plots and returns a report.
"""

import asyncio
import contextlib
import dataclasses
import io
import resource
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from rollbook.access.tokens import read_or_create_token
from rollbook.commands.output import result_json, stderr_console
from rollbook.commands.training.train_summary import EXIT_FAILED, TrainReport, print_summary, summary_row
from rollbook.concurrency.blocking import run_blocking
from rollbook.concurrency.child_process.template import EarlyTemplate
from rollbook.contracts.admission import AuditReport
from rollbook.contracts.errors import RunError, UsageError
from rollbook.contracts.plugin import load_on_demand, require_libraries
from rollbook.dashboard.run_files import RunReader, summarise
from rollbook.dashboard.terminal import ProcessStatus, ProgressRenderer, open_view, printable
from rollbook.ledger.serve import allow_many_connections
from rollbook.run.config.run import (
    ConfigError,
    LoadedConfig,
    RunConfig,
    checked_config,
    dump_toml,
    load_resolved_config,
    located,
    name_of,
    override_table,
)
from rollbook.run.config.source import ConfigSource, TaskRows, check_resume, place, read_source, with_references
from rollbook.run.directory import RunDirectory, write_atomically
from rollbook.run.preflight.report import check_run, print_preflight
from rollbook.run.reader import StoredEpisodes, audit, open_run
from rollbook.run.resources.automatic import free_disk_bytes, resolve
from rollbook.run.resources.machine import this_machine
from rollbook.run.supervision.exits import EXIT_DONE
from rollbook.run.supervision.host import ProcessStart
from rollbook.run.supervision.plan import open_dashboard_socket, template_of
from rollbook.run.supervision.process import ProcessState, SupervisedProcess
from rollbook.run.supervision.supervisor import RunEnd, RunOutcome, Supervisor, require_posix
from rollbook.run.user_modules import copy_modules
from rollbook.run.user_objects import user_search_path
from rollbook.telemetry.events import EventLog

VIEW_TICK_S = 0.25
AUDIT_EVERY_S = 60.0
# A process of a small run opens about 60 files; connections of workers and environments come on top.
MAX_COUNTED = 50_000
"""Groups whose episodes are counted at the end of a run: a second or two."""
MIN_OPEN_FILES = 256


class RunFailedError(RunError):
    """The run failed, or its audit found a violation. `report` has everything that is known about it."""

    def __init__(self, report: TrainReport) -> None:
        self.report = report
        super().__init__(
            report.outcome.message if report.outcome.end is RunEnd.FAILED else "the audit found violations"
        )


def train(
    config: ConfigSource,
    *,
    rollout: Callable[..., Any] | str | None = None,
    environment: type | str | None = None,
    tasks: TaskRows | Callable[..., Iterable[Mapping[str, Any]]] | str | Path | None = None,
    rewards: Callable[..., Any] | Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any] | str] | None = None,
    loss: Callable[..., Any] | str | None = None,
    advantage: Callable[..., Any] | str | None = None,
    run_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    console: Console | None = None,
    preflight: bool = True,
    dashboard: bool = False,
    allow_actions: bool = False,
) -> TrainReport:
    """Train to the end, or until Ctrl-C, and return the report. Works in scripts, tests and notebooks.

    `config` is the path of a TOML file, a run directory to resume, a dict with the same sections, or a `RunConfig`. The other
    arguments replace single settings of it, with objects instead of names:

    - `rollout`: an async function of a row, or of a row and the `RolloutSetup`; or `make_rollout(setup)`, which returns one. For
      `rollout.function`.
    - `environment`: a class with `reset`, `step` and `close`, for `env.name`.
    - `tasks`: rows, or a function that yields rows, for `tasks.source`.
    - `rewards`: one reward function, several, or a dict of them by name, for `rollout.rewards.functions`.
    - `loss`: a loss function or the name of a built-in one, for `trainer.loss`.
    - `advantage`: the same for `trainer.advantage`.

    In a dict, functions and classes may take the place of any `module:attribute`. Objects that other processes can import are
    passed by name. Others are pickled into the run directory, so that `rollbook train RUN_DIR` resumes the run without the script.

    `run_dir` is created; an existing one is resumed. `overrides` are like `--set`: `"trainer.max_steps=10"`. Progress and the
    summary are printed to `console`, by default stderr. `preflight` runs the user's code once before anything starts. `dashboard`
    serves the run's page in a separate process until the run ends, and prints its address. With `allow_actions`, those who have the
    printed token can act on the run there. Raises `ConfigError` before anything
    starts, and `RunFailedError` if the run fails.
    """
    given = {
        "rollout.function": rollout,
        "env.name": environment,
        "tasks.source": tasks,
        **{f"rollout.rewards.functions.{name}.path": function for name, function in _named(rewards)},
        "trainer.loss": loss,
        "trainer.advantage": advantage,
    }
    return _checked_and_trained(
        config,
        given=given,
        run_dir=run_dir,
        overrides=overrides,
        console=console or Console(stderr=True, highlight=False),
        preflight=preflight,
        dashboard=dashboard,
        allow_actions=allow_actions,
        began=time.monotonic(),
    )


def train_in_terminal(
    config: Path,
    *,
    run_dir: Path | None,
    overrides: Sequence[str],
    preflight: bool,
    dashboard: bool,
    allow_actions: bool,
    as_json: bool,
    began: float,
    early: EarlyTemplate | None,
) -> int:
    """Train and print the result. Returns the exit code. `early`: see `template_of`."""
    try:
        report = _checked_and_trained(
            config,
            given={},
            run_dir=run_dir,
            overrides=overrides,
            console=stderr_console(),
            preflight=preflight,
            dashboard=dashboard,
            allow_actions=allow_actions,
            began=began,
            early=early,
        )
    except RunFailedError as error:
        report = error.report
    if as_json:
        result_json(summary_row(report))
    return report.exit_code


def _checked_and_trained(
    config: ConfigSource,
    *,
    given: Mapping[str, Any],
    run_dir: str | Path | None,
    overrides: Sequence[str],
    console: Console,
    preflight: bool,
    dashboard: bool,
    allow_actions: bool,
    began: float,
    early: EarlyTemplate | None = None,
) -> TrainReport:
    require_libraries("torch", "transformers")
    require_posix()
    require_open_files()
    # An error of the clean-up would hide that of the run.
    with TemporaryDirectory(prefix="rollbook-objects-", ignore_cleanup_errors=True) as staging:
        loaded, directory = resolve_run(config, run_dir, overrides, given=given, staging=Path(staging))
        loaded = fitted_run(loaded, directory, overrides, console)
        with template_of(loaded.config, early) as template:
            if preflight:
                print_preflight(check_run(loaded, overrides, directory=directory), console)
            directory.prepare()
            with directory.locked():
                if any(Path(staging).iterdir()):
                    shutil.copytree(staging, directory.objects, dirs_exist_ok=True)
                if allow_actions:
                    read_or_create_token(directory.operator_token_file)
                else:
                    directory.operator_token_file.unlink(missing_ok=True)
                moved = loaded.moved(staging, directory.objects)
                report = _train(moved, directory, console, has_dashboard=dashboard, began=began, early=template)
    print_summary(report, console)
    if report.exit_code == EXIT_FAILED:
        raise RunFailedError(report)
    return report


def require_open_files() -> None:
    """Raise the limit of open files, which the processes of the run inherit. Raises `UsageError` if it is too low."""
    limit = allow_many_connections()
    if limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES:
        raise UsageError(
            f"a process may open only {limit} files, but a run needs {MIN_OPEN_FILES}: raise the limit (ulimit -n {MIN_OPEN_FILES})"
        )


def resolve_run(
    config: ConfigSource,
    run_dir: str | Path | None,
    overrides: Sequence[str],
    *,
    given: Mapping[str, Any] | None = None,
    staging: Path | None = None,
) -> tuple[LoadedConfig, RunDirectory]:
    """The configuration and the directory of a run. Objects that are passed by value are written to `staging`."""
    read = read_source(config)
    for path, value in (given or {}).items():
        if value is not None:
            place(read.table, path, value)
    faults = [fault for text in overrides if (fault := override_table(read.table, text)) is not None]
    table = read.table if staging is None else with_references(read.table, staging)
    objects = [] if staging is None or not any(staging.iterdir()) else [staging]
    search_path = [*read.search_path, *user_search_path(), *objects]
    loaded = checked_config(
        table, faults, overrides, file=read.file, source_dir=read.source_dir, search_path=search_path
    )
    chosen = run_dir or read.run_dir or Path("runs") / f"{loaded.config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return loaded, RunDirectory(Path(chosen).resolve())


def fitted_run(
    loaded: LoadedConfig, directory: RunDirectory, overrides: Sequence[str], console: Console
) -> LoadedConfig:
    """Choose the open settings for this machine and print them. Raises `ConfigError` if the run does not fit.

    A run that is resumed keeps what was chosen when it began.
    """
    recorded = load_resolved_config(directory).config if directory.exists else None
    free_bytes = free_disk_bytes(directory.path)
    # The checkpoints of a run that is resumed are replaced by its next ones.
    kept_bytes = directory.checkpoint_bytes(loaded.config.trainer.keep_checkpoints)
    disk_bytes = None if free_bytes is None else free_bytes + kept_bytes
    found = resolve(loaded, this_machine(), recorded=recorded, disk_bytes=disk_bytes)
    if faults := found.faults():
        raise ConfigError(name_of(loaded.file), located(faults, loaded.file, overrides))
    for line in found.lines():
        console.print(line, markup=False, soft_wrap=True)
    return found.loaded


def _named(rewards: Any) -> Iterable[tuple[str, Any]]:
    if rewards is None:
        return []
    if isinstance(rewards, Mapping):
        return rewards.items()
    functions = rewards if isinstance(rewards, Sequence) else [rewards]
    return [(getattr(function, "__name__", type(function).__name__), function) for function in functions]


def _train(
    loaded: LoadedConfig,
    directory: RunDirectory,
    console: Console,
    *,
    has_dashboard: bool,
    began: float,
    early: EarlyTemplate | None,
) -> TrainReport:
    is_resumed = write_or_check_config(loaded, directory, console)
    steps_before = summarise(directory.path).steps
    # Warnings go to the view and the log file; on stderr they would break the live view.
    with closing(EventLog("supervisor", directory.log_file("supervisor"), echo=io.StringIO())) as log:
        log.info("run.started", resumed=is_resumed)
        options: dict[str, Any] = {}
        if (ray := loaded.config.cluster.ray).address is not None:
            options["open_host"] = partial(
                load_on_demand("rollbook.run.supervision.ray_host:open_ray_host"), ray, log=log
            )
        supervisor = Supervisor(
            loaded.config,
            directory,
            log=log,
            say=lambda text: console.print(printable(text), style="bold", markup=False, soft_wrap=True),
            dashboard=open_dashboard_socket("127.0.0.1", None) if has_dashboard else None,
            began=began,
            early=early,
            **options,
        )
        if has_dashboard:
            console.print(f"dashboard: {supervisor.addresses['dashboard']}")
            if directory.operator_token_file.exists():
                text = f"operators act on the run with the token in {directory.operator_token_file}"
                console.print(text, markup=False, soft_wrap=True)
        outcome = run_blocking(
            _run_with_view(supervisor, loaded.config, directory, console, log), on_interrupt=supervisor.interrupt
        )
        log.info("run.ended", how=outcome.end, message=outcome.message, seconds=round(outcome.seconds, 2))
        # It reads the groups since the last audit, and all of them if there was none.
        console.print("auditing the ledger")
        return dataclasses.replace(_report(loaded.config, directory, outcome, log), steps_before=steps_before)


def write_or_check_config(loaded: LoadedConfig, directory: RunDirectory, console: Console) -> bool:
    """Write config and manifest of a new run, or check that an existing run can be resumed. True: the run is resumed."""
    is_resumed = directory.exists
    if is_resumed:
        changed = check_resume(load_resolved_config(directory).config, loaded.config, source=str(directory.path))
        console.print(f"resuming {directory.path}", markup=False, soft_wrap=True)
        for path, (old, new) in changed.items():
            console.print(f"  {path}: {old!r} → {new!r}", markup=False, soft_wrap=True)
        directory.record_resume(changed)
    write_atomically(directory.config_file, dump_toml(loaded.config))
    directory.write_manifest(name=loaded.config.run.name, source_dir=loaded.source_dir, search_path=loaded.search_path)
    copy_modules(loaded, directory)
    if not is_resumed:
        console.print(f"run directory: {directory.path}", markup=False, soft_wrap=True)
    return is_resumed


async def _run_with_view(
    supervisor: Supervisor, config: RunConfig, directory: RunDirectory, console: Console, log: EventLog
) -> RunOutcome:
    def has_begun() -> bool:
        # The trainer waits for the ledger.
        return any(p.role == "trainer" and p.state is not ProcessState.WAITING for p in supervisor.processes)

    async with _view(supervisor, config, directory, console), audits(directory, log, has_begun=has_begun):
        return await supervisor.run()


@asynccontextmanager
async def audits(
    directory: RunDirectory, log: EventLog, *, has_begun: Callable[[], bool], every_s: float = AUDIT_EVERY_S
) -> AsyncIterator[None]:
    """Audit the run while it lasts. Each audit reads what changed since the last one, so the one at the end has little to read.

    `has_begun`: whether the run is in the ledger. Before that there is nothing to audit.
    """

    async def keep_auditing() -> None:
        while True:
            await asyncio.sleep(every_s)
            if not has_begun():
                continue
            try:
                report = await asyncio.to_thread(audit, directory.path)
            except Exception as error:
                # The ledger may be restarting, and no error here may stop the run. The audit at the end decides.
                log.info("run.audit_failed", cause=f"{type(error).__name__}: {error}")
                continue
            log.info("run.audited", groups=report.opened, known=report.known)
            for violation in report.violations:
                log.warning("run.audit_violated", violation=violation)

    task = asyncio.create_task(keep_auditing(), name="run.audits")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def _view(
    supervisor: Supervisor, config: RunConfig, directory: RunDirectory, console: Console
) -> AsyncIterator[None]:
    """The live view during the run. An error in the view is reported once and does not stop the run."""
    renderer = ProgressRenderer(
        title=config.run.name,
        total_steps=config.trainer.max_steps,
        max_head_offpolicy_versions=config.gate.max_head_offpolicy_versions,
        has_evaluation=config.evaluation.every_steps is not None,
    )
    with open_view(console, renderer) as update:
        reader = RunReader(directory.path)

        def show() -> None:
            lines = [
                ProcessStatus(
                    name=p.name,
                    pid=p.pid,
                    state=str(p.state),
                    restarts=p.restarts,
                    doing=p.doing,
                    since_s=p.since_s,
                    problems=tuple(f"waits for {awaited}: {cause}" for awaited, cause in p.problems.items()),
                )
                for p in supervisor.shown
            ]
            started = {line.name for line in lines}
            lines += [
                ProcessStatus(name=member.name, pid=None, state="running", doing=f"on {member.node}")
                for member in supervisor.members
                if member.name not in started
            ]
            update(reader.poll(), lines)

        async def keep_showing() -> None:
            try:
                while True:
                    show()
                    await asyncio.sleep(VIEW_TICK_S)
            except Exception as error:
                text = f"the live view stopped ({type(error).__name__}: {error}); the run continues"
                console.print(text, style="yellow", markup=False, soft_wrap=True)

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
    checked, summary = audit_at_end(directory, outcome.end), summarise(directory.path)
    if checked is not None and summary.steps:
        plot_run(directory, log)
    return TrainReport(
        directory=directory,
        config=config,
        outcome=outcome,
        audit=checked,
        summary=summary,
        plots=tuple(sorted(directory.plots.glob("*.png"))),
        stored=_stored_episodes(directory, checked),
    )


def plot_run(directory: RunDirectory, log: EventLog) -> None:
    """In a separate process. A failure is an event of the log; it does not change the result of the run."""
    process = SupervisedProcess(ProcessStart(name="report", role="report", directory=directory))
    try:
        if (code := run_blocking(process.run())) == EXIT_DONE:
            return
        cause = process.fault or f"exit code {code}:\n{process.last_output()}"
    except OSError as error:
        cause = str(error)
    log.warning("run.plots_failed", cause=cause)


def _stored_episodes(directory: RunDirectory, checked: AuditReport | None) -> StoredEpisodes | None:
    if checked is None or checked.opened > MAX_COUNTED:
        return None
    try:
        with open_run(directory.path) as run:
            return run.episodes()
    except RunError:
        return None


def audit_at_end(directory: RunDirectory, end: RunEnd) -> AuditReport | None:
    try:
        return audit(directory.path)
    except (RunError, OSError):
        # The ledger of a failed run may be missing or unreadable; that must not replace the cause of the failure.
        if end is RunEnd.FAILED:
            return None
        # Stopped before the ledger was created.
        if end is not RunEnd.FINISHED and not any(directory.ledger.iterdir()):
            return None
        raise
