"""Group commit: waiting operations are committed together, and their callers get their results after the one commit.

A dedicated thread takes all waiting operations, passes them to the store's `commit`, and returns the results to the event loop. The
busier the ledger, the more operations share one sync.
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

MAX_OPERATIONS = 256
"""Operations in one commit; bounds how long the first of them waits."""
LINGER_S = 0.002
"""How long a commit waits for more operations when the last commit had more. A single caller never waits."""
STOP = None


@dataclass(slots=True)
class Operation:
    """One `write`: its work, the future its caller awaits, and its result."""

    work: Work
    done: asyncio.Future[Any]
    run_id: RunId | None = None
    """The only run that it reads and changes; None: any."""
    before: Callable[[], None] | None = None
    result: Any = None
    error: BaseException | None = None
    announced: set[RunId] = field(default_factory=set)

    def reset(self) -> None:
        """Discard the result before another attempt."""
        self.result, self.error, self.announced = None, None, set()


class Committer:
    """The writing thread of a store. `commit` sets the result or the error of every operation and never raises."""

    def __init__(self, commit: Callable[[list[Operation]], None], loop: asyncio.AbstractEventLoop) -> None:
        self._commit = commit
        self._loop = loop
        self._listeners: list[Callable[[RunId], None]] = []
        # Unbounded: every caller awaits its own result, and the server bounds the number of requests.
        self._waiting: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    async def write(
        self,
        work: Callable[[Transaction], T],
        *,
        run_id: RunId | None = None,
        before: Callable[[], None] | None = None,
    ) -> T:
        operation = Operation(work, self._loop.create_future(), run_id, before)
        self._waiting.put(operation)
        result: T = await operation.done
        return result

    def listen(self, on_change: Callable[[RunId], None]) -> None:
        self._listeners.append(on_change)

    def announce(self, run_ids: set[RunId]) -> None:
        """Notify the listeners, from any thread."""
        self._on_loop(self._notify, run_ids)

    def close(self) -> None:
        """Commit the waiting operations, then stop."""
        self._waiting.put(STOP)
        self._thread.join()

    def _run(self) -> None:
        """Consumes operations until STOP. A failing operation does not end it."""
        stopping = False
        previous = 1
        while not stopping:
            operations: list[Operation] = []
            item = self._waiting.get()
            if self._waiting.qsize() + 1 < previous:
                # Callers of the previous commit are likely to write again; a shared commit halves the cost.
                time.sleep(LINGER_S)
            while True:
                if item is STOP:
                    stopping = True
                    break
                operations.append(item)
                if len(operations) >= MAX_OPERATIONS or self._waiting.empty():
                    break
                item = self._waiting.get()
            previous = len(operations)
            if operations:
                self._commit(operations)
                self._on_loop(self._finish, operations)

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        # A closed loop has no callers left; the commit stays valid.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def _finish(self, operations: list[Operation]) -> None:
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
        self._notify(announced)

    def _notify(self, run_ids: set[RunId]) -> None:
        for run_id in run_ids:
            for on_change in self._listeners:
                on_change(run_id)
