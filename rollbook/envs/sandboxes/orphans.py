"""Sweep what a killed server left on this machine: sandbox processes and directories whose owner no longer lives.

Children watch their parent and end by themselves; this is the second net, for children that were stopped or stuck when it
happened. Only what carries our mark and names a dead owner is touched. Where there is no /proc, only directories are swept.
"""

import contextlib
import os
import re
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rollbook.envs.sandboxes.process import DIRECTORY_PREFIX, owner_mark

OWNER_ARGUMENT = re.compile(r"--owner=(\d+-\d+)$")
DIRECTORY = re.compile(re.escape(DIRECTORY_PREFIX) + r"(\d+-\d+)-")
# The modules that `Child.start` runs live under this name; nothing else on a machine carries it together with an owner.
MODULE_PREFIX = "rollbook.envs."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What was found and removed."""

    processes: int
    directories: int


def owner_lives(mark: str) -> bool:
    """Is the process with this mark still there, and still the same one?"""
    pid = int(mark.partition("-")[0])
    if mark.endswith("-0"):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    return owner_mark(pid) == mark


def orphaned_processes(proc: Path = Path("/proc")) -> list[int]:
    """Sandbox processes whose owner is dead."""
    found = []
    for entry in proc.glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().decode("utf-8", errors="replace").rstrip("\0").split("\0")
        except OSError:
            continue
        mark = OWNER_ARGUMENT.fullmatch(arguments[-1])
        if mark and any(argument.startswith(MODULE_PREFIX) for argument in arguments) and not owner_lives(mark[1]):
            found.append(int(entry.name))
    return sorted(found)


def sweep_orphans() -> Sweep:
    """Kill orphaned sandbox processes and remove orphaned directories. Safe beside other pools that live."""
    processes = orphaned_processes()
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    directories = [
        path
        for path in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*")
        if (mark := DIRECTORY.match(path.name)) and not owner_lives(mark[1])
    ]
    for path in directories:
        shutil.rmtree(path, ignore_errors=True)
    return Sweep(processes=len(processes), directories=len(directories))
