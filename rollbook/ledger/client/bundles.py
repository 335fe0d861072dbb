"""Groups that wait to be submitted at the same moment travel in one request.

At most one request is under way. What is submitted meanwhile forms the next one, so that bundles grow with the load, and a group
that is alone leaves at once. Everybody waits for the answer to their own group and hears of nobody else's.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from rollbook.contracts.errors import RollbookError, RunError

T = TypeVar("T")
A = TypeVar("A")

MOST_TOGETHER = 64
MOST_BYTES = 4_000_000
"""The ledger looks at a request in one go, and its other clients wait for that long."""


class Bundles(Generic[T, A]):
    """Sends items by `send`, which answers each with a value or an error. Bounded by who waits: each caller has one item here."""

    def __init__(
        self, send: Callable[[Sequence[T]], Awaitable[Sequence[A | RollbookError]]], *, size_of: Callable[[T], int]
    ) -> None:
        self._send = send
        self._size_of = size_of
        self._waiting: deque[tuple[T, asyncio.Future[A]]] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def send(self, item: T) -> A:
        answered: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answered))
        if self._sending is None:
            # A task begins in the next round of the event loop: whoever submits in this one travels along.
            self._sending = asyncio.create_task(self._send_waiting(), name="ledger.submit")
        return await answered

    async def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _send_waiting(self) -> None:
        """Takes: what waits. Gives: answers. Ends: when nothing waits. A caller that goes away stops nothing."""
        try:
            while self._waiting:
                bundle = self._next()
                if bundle:
                    await self._carry(bundle)
        finally:
            self._sending = None
            # Only after a cancellation: the client closes, and nobody sends these any more.
            for _, answered in self._waiting:
                answered.cancel()
            self._waiting.clear()

    def _next(self) -> list[tuple[T, asyncio.Future[A]]]:
        bundle: list[tuple[T, asyncio.Future[A]]] = []
        size = 0
        while self._waiting and len(bundle) < MOST_TOGETHER:
            item, answered = self._waiting[0]
            if answered.done():  # its caller has gone
                self._waiting.popleft()
                continue
            size += self._size_of(item)
            if bundle and size > MOST_BYTES:
                break
            bundle.append(self._waiting.popleft())
        return bundle

    async def _carry(self, bundle: list[tuple[T, asyncio.Future[A]]]) -> None:
        try:
            answers = await self._send([item for item, _ in bundle])
        except RunError as error:
            if len(bundle) > 1:
                # The request was refused as a whole, perhaps for one of them, or for its size: each hears its own verdict.
                for one in bundle:
                    await self._carry([one])
                return
            answers = [error]
        except RollbookError as error:
            answers = [error] * len(bundle)
        except BaseException:
            for _, answered in bundle:
                answered.cancel()
            raise
        for (_, answered), answer in zip(bundle, answers, strict=True):
            if answered.done():
                continue
            if isinstance(answer, RollbookError):
                answered.set_exception(answer)
            else:
                answered.set_result(answer)
