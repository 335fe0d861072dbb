"""`run_blocking` runs a coroutine where `asyncio.run` would refuse."""

import asyncio
import gc
import os
import signal
import threading
import warnings

import pytest

from rollbook.concurrency.blocking import run_blocking


async def thread_name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


def test_without_an_event_loop_the_coroutine_runs_in_this_thread() -> None:
    assert run_blocking(thread_name()) == threading.current_thread().name


async def test_inside_an_event_loop_the_coroutine_runs_in_another_thread() -> None:
    assert run_blocking(thread_name()).startswith("run_blocking")


async def test_an_error_of_the_coroutine_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_blocking(fail())


async def test_each_interrupt_is_passed_to_the_coroutine() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = 0
    interrupted = asyncio.Event()

    def on_interrupt() -> None:
        nonlocal seen
        seen += 1
        interrupted.set()

    async def wait_for_two() -> int:
        while seen < 2:
            os.kill(os.getpid(), signal.SIGINT)
            await interrupted.wait()
            interrupted.clear()
        return seen

    assert run_blocking(wait_for_two(), on_interrupt=on_interrupt) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_the_result_is_kept_if_no_more_threads_can_be_started_to_close_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def work() -> str:
        await asyncio.to_thread(lambda: None)
        monkeypatch.setattr(threading.Thread, "start", fail)
        return "done"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loop stays open
        assert run_blocking(work()) == "done"
        monkeypatch.undo()
        gc.collect()
