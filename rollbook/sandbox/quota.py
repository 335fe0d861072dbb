"""The quota of a run: how many sandboxes its processes on this machine may have open at once, with how much memory and processes.

Sandboxes are opened in workers, reward processes and environment servers, so the quota is counted by locks on one file of the
machine: each unit of a resource is one byte, and an open sandbox holds the locks of its units. The kernel releases them with the
process that holds them, however it ends. Byte 0 is the turn: its holder takes units as they become free, and the others wait.
"""

import asyncio
import fcntl
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from rollbook.contracts.decoding import json_decoder
from rollbook.sandbox.config import SandboxConfig
from rollbook.sandbox.sandbox import Limits, SandboxError, SandboxUnavailableError

VARIABLE = "ROLLBOOK_SANDBOX_QUOTA"
"""Environment variable of the processes of a run: reward functions open sandboxes without knowing of the run."""
UNITS = {"at_once": 1, "memory_mb": 64, "processes": 16}
"""The size of one unit."""
POLL_S = 0.02


def quota_variable(config: SandboxConfig, file: Path) -> Mapping[str, str]:
    """The environment of processes to which the quota applies."""
    if not config.is_limited:
        return {}
    return {VARIABLE: msgspec.json.encode({**config.model_dump(), "file": str(file)}).decode()}


async def acquire(limits: Limits) -> int | None:
    """Wait until a sandbox with these limits fits into the quota. Returns a file descriptor whose end frees its place.

    None: this process has no quota. Raises `SandboxUnavailableError` if it can never fit, `SandboxError` after `wait_s`.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    settings = json_decoder(dict[str, int | float | str | None]).decode(text.encode())
    file = str(settings.pop("file"))
    config = SandboxConfig.model_validate(settings)
    ranges = [(0, 1, 1), *_ranges(config, limits)]
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        async with asyncio.timeout(config.wait_s):
            for first, total, needed in ranges:
                await _take(fd, range(first, first + total), needed)
        _set_lock(fd, fcntl.F_UNLCK, 0)
    except TimeoutError as error:
        os.close(fd)
        given = ", ".join(f"{name} = {getattr(config, name)}" for name in UNITS if getattr(config, name) is not None)
        raise SandboxError(f"no sandbox could be opened within {config.wait_s:g} s: the quota is {given}") from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _ranges(config: SandboxConfig, limits: Limits) -> Iterator[tuple[int, int, int]]:
    """For each limited resource: its first byte, its number of units, and how many of them a sandbox needs."""
    first = 1
    for name, size in UNITS.items():
        total = getattr(config, name)
        if total is None:
            continue
        what, wanted = {
            "at_once": ("at_once", 1),
            "memory_mb": ("memory_mb + disk_mb", limits.held_mb),
            "processes": ("processes", limits.processes),
        }[name]
        if wanted > total:
            raise SandboxUnavailableError(
                f"sandbox.{name} = {total} leaves no room for a sandbox with {what} = {wanted}: raise it, or lower the limit of "
                "the sandbox"
            )
        units = total // size
        yield first, units, min(units, -(-wanted // size))
        first += units


async def _take(fd: int, units: range, needed: int) -> None:
    """Lock some of the units, as they become free."""
    taken: list[int] = []
    while True:
        for unit in units:
            if len(taken) == needed:
                return
            if unit not in taken and _lock(fd, unit):
                taken.append(unit)
        if len(taken) < needed:
            await asyncio.sleep(POLL_S)


def _lock(fd: int, unit: int) -> bool:
    try:
        _set_lock(fd, fcntl.F_WRLCK, unit)
    except BlockingIOError:
        return False
    return True


def _set_lock(fd: int, kind: int, unit: int) -> None:
    # Locks of the open file, not of the process: two sandboxes of one process exclude each other too.
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, unit, 1, 0))
