"""Maps names to environment classes, and creates environments from them."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rollbook.concurrency.deadline import finish
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_plugin
from rollbook.envs.builtin.arithmetic import Arithmetic
from rollbook.envs.builtin.maths import Maths
from rollbook.envs.builtin.number_guessing import DelayedNumberGuessing, NumberGuessing
from rollbook.envs.builtin.question import Question
from rollbook.envs.builtin.terminal.environment import Terminal
from rollbook.envs.config import EnvConfig
from rollbook.envs.daemon_threads import DaemonThreads
from rollbook.envs.environment import EnvironmentAdapter

CATALOG: dict[str, type] = {
    "arithmetic": Arithmetic,
    "delayed_number_guessing": DelayedNumberGuessing,
    "maths": Maths,
    "number_guessing": NumberGuessing,
    "question": Question,
    "terminal": Terminal,
}
# Environments that need an optional package, imported only if they are chosen.
ON_DEMAND = {
    "aws": "rollbook.envs.builtin.awscli.environment:AwsCliEnvironment",
    "reasoning_gym": "rollbook.envs.builtin.reasoning_gym_maths:ReasoningGymMaths",
}
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
    """The class of a catalog name or of `module:Class`. Raises `RunError` with the known names."""
    if name in CATALOG:
        return CATALOG[name]
    path = ON_DEMAND.get(name, name)
    if ":" not in path:
        raise RunError(
            f"env.name: there is no environment {name!r}; known are {', '.join(sorted([*CATALOG, *ON_DEMAND]))}, "
            "and 'module:Class' for your own"
        )
    kind = load_plugin(path, setting="env.name")
    if not isinstance(kind, type):
        raise RunError(f"env.name = {path!r} is not a class")
    missing = [method for method in METHODS if not callable(getattr(kind, method, None))]
    if missing:
        raise RunError(f"env.name: {path} lacks {', '.join(missing)}; an environment has reset, step and close")
    return kind
