"""Runs coroutines from plain code."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_blocking(main: Coroutine[Any, Any, Result], *, on_interrupt: Callable[[], None] = lambda: None) -> Result:
    """As `asyncio.run`, but also works while an event loop runs in this thread, as in a notebook.

    The coroutine then runs in another thread, where signals cannot be caught: `on_interrupt` is called in its loop for each Ctrl-C.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(main)
    started: Future[asyncio.AbstractEventLoop] = Future()

    async def run() -> Result:
        started.set_result(asyncio.get_running_loop())
        return await main

    with (
        ThreadPoolExecutor(1, thread_name_prefix="run_blocking") as pool,
        _on_sigint(lambda: started.result().call_soon_threadsafe(on_interrupt)),
    ):
        return pool.submit(_run, run()).result()


def _run(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`. The result is returned also if the loop cannot be closed, because no more threads can be started."""
    results: list[Result] = []

    async def keep_result() -> None:
        results.append(await main)

    try:
        asyncio.run(keep_result())
    except RuntimeError:
        if not results:
            raise
    return results[0]


@contextmanager
def _on_sigint(call: Callable[[], object]) -> Iterator[None]:
    """Only the main thread receives signals; elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: call())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class LoopThread:
    """An event loop in its own thread, for blocking classes over asynchronous ones. Any other thread may call it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a call that never returns must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine. An interrupt here cancels it."""
        if not self.is_running:
            work.close()
            raise RuntimeError(f"{self._thread.name} is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], object]) -> None:
        """Call a plain function in the loop, and wait for it."""

        async def run() -> None:
            function()

        self.run(run())

    def stop(self) -> None:
        if self.is_running:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
