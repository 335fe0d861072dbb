"""A thread pool whose threads do not delay the end of the process."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, wait

import pytest

from rollbook.concurrency.blocking import DaemonThreads


def test_calls_run_concurrently_up_to_the_limit() -> None:
    threads, lock = DaemonThreads(3, name="test"), threading.Lock()
    running = most = 0
    barrier = threading.Barrier(3)

    def call() -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait(10)
        with lock:
            running -= 1
        return threading.current_thread().name

    names = {future.result(10) for future in [threads.submit(call) for _ in range(30)]}
    threads.shutdown()
    assert most == 3
    assert names == {"test-1", "test-2", "test-3"}


def test_sequential_calls_reuse_idle_threads() -> None:
    threads = DaemonThreads(100, name="test")
    used = {threads.submit(lambda: threading.current_thread().name).result(10) for _ in range(100)}
    threads.shutdown()
    # A thread may not be idle yet when the next call comes, so there can be more than one, but far fewer than calls.
    assert len(used) < 50


def test_errors_belong_to_the_caller_and_cancelled_calls_never_run() -> None:
    threads, gate = DaemonThreads(1, name="test"), threading.Event()
    ran: list[int] = []
    blocked = threads.submit(gate.wait, 10)
    failing = threads.submit(lambda: 1 / 0)
    cancelled = threads.submit(lambda: ran.append(1))
    assert cancelled.cancel()
    gate.set()
    wait([blocked], 10)
    with pytest.raises(ZeroDivisionError):
        failing.result(10)
    threads.shutdown(cancel_futures=True)
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(int)
    assert ran == []


async def test_an_environment_that_raises_stop_iteration_does_not_block_its_caller() -> None:
    threads = DaemonThreads(1, name="test")
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.get_running_loop().run_in_executor(threads, next, iter(()))
    threads.shutdown()


def test_shutdown_cancels_waiting_calls_on_request() -> None:
    threads, gate = DaemonThreads(1, name="test"), threading.Event()
    blocked, waiting = threads.submit(gate.wait, 10), threads.submit(int)
    threads.shutdown(cancel_futures=True)
    gate.set()
    assert blocked.result(10) is True
    with pytest.raises(CancelledError):
        waiting.result(10)


def test_shutdown_does_not_wait_for_a_call_that_a_thread_has_just_taken() -> None:
    code = (
        "import sys\n"
        "from rollbook.concurrency.blocking import DaemonThreads\n"
        "sys.setswitchinterval(1e-7)\n"
        "for _ in range(1000):\n"
        "    threads = DaemonThreads(4, name='race')\n"
        "    for _ in range(20):\n"
        "        threads.submit(int)\n"
        "    threads.shutdown(cancel_futures=True)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_a_call_that_never_returns_does_not_keep_the_process_alive() -> None:
    code = (
        "import threading\n"
        "from rollbook.concurrency.blocking import DaemonThreads\n"
        "began = threading.Event()\n"
        "DaemonThreads(2, name='stuck').submit(lambda: (began.set(), threading.Event().wait()))\n"
        "began.wait()\n"
        "print('over')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "over\n"
