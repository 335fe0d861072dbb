"""A child ends with its parent, even when the parent is killed without a chance to say so."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CHILD = """
import signal, sys, time
from rollbook.concurrency.parent_watch import die_with_parent
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
die_with_parent(int(sys.argv[1]), grace_s=0.3)
print("watching", flush=True)
time.sleep(600)
"""

PARENT = """
import os, subprocess, sys, time
read_end, write_end = os.pipe()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(read_end), sys.argv[2]], pass_fds=[read_end],
                         stdout=subprocess.PIPE)
os.close(read_end)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def start_family(child_kind: str) -> tuple["subprocess.Popen[str]", psutil.Process]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, child_kind],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


@pytest.mark.parametrize("child_kind", ["polite", "deaf"])
def test_a_child_is_gone_soon_after_its_parent_was_killed(child_kind: str) -> None:
    parent, child = start_family(child_kind)
    with parent:
        assert child.is_running()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(timeout=10)
        gone, alive = psutil.wait_procs([child], timeout=20)
        # A zombie whose reaper has not come yet is dead too.
        assert gone or all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_a_child_stays_while_its_parent_lives() -> None:
    parent, child = start_family("polite")
    with parent:
        time.sleep(0.5)
        assert child.is_running()
        assert child.status() != psutil.STATUS_ZOMBIE
        parent.kill()
        parent.wait(timeout=10)
        psutil.wait_procs([child], timeout=20)
