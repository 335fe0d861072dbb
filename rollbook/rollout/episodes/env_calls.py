"""Worlds as an episode sees them: waiting for one is not its time, and every step has a deadline that names itself."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

from rollbook.contracts.environment import Observation
from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.ports import Environment
from rollbook.rollout.policy import not_the_episodes_time

OpenEnvironment: TypeAlias = Callable[[], AbstractAsyncContextManager[Environment]]


class EnvironmentTimeoutError(EpisodeError):
    """A world did not answer. Its episode is given up and never scored."""


class TimedEnvironment:
    """A world whose every answer is waited for only so long. Whatever else it offers is passed through."""

    def __init__(self, env: Environment, *, step_s: float) -> None:
        self._env = env
        self._step_s = step_s
        self._steps = 0

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        self._steps = 0
        async with self._within("reset"):
            return await self._env.reset(task)

    async def step(self, action: str) -> Observation:
        self._steps += 1
        async with self._within(f"step {self._steps}"):
            return await self._env.step(action)

    async def close(self) -> None:
        await self._env.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    @asynccontextmanager
    async def _within(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._step_s) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise EnvironmentTimeoutError(
                f"{what} of the environment {type(self._env).__name__} was not answered within {self._step_s:g} s (rollout.step_s)"
            ) from None


def watched(open_environment: OpenEnvironment, *, step_s: float, open_s: float) -> OpenEnvironment:
    """Open worlds the same way, watched."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[TimedEnvironment]:
        async with AsyncExitStack() as stack:
            with not_the_episodes_time():
                try:
                    async with asyncio.timeout(open_s) as limit:
                        env = await stack.enter_async_context(open_environment())
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise EnvironmentTimeoutError(
                        f"no environment was ready within {open_s:g} s (rollout.open_s)"
                    ) from None
            yield TimedEnvironment(env, step_s=step_s)

    return opened
