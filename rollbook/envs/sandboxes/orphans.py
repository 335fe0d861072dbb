"""Removes what a killed server left on this machine: sandbox processes and directories whose owner is dead.

Sandbox processes end with their parent. This is the second safeguard, for processes that were stopped or stuck at that moment. Only
processes and directories that name a dead owner are touched. Without /proc, only directories are removed.
"""

import contextlib
import os
import re
import shutil
import signal
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rollbook.envs.sandboxes.process import DIRECTORY_PREFIX, owner_mark

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
