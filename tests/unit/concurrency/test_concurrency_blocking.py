"""`run_blocking` runs a coroutine where `asyncio.run` would refuse; a `LoopThread` runs many, until it is stopped."""

import asyncio
import gc
import os
import signal
import threading
import warnings
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import pytest

from rollbook.concurrency.blocking import LoopStoppedError, LoopThread, run_blocking
from rollbook.contracts.errors import machine_fault


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


def test_a_loop_thread_runs_coroutines_until_it_is_stopped() -> None:
    with LoopThread("loop") as loop:
        assert loop.run(thread_name()) == "loop"
        assert not loop.is_current_thread
    with pytest.raises(LoopStoppedError, match="loop is closed"):
        loop.run(thread_name())
    assert loop.stop()


def test_a_stopped_loop_thread_leaves_its_contexts_in_reverse_order_and_ends_its_calls() -> None:
    left: list[str] = []
    began = threading.Event()

    @asynccontextmanager
    async def context(name: str) -> AsyncIterator[str]:
        yield name
        left.append(name)

    async def wait_forever() -> None:
        began.set()
        await asyncio.Event().wait()

    loop = LoopThread("loop")
    assert [loop.enter(context(name)) for name in ("first", "second")] == ["first", "second"]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(loop.run, wait_forever())
        began.wait()
        assert loop.stop()
        with pytest.raises(LoopStoppedError, match="closed during the call"):
            call.result()
    assert left == ["second", "first"]


def test_stopping_a_loop_thread_raises_the_error_of_a_context() -> None:
    @asynccontextmanager
    async def context() -> AsyncIterator[None]:
        yield
        raise ValueError("broken")

    loop = LoopThread("loop")
    loop.enter(context())
    with pytest.raises(ValueError, match="broken"):
        loop.stop()


def test_a_blocked_loop_thread_is_reported_and_stops_once_it_can() -> None:
    released = threading.Event()
    loop = LoopThread("loop")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(loop.call, released.wait)
        assert not loop.stop(within_s=0.01)
        released.set()
        with suppress(LoopStoppedError):
            call.result()


def test_where_no_thread_can_be_started_the_error_names_the_limit_to_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="loop: can't start new thread") as refused:
        LoopThread("loop")
    assert "ulimit -u" in str(machine_fault(refused.value))
