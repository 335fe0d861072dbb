"""The pre-flight of a run: finds in a few seconds what would otherwise stop the run after a minute.

Files and names are checked here; the user's code runs once in a child process, so that it can neither block nor change this one.
"""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from rollbook.concurrency.child_process.process import python_command, python_environment
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import require_libraries
from rollbook.contracts.user_errors import indented
from rollbook.run.config.run import ConfigError, ConfigFault, LoadedConfig, located, name_of
from rollbook.run.directory import RunDirectory

LIMIT_S = 20.0
"""After this time the pre-flight ends without a fault: tasks that load slowly are not wrong."""
AGENT_LIMIT_S = 90.0
"""The same for a coding agent, which starts a program and an image."""
SHOWN_OUTPUT_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport:
    faults: tuple[ConfigFault, ...]
    warnings: tuple[ConfigFault, ...]
    seconds: float


def check_run(
    loaded: LoadedConfig, overrides: Sequence[str], *, directory: RunDirectory | None = None
) -> PreflightReport:
    """Check everything that can be known before the run. Raises `ConfigError` with all faults."""
    found = run_preflight(loaded)
    faults = list(found.faults)
    if directory is not None and (fault := directory.fault(source_dir=loaded.source_dir)) is not None:
        faults.append(ConfigFault("--run-dir", fault))
    if faults:
        raise ConfigError(name_of(loaded.file), located(faults, loaded.file, overrides))
    return PreflightReport(
        faults=(), warnings=tuple(located(found.warnings, loaded.file, overrides)), seconds=round(found.seconds, 1)
    )


def print_warnings(warnings: Sequence[ConfigFault], console: Console) -> None:
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)


def print_preflight(found: PreflightReport, console: Console) -> None:
    print_warnings(found.warnings, console)
    console.print(f"pre-flight: ok ({found.seconds:.1f} s)", markup=False)


def run_preflight(loaded: LoadedConfig) -> PreflightReport:
    began = time.monotonic()
    try:
        require_libraries("tokenizers", "jinja2")
    except RunError as error:
        skipped = ConfigFault("rollout", f"{error}; without it the pre-flight is skipped")
        return PreflightReport(faults=(), warnings=(skipped,), seconds=0.0)
    process = subprocess.Popen(
        python_command("rollbook.run.preflight.checks"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=python_environment(),
        # The user's code may start processes: all are ended with it.
        start_new_session=True,
    )
    is_late = False
    limit_s = AGENT_LIMIT_S if loaded.config.coding_agent else LIMIT_S
    try:
        out, err = process.communicate(pickle.dumps(loaded), timeout=limit_s)
    except subprocess.TimeoutExpired:
        is_late = True
        _kill(process)
        out, err = process.communicate()
    except BaseException:
        _kill(process)
        process.communicate()
        raise
    faults: list[ConfigFault] = []
    warnings: list[ConfigFault] = []
    doing, is_done = ("run", "starting"), False
    for line in out.splitlines():
        match json.loads(line):
            case {"fault": [str(path), str(message)]}:
                faults.append(ConfigFault(path, message))
            case {"warning": [str(path), str(message)]}:
                warnings.append(ConfigFault(path, message))
            case {"doing": [str(path), str(what)]}:
                doing = (path, what)
            case {"done": True}:
                is_done = True
    path, what = doing
    if is_late:
        warnings.append(ConfigFault(path, f"{what} took longer than {limit_s:g} s; the rest was not checked"))
    elif not is_done:
        output = indented("\n".join(err.decode(errors="replace").splitlines()[-SHOWN_OUTPUT_LINES:]))
        faults.append(ConfigFault(path, f"{what} ended the process with exit code {process.returncode}:\n{output}"))
    return PreflightReport(faults=tuple(faults), warnings=tuple(warnings), seconds=time.monotonic() - began)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
