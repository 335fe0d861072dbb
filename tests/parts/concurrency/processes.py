"""Child processes as a test sees them from outside."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

REPOSITORY = str(Path(__file__).parents[3])


def descendants_running(module: str, *, of: int | None = None) -> list[psutil.Process]:
    """Living processes below this one, or below the process `of`, that run a module. Processes that end meanwhile are left out."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(of).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if module in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def require_end(processes: Iterable[psutil.Process], *, within_s: float) -> None:
    """Wait until these processes have ended. In a container they may stay as zombies."""
    until = time.monotonic() + within_s
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < until, f"{process} is alive after {within_s:g} s"
                time.sleep(0.02)


def require_end_of_child(program: str) -> None:
    """Run a program that prints the pid of its child, and kill it: the child ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": REPOSITORY},
    )
    assert process.stdout is not None
    with process, process.stdout:
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
    child.wait(timeout=60)
