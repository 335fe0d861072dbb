"""The runs that a dashboard has open. A run is opened when a page first requests it, and again when it was resumed or replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from rollbook.contracts.errors import NotFoundError
from rollbook.dashboard.run_view import Catalog, RunPlace, RunView


class OpenRuns:
    """Created by `open_runs`."""

    def __init__(self, catalog: Catalog, *, allows_actions: bool) -> None:
        self.catalog = catalog
        self.allows_actions = allows_actions
        self._open: dict[str, tuple[RunView, AsyncExitStack]] = {}
        self._opening = asyncio.Lock()

    async def find(self, key: str | None) -> RunView:
        """The run with this key; without one, the newest. Raises `NotFoundError`."""
        if key is not None and (known := await self._current(key)) is not None:
            return known
        places = await self.catalog.places()
        found = next((place for place in places if key is None or place.key == key), None)
        if found is None:
            what = f"there is no run {key[:200]!r}" if key else "there is no run yet"
            raise NotFoundError(f"{what} in {self.catalog.target}")
        return await self.view(found)

    async def view(self, place: RunPlace) -> RunView:
        async with self._opening:
            if (known := await self._current(place.key)) is not None:
                return known
            if (outdated := self._open.pop(place.key, None)) is not None:
                await outdated[1].aclose()
            stack = AsyncExitStack()
            view = RunView(await stack.enter_async_context(self.catalog.open(place)), stack)
            self._open[place.key] = view, stack
            return view

    async def _current(self, key: str) -> RunView | None:
        """The open run with this key, unless its directory has another run or other settings by now."""
        if key not in self._open:
            return None
        view, _ = self._open[key]
        return None if await asyncio.to_thread(view.run.is_outdated) else view

    async def close(self) -> None:
        async with AsyncExitStack() as closing:
            for _, stack in self._open.values():
                closing.push_async_callback(stack.aclose)


@asynccontextmanager
async def open_runs(catalog: Catalog, *, allows_actions: bool = False) -> AsyncIterator[OpenRuns]:
    runs = OpenRuns(catalog, allows_actions=allows_actions)
    try:
        yield runs
    finally:
        await runs.close()
