"""Runs a coroutine from plain code."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_blocking(main: Coroutine[Any, Any, Result], *, on_interrupt: Callable[[], None] = lambda: None) -> Result:
    """As `asyncio.run`, but also works while an event loop runs in this thread, as in a notebook.

    The coroutine then runs in another thread, where signals cannot be caught: `on_interrupt` is called in its loop for each Ctrl-C.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    with asyncio.Runner() as runner, ThreadPoolExecutor(1, thread_name_prefix="run_blocking") as pool:
        loop = runner.get_loop()
        running = pool.submit(runner.run, main)
        while True:
            try:
                return running.result()
            except KeyboardInterrupt:
                loop.call_soon_threadsafe(on_interrupt)
