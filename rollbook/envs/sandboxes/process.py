"""The child processes of a sandbox: own process group, private directory, bare environment.

The command line of such a process names its owner, and so does the name of its directory. A later start on the same machine
recognises what a killed owner left behind: `sweep_orphans` removes processes and directories whose owner is dead. Sandbox processes
end with their parent; the sweep is the second safeguard, for processes that were stopped or stuck at that moment. Only processes
and directories that name a dead owner are touched. Without /proc, only directories are removed.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.concurrency.child_process.process import PACKAGE_ROOT, ChildProcess, ChildSpec
from rollbook.envs.sandboxes.confinement import is_of_packages
from rollbook.envs.sandboxes.sandbox import SandboxStartError

DIRECTORY_PREFIX = "rollbook-sandbox-"
# What a sandbox process gets of our environment: enough to start Python, and no secrets.
INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT", "COVERAGE_PROCESS_START")


def owner_mark(pid: int) -> str:
    """`pid-starttime`: identifies a process even after its pid was reused. The start time is 0 on systems without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{pid}-0"
    return f"{pid}-{stat.rpartition(')')[2].split()[19]}"


def private_directory(name: str) -> Path:
    """A new directory that only this user can enter, named after its owner."""
    return Path(tempfile.mkdtemp(prefix=f"{DIRECTORY_PREFIX}{owner_mark(os.getpid())}-{name}-")).resolve()


def remove_directory(directory: Path) -> None:
    """Remove a private directory, if it exists."""
    shutil.rmtree(directory, ignore_errors=True)


async def start_sandbox_process(
    module: str,
    *,
    settings: Mapping[str, Any],
    directory: Path,
    environment: Mapping[str, str],
    inherited_fds: Sequence[int] = (),
) -> ChildProcess:
    """Start a module with JSON settings. Its output is in `output.txt` of the directory. Raises `SandboxStartError`."""
    inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    # Packages may be installed in a folder that only PYTHONPATH names.
    packages = filter(is_of_packages, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    spec = ChildSpec(
        module=module,
        arguments=(json.dumps({**settings, "directory": str(directory)}), f"--owner={owner_mark(os.getpid())}"),
        environment={
            **inherited,
            "PYTHONPATH": os.pathsep.join([PACKAGE_ROOT, *packages]),
            "HOME": str(directory),
            "TMPDIR": str(directory),
            **environment,
        },
        directory=directory,
        inherited_fds=inherited_fds,
        has_own_group=True,
        output=directory / "output.txt",
    )
    try:
        return await ChildProcess.start(spec)
    except OSError as error:
        raise SandboxStartError(f"{module} could not be started: {error}") from error


OWNER_ARGUMENT = re.compile(r"--owner=(\d+-\d+)$")
DIRECTORY = re.compile(re.escape(DIRECTORY_PREFIX) + r"(\d+-\d+)-")
# All modules that `start_sandbox_process` runs; no other program has such an argument together with an owner.
MODULE_PREFIX = "rollbook.envs."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """How much was removed."""

    processes: int
    directories: int


def is_owner_alive(mark: str) -> bool:
    pid = int(mark.partition("-")[0])
    if not mark.endswith("-0"):
        return owner_mark(pid) == mark
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def orphaned_processes(proc: Path = Path("/proc")) -> list[int]:
    """Sandbox processes whose owner is dead."""
    found = []
    for entry in proc.glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().decode("utf-8", errors="replace").rstrip("\0").split("\0")
        except OSError:
            continue
        mark = OWNER_ARGUMENT.fullmatch(arguments[-1])
        if mark and any(argument.startswith(MODULE_PREFIX) for argument in arguments) and not is_owner_alive(mark[1]):
            found.append(int(entry.name))
    return sorted(found)


def _is_ours(path: Path) -> bool:
    """Other users can create such a name in the temporary directory too."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def sweep_orphans() -> Sweep:
    """Kill orphaned sandbox processes and remove orphaned directories. Does not touch those of other living pools."""
    processes = orphaned_processes()
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    directories = [
        path
        for path in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*")
        if (mark := DIRECTORY.match(path.name)) and not is_owner_alive(mark[1]) and _is_ours(path)
    ]
    for path in directories:
        shutil.rmtree(path, ignore_errors=True)
    return Sweep(processes=len(processes), directories=len(directories))
