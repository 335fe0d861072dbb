"""Environments with timeouts. Waiting for a free environment does not count as episode time."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.ports import Environment
from rollbook.contracts.task import Observation
from rollbook.rollout.policy import current_episode, pause_episode_time

OpenEnvironment: TypeAlias = Callable[[], AbstractAsyncContextManager[Environment]]


class EnvironmentTimeoutError(EpisodeError):
    """An environment did not respond in time. The episode is unscorable."""


class TimedEnvironment:
    """Adds a timeout to `reset` and `step`; all other attributes are those of the wrapped environment."""

    def __init__(self, env: Environment, *, step_s: float) -> None:
        self._env = env
        self._step_s = step_s
        self._steps = 0

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        self._steps = 0
        async with self._timeout("reset"):
            return await self._env.reset(task)

    async def step(self, action: str) -> Observation:
        self._steps += 1
        started = time.monotonic()
        async with self._timeout(f"step {self._steps}"):
            observation = await self._env.step(action)
        if (episode := current_episode()) is not None and episode.times:
            episode.times[-1].act_s += time.monotonic() - started
        return observation

    async def close(self) -> None:
        await self._env.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    @asynccontextmanager
    async def _timeout(self, call: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._step_s) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise EnvironmentTimeoutError(
                f"{call} of the environment {type(self._env).__name__} did not return within {self._step_s:g} s (rollout.step_s)"
            ) from None


def with_timeouts(open_environment: OpenEnvironment, *, step_s: float, open_s: float) -> OpenEnvironment:
    """Add timeouts to opening and using an environment."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[TimedEnvironment]:
        async with AsyncExitStack() as stack:
            with pause_episode_time():
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
