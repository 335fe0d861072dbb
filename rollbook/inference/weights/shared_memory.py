"""The memory file system of the host, where weights are stored for the processes of one machine.

A directory belongs to the processes that hold a lock on its file `LOCK_FILE`. Locks end with their processes, so the directory of a
killed run can be recognised and removed. Otherwise it would occupy memory until the machine is restarted.
"""

import fcntl
import os
import shutil
import stat
import time
from pathlib import Path
from typing import IO

SHARED = Path("/dev/shm")
MIN_SHARED_BYTES = 2 * 2**30
"""Containers often have 64 MiB of shared memory, too little for weights; a directory is used there."""
LOCK_FILE = "users.lock"
ABANDONED_S = 3600.0
"""A directory that changed later is kept: its first user may not have locked it yet."""


def has_shared_memory() -> bool:
    """Whether weights can be expected to fit."""
    if not SHARED.is_dir():
        return False
    free = os.statvfs(SHARED)
    return free.f_bavail * free.f_frsize >= MIN_SHARED_BYTES


def directory_name(key: str) -> str:
    return f"rollbook-{os.getuid()}-{key}"


def has_locked(file: IO[str], kind: int) -> bool:
    """Take a lock if no other process holds it. `kind`: `fcntl.LOCK_SH` or `LOCK_EX`."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(file: IO[str], path: Path) -> bool:
    """Whether the open file is the one at `path`. Another process may have removed or replaced it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def remove_abandoned(parent: Path) -> None:
    """Remove this user's directories of weights that no process uses."""
    for directory in parent.glob(directory_name("*")):
        try:
            status = os.lstat(directory)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                continue  # not made by us
            if time.time() - status.st_mtime < ABANDONED_S:
                continue
            with (directory / LOCK_FILE).open("w") as lock:
                if has_locked(lock, fcntl.LOCK_EX):
                    shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # another process removes it at the same time
            continue
