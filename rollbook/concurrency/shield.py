"""Let clean-up complete within a budget, even when the one who asks is being cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def finish(cleanup: Coroutine[Any, Any, object], *, within_s: float, name: str = "cleanup") -> bool:
    """Run `cleanup` to its end or to the end of its budget. True when it completed.

    A cancellation that arrives meanwhile is passed on once the clean-up is over.
    """
    task = asyncio.ensure_future(cleanup)
    cancelled = False
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while not task.done() and loop.time() < until:
        try:
            await asyncio.wait({task}, timeout=until - loop.time())
        except asyncio.CancelledError:
            cancelled = True
    completed = task.done() and not task.cancelled() and task.exception() is None
    if not task.done():
        task.cancel(f"{name}: {within_s:g} s are over")
    if cancelled:
        raise asyncio.CancelledError
    return completed
