"""Keeps a view index up to date with its ledger, only while someone looks at it.

A new index first reads every group once, in order of admission, and then follows the changes since the beginning of that snapshot.
Nothing is read while no page is open: each request triggers an update and gets what is indexed within a short time.
"""

import asyncio
import dataclasses
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.contracts.errors import RollbookError, RunError, TransientError
from rollbook.dashboard.index.index import Position, ViewIndex, open_index
from rollbook.dashboard.source import GroupRow, LedgerSource

T = TypeVar("T")

PAGE_GROUPS = 1000
"""Changes in one read: the most that one request to a ledger returns."""
FRESH_S = 1.0
"""An index that was updated less than this time ago is not updated again."""
PATIENCE_S = 0.5
"""A request waits this long for an update. A large run is indexed meanwhile, and the response says how far."""


class IndexState(msgspec.Struct, frozen=True, kw_only=True):
    indexed: int
    total: int
    is_complete: bool


class FollowedIndex:
    """A view index with its ledger. `read` runs a query in the thread of the index."""

    def __init__(self, index: ViewIndex, source: LedgerSource, thread: ThreadPoolExecutor, clock: Clock) -> None:
        self._index = index
        self._source = source
        self._thread = thread
        self._clock = clock
        self._update: asyncio.Task[None] | None = None
        self._updated_at = float("-inf")
        self._failure: RollbookError | None = None
        """Why the last update failed."""
        self._is_closed = False
        self.total = 0

    async def read(self, query: Callable[[ViewIndex], T]) -> T:
        self._require_open()
        return await asyncio.get_running_loop().run_in_executor(self._thread, query, self._index)

    async def state(self) -> IndexState:
        indexed = self._index.num_groups
        is_complete = self._index.position.is_snapshot_complete and indexed >= self.total
        return IndexState(indexed=indexed, total=max(self.total, indexed), is_complete=is_complete)

    async def update(self) -> IndexState:
        """Index new changes; returns after `PATIENCE_S` at the latest and goes on in the background.

        Raises `TransientError` or `RunError` if the ledger cannot be read.
        """
        if self._update is None or self._update.done():
            if self._clock.now() - self._updated_at < FRESH_S:
                return await self.state()
            self._update = asyncio.create_task(self._run_update(), name="dashboard.index")
        running = self._update
        await asyncio.wait({running}, timeout=PATIENCE_S)
        self._require_open()
        if running.done():
            self._update = None
            running.result()
        if self._failure is not None:
            # It may have failed after its own request was answered.
            raise self._failure.with_traceback(None)
        return await self.state()

    def _require_open(self) -> None:
        if self._is_closed:
            raise TransientError("the run was opened again meanwhile; repeat the request")

    async def close(self) -> None:
        self._is_closed = True
        if self._update is not None:
            self._update.cancel()
            with suppress(asyncio.CancelledError):
                await self._update

    async def _run_update(self) -> None:
        try:
            await self._catch_up()
            self._failure = None
        except RollbookError as error:
            self._failure = error

    async def _catch_up(self) -> None:
        """Read the ledger up to its last change."""
        self.total = (await self._source.status()).opened
        await self._check_identity()
        position = self._index.position
        if not position.is_snapshot_complete:
            if position.next_sequence == 0:
                position = Position(change=(await self._source.changes(after=None, limit=1)).next)
            await self._snapshot(position)
        while True:
            after = self._index.position.change
            found = await self._source.changes(after=after, limit=PAGE_GROUPS)
            if found.groups or found.next != after:
                await self._put(found.groups, dataclasses.replace(self._index.position, change=found.next))
            if found.is_complete:
                break
        self._updated_at = self._clock.now()

    async def _snapshot(self, position: Position) -> None:
        while True:
            most = self._source.most_groups
            rows = await self._source.groups(start=position.next_sequence, limit=most)
            is_last = len(rows) < most
            if rows:
                position = dataclasses.replace(position, next_sequence=rows[-1].sequence + 1)
            await self._put(rows, dataclasses.replace(position, is_snapshot_complete=is_last))
            if is_last:
                return

    async def _check_identity(self) -> None:
        """Build the index again if it is of another run with the same name: if its newest group is not the ledger's.

        Each update checks it: a ledger can be replaced while its groups are shown.
        """
        newest = await self.read(lambda index: index.rows([index.columns.size - 1]) if index.columns.size else [])
        for row in newest:
            found = await self._source.groups(start=row.sequence, limit=PAGE_GROUPS)
            if row.group_id not in {one.group_id for one in found if one.opened_at == row.opened_at}:
                await self.read(ViewIndex.clear)

    async def _put(self, rows: tuple[GroupRow, ...], position: Position) -> None:
        try:
            await self.read(lambda index: index.put(rows, position))
        except sqlite3.Error as error:
            raise RunError(f"the index of the groups cannot be written: {error}") from error


@asynccontextmanager
async def follow(
    path: Path, run: str, source: LedgerSource, *, clock: Clock | None = None
) -> AsyncIterator[FollowedIndex]:
    """Open the index of a run at `path`."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="dashboard-index") as thread:
        opening = open_index(path, run)
        index = await loop.run_in_executor(thread, opening.__enter__)
        followed = FollowedIndex(index, source, thread, clock or SystemClock())
        try:
            yield followed
        finally:
            await followed.close()
            await loop.run_in_executor(thread, opening.__exit__, None, None, None)
