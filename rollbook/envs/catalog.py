"""Loads environment classes by name, and creates environments from them."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rollbook.concurrency.blocking import DaemonThreads
from rollbook.concurrency.deadline import finish
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_plugin
from rollbook.envs.config import ENVIRONMENTS, EnvConfig
from rollbook.envs.environment import EnvironmentAdapter

# Closing a container or a connection may take seconds; longer means that it hangs.
CLOSE_WITHIN_S = 20.0
METHODS = ("reset", "step", "close")


class EnvironmentSource:
    """Creates an environment for each episode. Name and arguments are checked in the constructor."""

    def __init__(self, config: EnvConfig) -> None:
        if config.url is not None:
            raise RunError(f"env.url is {config.url}: environments are on that server; use rollbook.envs.client.remote")
        self._config = config
        self._kind = environment_class(config.name)
        try:
            self._kind(**config.args)
        except Exception as error:  # user code may raise anything
            raise RunError(
                f"env.args: {config.name} does not accept {config.args!r}: {type(error).__name__}: {error}; "
                f"its arguments are {inspect.signature(self._kind)}"
            ) from error
        # Threads start with the first call that needs one: quick and async environments use none.
        self._threads = DaemonThreads(config.max_threads, name=f"env-{config.name}")

    def __call__(self) -> EnvironmentAdapter:
        return EnvironmentAdapter(self._kind(**self._config.args), name=self._config.name, executor=self._threads)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[EnvironmentAdapter]:
        """An environment for one episode, always closed at the end."""
        env = self()
        try:
            yield env
        finally:
            # A failed or hanging close does not change the episode's result.
            await finish(env.close(), within_s=CLOSE_WITHIN_S, name=f"env {self._config.name}.close")

    def close(self) -> None:
        """Shut down the threads without waiting for running calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def environment_class(name: str) -> Callable[..., Any]:
    """The class of a built-in environment or of `module:Class`. Raises `RunError` with the known names."""
    kind = load_plugin(name, setting="env.name", builtin=ENVIRONMENTS)
    if not isinstance(kind, type):
        raise RunError(f"env.name = {name!r} is not a class")
    missing = [method for method in METHODS if not callable(getattr(kind, method, None))]
    if missing:
        raise RunError(f"env.name: {name} lacks {', '.join(missing)}; an environment has reset, step and close")
    return kind
