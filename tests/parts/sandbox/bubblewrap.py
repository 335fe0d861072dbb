"""bubblewrap for tests: installed if it is missing, otherwise the tests that need it are skipped with the reason. podman and
Docker are tested where they run."""

import os
import shutil
import subprocess
from functools import cache

import pytest

from rollbook.concurrency.blocking import run_blocking
from rollbook.sandbox.bubblewrap import Kind, open_sandbox
from rollbook.sandbox.sandbox import SandboxUnavailableError

INSTALL_S = 300
FORK_BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.001)  # the kernel refuses more to an ordinary user
"""


def require_bubblewrap() -> None:
    """Skip the test if no sandbox can run here."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)


CONTAINERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("podman", "docker")]


def require(kind: Kind) -> None:
    """Skip the test with the reason if no container of this engine can start here."""
    reason = None if kind in ("bubblewrap", "none") else _why_no(kind)
    if reason is not None:
        pytest.skip(reason)


@cache
def _why_no(kind: Kind) -> str | None:
    try:
        run_blocking(_start_one(kind))
    except SandboxUnavailableError as error:
        return str(error)
    return None


@cache
def _why_not() -> str | None:
    if shutil.which("bwrap") is None and os.getuid() == 0 and shutil.which("apt-get") is not None:
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", "bubblewrap"]):
            subprocess.run(
                ["apt-get", "-qq", *arguments],
                check=False,
                timeout=INSTALL_S,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )
    return _why_no("bubblewrap")


async def _start_one(kind: Kind) -> None:
    async with open_sandbox(kind=kind):
        pass
