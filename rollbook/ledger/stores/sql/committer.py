"""Group commit: what waits is written together, and everybody is answered after the one commit.

One thread of its own takes every operation that waits, hands them to the store's `commit`, and takes the answers back to the event
loop. The busier the ledger, the more operations share one sync.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollbook.contracts.admission import RunId
from rollbook.ledger.store import Transaction

T = TypeVar("T")
Work = Callable[[Transaction], Any]

MOST_IN_ONE_COMMIT = 256
"""Bounds how long the first of them waits for its answer."""
LINGER_S = 0.002
"""How long a commit waits for company when the last one had more. One caller alone never waits."""
STOP = None


@dataclass(slots=True)
class Operation:
    """One `write`: what to do, who waits for it, and what came of it."""

    work: Work
    done: asyncio.Future[Any]
    before: Callable[[], None] | None = None
    result: Any = None
    error: BaseException | None = None
    announced: set[RunId] = field(default_factory=set)

    def forget(self) -> None:
        """Before it is tried once more."""
        self.result, self.error, self.announced = None, None, set()


class Committer:
    """The writing thread of a store. `commit` sets the result or the error of every operation and never raises."""

    def __init__(self, commit: Callable[[list[Operation]], None], loop: asyncio.AbstractEventLoop) -> None:
        self._commit = commit
        self._loop = loop
        self._listeners: list[Callable[[RunId], None]] = []
        # Unbounded here, bounded outside: every caller waits for its own answer, and the server bounds its requests.
        self._waiting: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    async def write(self, work: Callable[[Transaction], T], *, before: Callable[[], None] | None = None) -> T:
        operation = Operation(work, self._loop.create_future(), before)
        self._waiting.put(operation)
        result: T = await operation.done
        return result

    def listen(self, heard: Callable[[RunId], None]) -> None:
        self._listeners.append(heard)

    def announce(self, run_ids: set[RunId]) -> None:
        """Tell the listeners, from whichever thread."""
        self._on_loop(self._tell, run_ids)

    def close(self) -> None:
        """Let what waits be written, then stop."""
        self._waiting.put(STOP)
        self._thread.join()

    def _run(self) -> None:
        """Takes: operations. Gives: their answers, after the commit. Ends: at STOP; no failure of an operation ends it."""
        stopping = False
        num_before = 1
        while not stopping:
            operations: list[Operation] = []
            item = self._waiting.get()
            if self._waiting.qsize() + 1 < num_before:
                # Whoever was answered a moment ago is about to come again, and together they cost half.
                time.sleep(LINGER_S)
            while True:
                if item is STOP:
                    stopping = True
                    break
                operations.append(item)
                if len(operations) >= MOST_IN_ONE_COMMIT or self._waiting.empty():
                    break
                item = self._waiting.get()
            num_before = len(operations)
            if operations:
                self._commit(operations)
                self._on_loop(self._answer, operations)

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        # A closed loop has nobody left to hear it. What was committed stays committed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def _answer(self, operations: list[Operation]) -> None:
        announced: set[RunId] = set()
        for operation in operations:
            if operation.error is None:
                announced |= operation.announced
            if operation.done.done():
                continue  # its caller was cancelled
            if operation.error is not None:
                operation.done.set_exception(operation.error)
            else:
                operation.done.set_result(operation.result)
        self._tell(announced)

    def _tell(self, run_ids: set[RunId]) -> None:
        for run_id in run_ids:
            for heard in self._listeners:
                heard(run_id)
