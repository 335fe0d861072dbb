"""Bundles items that are sent at the same time into one request.

At most one request is in flight. Items that arrive meanwhile form the next one, so that bundles grow with the load, and a single
item is sent at once. Each caller receives the result of its own item.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from rollbook.contracts.errors import RollbookError, RunError

T = TypeVar("T")
A = TypeVar("A")

MAX_ITEMS = 64
MAX_BYTES = 4_000_000
"""The ledger decodes a request in one go, which delays its other clients."""


class Bundles(Generic[T, A]):
    """`send` returns a value or an error for each item. The queue is bounded by the callers: each waits for one item."""

    def __init__(
        self, send: Callable[[Sequence[T]], Awaitable[Sequence[A | RollbookError]]], *, size_of: Callable[[T], int]
    ) -> None:
        self._send = send
        self._size_of = size_of
        self._waiting: deque[tuple[T, asyncio.Future[A]]] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def send(self, item: T) -> A:
        result: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, result))
        if self._sending is None:
            # The task starts in the next iteration of the event loop: all items of this iteration share a request.
            self._sending = asyncio.create_task(self._send_waiting(), name="ledger.submit")
        return await result

    async def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _send_waiting(self) -> None:
        """Sends waiting items until none is left. A cancelled caller does not stop it."""
        try:
            while self._waiting:
                bundle = self._next_bundle()
                if bundle:
                    await self._send_bundle(bundle)
        finally:
            self._sending = None
            # Items are left only after `close`.
            for _, result in self._waiting:
                result.cancel()
            self._waiting.clear()

    def _next_bundle(self) -> list[tuple[T, asyncio.Future[A]]]:
        bundle: list[tuple[T, asyncio.Future[A]]] = []
        size = 0
        while self._waiting and len(bundle) < MAX_ITEMS:
            item, result = self._waiting[0]
            if result.done():  # its caller was cancelled
                self._waiting.popleft()
                continue
            size += self._size_of(item)
            if bundle and size > MAX_BYTES:
                break
            bundle.append(self._waiting.popleft())
        return bundle

    async def _send_bundle(self, bundle: list[tuple[T, asyncio.Future[A]]]) -> None:
        answers: Sequence[A | Exception]
        try:
            answers = await self._send([item for item, _ in bundle])
        except RunError as error:
            if len(bundle) > 1:
                # The whole request was rejected, perhaps because of one item or its size. Send the items one by one.
                for one in bundle:
                    await self._send_bundle([one])
                return
            answers = [error]
        except Exception as error:  # even an unexpected one: the callers would otherwise look cancelled
            answers = [error] * len(bundle)
        except BaseException:
            for _, result in bundle:
                result.cancel()
            raise
        for (_, result), answer in zip(bundle, answers, strict=True):
            if result.done():
                continue
            if isinstance(answer, Exception):
                result.set_exception(answer)
            else:
                result.set_result(answer)
