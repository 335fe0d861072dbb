"""Cancels a wait when a stop is requested."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Do `work`, or give it up (None) as soon as `stop` is set. Work that is done by then counts."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work, name="trainer.interruptible")
        stopping = group.create_task(stop.wait(), name="trainer.stop_watch")
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        working.cancel()  # without effect on work that is done
    return None if working.cancelled() else working.result()
