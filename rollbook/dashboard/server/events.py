"""`/api/events`: notifies open pages when a run changes. One reader per run serves all pages; without pages nothing is read."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from rollbook.access.event_stream import KEEP_ALIVE, EventStream, json_event
from rollbook.contracts.errors import RollbookError
from rollbook.dashboard.server.overview import state_of
from rollbook.dashboard.server.runs import OpenRuns

POLL_S = 0.5
KEEPALIVE_S = 15.0
SHOWN = ("rollout/reward", "rollout/accuracy", "train/loss", "perf/overlap_ratio", "async/version_offset_max")


class Events:
    def __init__(self, runs: OpenRuns, *, on_change: Callable[[], None]) -> None:
        """`on_change` is called before the pages learn of a change."""
        self._runs = runs
        self._on_change = on_change
        self._readers: dict[str, _Reader] = {}
        self._streams: set[asyncio.Task[Any]] = set()

    async def running(self, _: web.Application) -> AsyncIterator[None]:
        """Ends open streams when the server stops: a page would keep it waiting."""
        yield
        for stream in self._streams:
            stream.cancel()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        key = (await self._runs.find(request.query.get("run"))).details.key
        stream = EventStream(request)
        await stream.write()
        reader = self._readers.setdefault(key, _Reader(self._runs, key, self._on_change))
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            async for message in reader.messages():
                await stream.write(message)
        except (ConnectionResetError, asyncio.CancelledError):
            pass  # the page was closed, or the server stops
        finally:
            self._streams.discard(task)
        return stream.response


class _Reader:
    """Reads a run while at least one page follows it."""

    def __init__(self, runs: OpenRuns, key: str, on_change: Callable[[], None]) -> None:
        self._runs = runs
        self._key = key
        self._on_change = on_change
        self._latest = b""
        self._changed = asyncio.Event()
        self._pages = 0
        self._polling: asyncio.Task[None] | None = None

    async def messages(self) -> AsyncIterator[bytes]:
        """The current state, each change of it, and a comment after a time without changes."""
        self._pages += 1
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll(), name="dashboard.events")
        sent = b""
        try:
            while True:
                changed = self._changed
                if self._latest and self._latest != sent:
                    sent = self._latest
                    yield sent
                    continue
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        await changed.wait()
                except TimeoutError:
                    yield KEEP_ALIVE
        finally:
            self._pages -= 1
            if self._pages == 0 and self._polling is not None:
                # A page that opens while the task ends starts another one.
                ending, self._polling = self._polling, None
                ending.cancel()
                with suppress(asyncio.CancelledError):
                    await ending

    async def _poll(self) -> None:
        """Waits: `POLL_S` between reads. Gives: `_latest`. Ends: when the last page is closed."""
        while True:
            message = await self._read()
            if message != self._latest:
                self._latest = message
                self._on_change()
                self._changed.set()
                self._changed = asyncio.Event()
            await asyncio.sleep(POLL_S)

    async def _read(self) -> bytes:
        try:
            view = await self._runs.find(self._key)
            status = await view.ledger.status()
            metrics = await view.metrics()
        except (RollbookError, OSError) as error:
            return json_event({"run": self._key, "text": str(error)}, "problem")
        return json_event(
            {
                "run": self._key,
                "step": status.acknowledged_step,
                "opened": status.opened,
                "by_state": status.by_state,
                "gate": status.gate,
                "actions": status.actions,
                "state": state_of(view, status),
                "last": {name: metrics.gauges.get(name) for name in SHOWN},
            },
            "changed",
        )
