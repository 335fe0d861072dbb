"""Work that computes on the event loop, one piece in each of its rounds.

When many requests have come at once, whatever else is ready has its turn between two of them: a trainer that takes a batch needs
several rounds for it, and each would otherwise last as long as all the waiting requests together.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Turns:
    """First come, first served. Bounded by who waits: each caller has one piece of work here."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()

    async def do(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._waiting.append((work, done))
        if len(self._waiting) == 1:
            loop.call_soon(self._next, loop)
        return await done

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        work, done = self._waiting[0]
        try:
            if not done.done():  # else its caller has gone
                done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        finally:
            self._waiting.popleft()
            if self._waiting:
                loop.call_soon(self._next, loop)
