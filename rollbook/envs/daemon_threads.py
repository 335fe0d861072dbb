"""A thread pool for blocking environments whose threads do not delay the end of the process.

The executor of the standard library joins its threads at interpreter exit, so one environment that never returns would keep a
server from stopping. These threads are daemons. They start with the first call that needs one and end at `shutdown`.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Work = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads(Executor):
    """Runs at most `max_threads` calls at a time, in FIFO order."""

    def __init__(self, max_threads: int, *, name: str) -> None:
        if max_threads < 1:
            raise ValueError(f"max_threads is {max_threads}; it must be at least 1")
        self._max_threads = max_threads
        self._name = name
        # Unbounded: each call belongs to a session, and the number of sessions is bounded.
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_idle = 0
        self._is_shut_down = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()
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
