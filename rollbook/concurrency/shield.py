"""Clean-up that completes within a time limit, also when its caller is cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def finish(cleanup: Coroutine[Any, Any, object], *, within_s: float, name: str = "cleanup") -> bool:
    """Run `cleanup` to its end or to its time limit. True when it completed.

    A cancellation that arrives meanwhile is raised after the clean-up.
    """
    task = asyncio.ensure_future(cleanup)
    is_cancelled = False
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while not task.done() and loop.time() < until:
        try:
            await asyncio.wait({task}, timeout=until - loop.time())
        except asyncio.CancelledError:
            is_cancelled = True
    is_complete = task.done() and not task.cancelled() and task.exception() is None
    if not task.done():
        task.cancel(f"{name}: not complete after {within_s:g} s")
    if is_cancelled:
        raise asyncio.CancelledError
    return is_complete
