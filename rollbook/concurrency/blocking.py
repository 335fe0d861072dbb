"""Runs coroutines from plain code, and blocking code from coroutines.

`DaemonThreads` is a thread pool for blocking code that may hang, such as environments. The executor of the standard library joins
its threads at interpreter exit, so one call that never returned would keep a server from stopping. These threads are daemons. They
start with the first call that needs one and end at `shutdown`.
"""

import asyncio
import errno
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

Result = TypeVar("Result")
P = ParamSpec("P")
CANCEL_S = 5.0
"""How long `LoopThread.stop` waits for tasks that it cancelled."""


def run_blocking(main: Coroutine[Any, Any, Result], *, on_interrupt: Callable[[], None] = lambda: None) -> Result:
    """Like `asyncio.run`, but works even while an event loop runs in this thread, as in a notebook.

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
    """Like `asyncio.run`, but returns the result even if the loop cannot be closed because no more threads can be started."""
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


class LoopStoppedError(RuntimeError):
    """A call that a `LoopThread` cannot finish, because it was stopped."""


class LoopThread:
    """An event loop in its own thread, for blocking classes over asynchronous ones. Any other thread may call it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._contexts = AsyncExitStack()
        self._lock = threading.Lock()
        self._is_stopped = False
        # A daemon: a call that never returns must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            # As the system reports a process that it cannot start.
            raise OSError(errno.EAGAIN, f"{name}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in this loop. It must await; `run` would wait for itself."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine. An interrupt here cancels it."""
        with self._lock:  # what is submitted before `stop` is cancelled by it; a later call is refused
            if self._is_stopped:
                work.close()
                raise LoopStoppedError(f"{self._thread.name} is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            if not self._is_stopped:
                raise
            raise LoopStoppedError(f"{self._thread.name} was closed during the call") from None
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], object]) -> None:
        """Call a plain function in the loop, and wait for it."""

        async def run() -> None:
            function()

        self.run(run())

    def enter(self, context: AbstractAsyncContextManager[Result]) -> Result:
        """Enter a context manager; `stop` leaves it, in another task of the same loop."""
        return self.run(self._contexts.enter_async_context(context))

    def stop(self, *, within_s: float | None = None) -> bool:
        """Leave every context, cancel what is still running, and end the thread. A second call does nothing.

        False if that takes longer than `within_s`: the loop is blocked. It still stops as soon as it can.
        """
        with self._lock:
            if self._is_stopped:
                return not self._thread.is_alive()
            self._is_stopped = True
            end = asyncio.run_coroutine_threadsafe(self._clean_up(), self._loop)
            end.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        self._thread.join(within_s)
        if self._thread.is_alive():
            return False
        end.result()  # raises the error of a context
        return True

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _clean_up(self) -> None:
        try:
            await self._contexts.aclose()
        finally:
            running = asyncio.all_tasks() - {asyncio.current_task()}
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=CANCEL_S)


class DaemonThreads(Executor):
    """Runs at most `max_threads` calls at a time, in FIFO order."""

    def __init__(self, max_threads: int, *, name: str) -> None:
        if max_threads < 1:
            raise ValueError(f"max_threads is {max_threads}; it must be at least 1")
        self._max_threads = max_threads
        self._name = name
        # Unbounded: each call belongs to a session, and the number of sessions is bounded.
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_idle = 0
        self._is_shut_down = False

    def submit(self, fn: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> "Future[Result]":
        future: Future[Result] = Future()
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError(f"the thread pool {self._name} is shut down")
            self._work.put((future, lambda: fn(*args, **kwargs)))
            if self._num_idle > 0:
                self._num_idle -= 1  # one idle thread will take this call
            elif self._num_threads < self._max_threads:
                self._num_threads += 1
                name = f"{self._name}-{self._num_threads}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End idle threads now and busy ones after their call. Never waits; `wait` is part of the inherited signature."""
        with self._lock:
            self._is_shut_down = True
            # Without waiting: a busy thread may take the last call at any moment.
            with suppress(queue.Empty):
                while cancel_futures:
                    if (item := self._work.get_nowait()) is not None:
                        item[0].cancel()
            for _ in range(self._num_threads):
                self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except StopIteration as error:  # a future of asyncio refuses it, so the caller would wait forever
                    future.set_exception(RuntimeError(f"StopIteration: {error}"))
                except BaseException as error:  # any exception belongs to the caller
                    future.set_exception(error)
            del future, call, item  # an idle thread must not keep the last environment alive
            with self._lock:
                self._num_idle += 1
