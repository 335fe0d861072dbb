"""Worlds as an episode sees them: waiting for one is not its time, and every step has a deadline that names itself."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

from rollbook.contracts.environment import Observation
from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.ports import Environment
from rollbook.rollout.episodes.policy import not_the_episodes_time

OpenEnvironment: TypeAlias = Callable[[], AbstractAsyncContextManager[Environment]]


class WorldHangsError(EpisodeError):
    """A world did not answer. Its episode is given up and never scored."""


class WatchedWorld:
    """A world whose every answer is waited for only so long. Whatever else it offers is passed through."""

    def __init__(self, world: Environment, *, step_s: float) -> None:
        self._world = world
        self._step_s = step_s
        self._steps = 0

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        self._steps = 0
        async with self._within("reset"):
            return await self._world.reset(task)

    async def step(self, action: str) -> Observation:
        self._steps += 1
        async with self._within(f"step {self._steps}"):
            return await self._world.step(action)

    async def close(self) -> None:
        await self._world.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    @asynccontextmanager
    async def _within(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._step_s) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise WorldHangsError(
                f"{what} of the world {type(self._world).__name__} was not answered within {self._step_s:g} s (rollout.step_s)"
            ) from None


def watched(open_environment: OpenEnvironment, *, step_s: float, open_s: float) -> OpenEnvironment:
    """Open worlds the same way, watched."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[WatchedWorld]:
        async with AsyncExitStack() as stack:
            with not_the_episodes_time():
                try:
                    async with asyncio.timeout(open_s) as limit:
                        world = await stack.enter_async_context(open_environment())
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise WorldHangsError(f"no world was ready within {open_s:g} s (rollout.open_s)") from None
            yield WatchedWorld(world, step_s=step_s)

    return opened
