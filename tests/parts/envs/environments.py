"""Environments with one defect each, and a server for them."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from rollbook.contracts.task import Observation
from rollbook.envs.config import EnvConfig, EnvServerConfig
from rollbook.envs.server.run import RunningServer, serve_environments

# Simulators on any free ports: other tests may run concurrently.
AWS_ARGS = {"base_port": 0}
GAME = {"secret": 5, "low": 0, "high": 15}


class Notebook:
    """Returns all actions of its session, which shows any leak between sessions."""

    is_quick = True

    def reset(self, task: Mapping[str, Any]) -> Observation:
        self._pages = [str(task.get("owner", "nobody"))]
        return Observation(text="".join(self._pages))

    def step(self, action: str) -> Observation:
        self._pages.append(action)
        return Observation(text="|".join(self._pages), done=action == "end", reward=1.0 if action == "end" else 0.0)

    def close(self) -> None: ...


class Sleeper:
    """Blocks its thread in every step; the action `stuck` blocks until `unblock` is set."""

    unblock: ClassVar[threading.Event] = threading.Event()

    def reset(self, task: Mapping[str, Any]) -> Observation:
        return Observation(text="asleep")

    def step(self, action: str) -> Observation:
        if action == "stuck":
            self.unblock.wait(60)
        else:
            time.sleep(float(action))
        return Observation(text="awake", facts={"thread": threading.current_thread().name})

    def close(self) -> None: ...


class Waiter:
    """Waits without blocking, and records steps that begin or are cancelled, and environments that are closed.

    With `marks` in its task, a directory, it also creates a file there when a step begins: other processes can see that.
    """

    events: ClassVar[list[str]] = []
    _marks: str | None = None

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        self._marks = task.get("marks")
        return Observation(text="waiting")

    async def step(self, action: str) -> Observation:
        self.events.append("began")
        if self._marks is not None:
            (Path(self._marks) / uuid4().hex).touch()
        try:
            await asyncio.sleep(float(action))
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        return Observation(text="done waiting")

    async def close(self) -> None:
        self.events.append("closed")


class Breaker:
    """Raises in the method that the task or the action names."""

    is_quick = True

    def reset(self, task: Mapping[str, Any]) -> Observation:
        if task.get("break") == "reset":
            raise OSError("no disk")
        self._breaks_close = task.get("break") == "close"
        return Observation(text="whole")

    def step(self, action: str) -> Observation:
        if action == "nan":
            return Observation(text="paid", reward=float("nan"))
        if action == "surrogate":
            return Observation(text="\ud800")
        if action == "circle":
            circle: dict[str, Any] = {}
            circle["circle"] = circle
            return Observation(text="round", facts=circle)
        if action == "fact":
            return Observation(text="odd", facts={"odd": {1, 2}, "when": complex(1, 2)})
        raise KeyError(action)

    def close(self) -> None:
        if self._breaks_close:
            raise RuntimeError("the lid is stuck")


class CannotBeCreated:
    """Only the first object of the class can be created (by the check at the start)."""

    created: ClassVar[int] = 0

    def __init__(self) -> None:
        type(self).created += 1
        if type(self).created > 1:
            raise OSError("the factory is closed")

    def reset(self, task: Mapping[str, Any]) -> Observation:
        return Observation(text="")

    def step(self, action: str) -> Observation:
        return Observation(text="")

    def close(self) -> None: ...


class FailsOneReset:
    """The n-th reset of the class fails: for a connect that fails halfway."""

    is_quick = True
    resets: ClassVar[int] = 0
    fails_on: ClassVar[int] = 0

    def reset(self, task: Mapping[str, Any]) -> Observation:
        type(self).resets += 1
        if type(self).resets == type(self).fails_on:
            raise OSError(f"reset {type(self).resets} failed")
        return Observation(text="ready")

    def step(self, action: str) -> Observation:
        return Observation(text=action, done=True, reward=1.0)

    def close(self) -> None: ...


@asynccontextmanager
async def served(
    env: type | str, *, size: int | None = 8, args: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncIterator[RunningServer]:
    """A real server on a free port, for a class of this module or a name of the catalog."""
    name = env if isinstance(env, str) else f"{env.__module__}:{env.__qualname__}"
    async with serve_environments(
        EnvConfig(name=name, args=dict(args or {})), EnvServerConfig(**settings), size=size
    ) as server:
        yield server


async def until(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Wait for a condition. The time limit turns a hang into a failure."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - other processes and threads change the condition, without an event
            await asyncio.sleep(0.005)
