"""One background task at a time: it runs concurrently with its owner, and its errors are never lost."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """Runs one coroutine at a time in a task group; an error ends the group."""

    def __init__(self, group: asyncio.TaskGroup, name: str) -> None:
        self._group = group
        self._name = name
        self._task: asyncio.Task[Any] | None = None

    async def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Wait for the previous work, then start `work` and return."""
        try:
            await self.wait()
        except BaseException:
            work.close()
            raise
        self._task = self._group.create_task(work, name=self._name)

    async def done_or(self, event: asyncio.Event) -> bool:
        """Wait for the running work or the event. Whether the work is done."""
        if self._task is None:
            return True
        waiting = asyncio.create_task(event.wait(), name=f"{self._name}.or")
        try:
            await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return self._task.done()

    async def wait(self) -> Any:
        """Wait for the running work; its result, or None without running work."""
        if self._task is None:
            return None
        # Shielded: cancelling this wait must not cancel the work.
        result = await asyncio.shield(self._task)
        self._task = None
        return result

    async def cancel(self) -> None:
        """Cancel the running work and wait for its end."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
