"""bubblewrap for tests: installed if it is missing, otherwise the tests that need it are skipped with the reason. podman is tested
where it is installed."""

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


def require_podman() -> None:
    """Skip the test if podman cannot start a container here."""
    try:
        run_blocking(_start_one("podman"))
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


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
    try:
        run_blocking(_start_one("bubblewrap"))
    except SandboxUnavailableError as error:
        return str(error)
    return None


async def _start_one(kind: Kind) -> None:
    async with open_sandbox(kind=kind):
        pass
