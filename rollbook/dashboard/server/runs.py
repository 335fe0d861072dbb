"""The runs that a dashboard has open. A run is opened when it is first looked at."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from rollbook.contracts.errors import NotFoundError
from rollbook.dashboard.run_view import Catalog, RunPlace, RunView


class OpenRuns:
    """Created by `open_runs`."""

    def __init__(self, catalog: Catalog, stack: AsyncExitStack, *, allows_actions: bool) -> None:
        self.catalog = catalog
        self.allows_actions = allows_actions
        self._stack = stack
        self._open: dict[str, RunView] = {}
        self._opening = asyncio.Lock()

    async def find(self, key: str | None) -> RunView:
        """The run with this key; without one, the newest. Raises `NotFoundError`."""
        if key is not None and key in self._open:
            return self._open[key]
        places = await self.catalog.places()
        found = next((place for place in places if key is None or place.key == key), None)
        if found is None:
            what = f"there is no run {key[:200]!r}" if key else "there is no run yet"
            raise NotFoundError(f"{what} in {self.catalog.target}")
        return await self.view(found)

    async def view(self, place: RunPlace) -> RunView:
        async with self._opening:
            if place.key not in self._open:
                opened = await self._stack.enter_async_context(self.catalog.open(place))
                self._open[place.key] = RunView(opened, self._stack)
            return self._open[place.key]


@asynccontextmanager
async def open_runs(catalog: Catalog, *, allows_actions: bool = False) -> AsyncIterator[OpenRuns]:
    async with AsyncExitStack() as stack:
        yield OpenRuns(catalog, stack, allows_actions=allows_actions)
