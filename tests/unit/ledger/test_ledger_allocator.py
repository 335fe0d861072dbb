"""The allocator's settings are taken by the C library that knows them, in a process of its own."""

import platform
import subprocess
import sys

import pytest

from rollbook.ledger.http.malloc import keep_memory_for_bodies

WORK = """
from rollbook.ledger.http.malloc import keep_memory_for_bodies
assert keep_memory_for_bodies()
import threading
blocks = [bytes(300_000) for _ in range(50)]
threads = [threading.Thread(target=lambda: [bytes(n * 100_000) for n in range(200)]) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert all(block == bytes(300_000) for block in blocks)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library: nothing is changed there")
def test_a_service_runs_on_one_heap() -> None:
    subprocess.run([sys.executable, "-c", WORK], check=True, timeout=120)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert keep_memory_for_bodies() is False
