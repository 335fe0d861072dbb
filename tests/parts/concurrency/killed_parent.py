"""A process that is killed, for tests that its children end with it."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

REPOSITORY = str(Path(__file__).parents[3])


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
