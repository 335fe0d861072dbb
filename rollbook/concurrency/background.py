"""Work that goes on beside the next step: one piece of each kind at a time, and never forgotten."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """One lane. A second piece of work waits for the first; a failure ends the group of tasks that owns the lane."""

    def __init__(self, group: asyncio.TaskGroup, name: str) -> None:
        self._group = group
        self._name = name
        self._task: asyncio.Task[Any] | None = None

    async def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begin `work` once the lane is free; returns as soon as it has begun."""
        try:
            await self.settle()
        except BaseException:
            work.close()
            raise
        self._task = self._group.create_task(work, name=self._name)

    async def settle(self) -> Any:
        """Wait for what is under way, and give its result; None when nothing was."""
        if self._task is None:
            return None
        # Shielded: whoever gives up waiting does not cancel the work, and it can still be given up.
        result = await asyncio.shield(self._task)
        self._task = None
        return result

    async def give_up(self) -> None:
        """Break off what is under way."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
