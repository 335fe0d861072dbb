"""Directories that only this user may use, at places where other users could have created them first."""

import os
import stat
from pathlib import Path

from rollbook.contracts.errors import RunError


def make_private_directory(path: Path) -> None:
    """Create a directory with mode 0700, or check that an existing one belongs to this user and is open to no other.

    A directory with a predictable name in a place such as /dev/shm may exist already: made by another user who wants to read or
    replace what is written there, or a symbolic link to a directory of ours. Both are refused.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise RunError(f"the directory {path} cannot be created: {error.strerror or error}") from error
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise RunError(f"{path} is not a directory (symbolic links are refused); remove it")
    if status.st_uid != os.geteuid():
        raise RunError(f"the directory {path} belongs to another user (uid {status.st_uid}); remove it")
    if status.st_mode & 0o077:
        raise RunError(f"other users can use the directory {path}; remove it, or run: chmod 700 {path}")
