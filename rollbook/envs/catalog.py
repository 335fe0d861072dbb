"""Name to environment: one explicit table, and `module:Class` for environments of your own."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rollbook.concurrency.shield import finish
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_plugin
from rollbook.envs.builtin.arithmetic import Arithmetic
from rollbook.envs.builtin.maths import Maths
from rollbook.envs.builtin.number_guessing import DelayedNumberGuessing, NumberGuessing
from rollbook.envs.builtin.terminal.environment import Terminal
from rollbook.envs.config import EnvConfig
from rollbook.envs.daemon_threads import DaemonThreads
from rollbook.envs.environment import EnvironmentAdapter

CATALOG: dict[str, type] = {
    "arithmetic": Arithmetic,
    "delayed_number_guessing": DelayedNumberGuessing,
    "maths": Maths,
    "number_guessing": NumberGuessing,
    "terminal": Terminal,
}
# Environments that need an extra: named here, imported when they are chosen.
ON_DEMAND = {
    "aws": "rollbook.envs.builtin.awscli.environment:AwsCliEnvironment",
    "reasoning_gym": "rollbook.envs.builtin.reasoning_gym_maths:ReasoningGymMaths",
}
# An environment that gives back a container or a connection may take seconds; one that takes longer hangs.
CLOSE_WITHIN_S = 20.0
METHODS = ("reset", "step", "close")


class EnvironmentSource:
    """Makes a fresh environment for each episode. Name and arguments are checked when it is built, not in the first episode."""

    def __init__(self, config: EnvConfig) -> None:
        if config.url is not None:
            raise RunError(
                f"env.url names the server {config.url}; no environment is made here (rollbook.envs.client.remote opens it)"
            )
        self._config = config
        self._kind = environment_class(config.name)
        check_arguments(config.name, self._kind, config.args)
        # Threads start with the first call that needs one: quick and async environments cost none.
        self._threads = DaemonThreads(config.max_threads, name=f"env-{config.name}")

    def __call__(self) -> EnvironmentAdapter:
        return EnvironmentAdapter(self._kind(**self._config.args), name=self._config.name, executor=self._threads)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[EnvironmentAdapter]:
        """A fresh environment for one episode, closed at its end however it ends."""
        environment = self()
        try:
            yield environment
        finally:
            # An environment that hangs or breaks while closing must not cost the episode that was played in it.
            await finish(environment.close(), within_s=CLOSE_WITHIN_S, name=f"env {self._config.name}.close")

    def close(self) -> None:
        """Let go of the threads. Calls that still run in one are not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def environment_class(name: str) -> Callable[..., Any]:
    """The class behind a name of the catalog or a dotted path. Raises `RunError` that lists what is known."""
    if name in CATALOG:
        return CATALOG[name]
    name = ON_DEMAND.get(name, name)
    if ":" not in name:
        raise RunError(
            f"env.name: there is no environment {name!r}; known are {', '.join(sorted([*CATALOG, *ON_DEMAND]))}, "
            "and 'module:Class' for one of your own"
        )
    kind = load_plugin(name, setting="env.name")
    if not isinstance(kind, type):
        raise RunError(f"env.name = {name!r} is not a class")
    missing = [method for method in METHODS if not callable(getattr(kind, method, None))]
    if missing:
        raise RunError(f"env.name: {name} lacks {', '.join(missing)}; an environment has reset, step and close")
    return kind


def check_arguments(name: str, kind: Callable[..., Any], args: dict[str, Any]) -> None:
    """Build one environment and throw it away: a wrong argument is told before anything starts."""
    try:
        kind(**args)
    except Exception as error:  # foreign code again, at start-up
        signature = inspect.signature(kind)
        raise RunError(
            f"env.args: {name} does not take {args!r}: {type(error).__name__}: {error}; its arguments are {signature}"
        ) from error
