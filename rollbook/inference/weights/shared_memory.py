"""The memory file system of the host, where weights are stored for the processes of one machine."""

import os
from pathlib import Path

SHARED = Path("/dev/shm")
MIN_SHARED_BYTES = 2 * 2**30
"""Containers often have 64 MiB of shared memory, too little for weights; a directory is used there."""


def has_shared_memory() -> bool:
    """Whether weights can be expected to fit."""
    if not SHARED.is_dir():
        return False
    free = os.statvfs(SHARED)
    return free.f_bavail * free.f_frsize >= MIN_SHARED_BYTES
