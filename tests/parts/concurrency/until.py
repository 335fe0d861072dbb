"""Wait for an observed state instead of a fixed time."""

import asyncio
from collections.abc import Callable


async def until(is_reached: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """Wait for a state of another process or thread. The limit only turns a hang into a failure."""
    async with asyncio.timeout(within_s):
        while not is_reached():  # noqa: ASYNC110 - another process sets no event here
            await asyncio.sleep(0.005)
