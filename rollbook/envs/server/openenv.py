"""Hosts an environment written for the `openenv` package: `rollbook env serve --openenv module:Class`.

Such a class has pydantic models for actions and observations, and plain, possibly blocking methods. This module imports nothing
from the package; the user's module does. Each environment gets one thread for its lifetime, since many of these classes hold
objects that belong to one thread (a browser, a database connection).
"""

import asyncio
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rollbook.concurrency.blocking import DaemonThreads
from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import EpisodeError, RunError, fenced
from rollbook.contracts.plugin import load_plugin
from rollbook.contracts.ports import Environment
from rollbook.contracts.task import Observation
from rollbook.envs.environment import EnvironmentSlots
from rollbook.envs.server.protocol import EpisodeState, ErrorCode, WireError

OBSERVED, STATE = "observed", "state"
# Fields of every OpenEnv observation that messages contain outside the observation.
OUTER_FIELDS = {"reward", "done"}


class UndeclaredState(BaseModel):
    """For `/schema`, if a class does not declare the model of its state."""


class OpenEnvPool:
    """A pool of environments of one OpenEnv class. Satisfies `EnvironmentPool`."""

    def __init__(self, path: str, args: Mapping[str, Any], *, size: int) -> None:
        kind = openenv_class(path)
        _require_concurrent(kind, path, size)
        self._open(lambda: kind(**args), model_classes(path, kind), path.partition(":")[2], kind.__doc__, size)

    @classmethod
    def of_factory(
        cls, factory: Callable[[], Any], action: type[BaseModel], observation: type[BaseModel], *, name: str, size: int
    ) -> "OpenEnvPool":
        """A pool of what `factory` returns: a class, or a function."""
        if isinstance(factory, type):
            _require_concurrent(factory, name, size)
        pool = cls.__new__(cls)
        pool._open(factory, (action, observation, UndeclaredState), name, factory.__doc__, size)
        return pool

    def _open(
        self,
        create: Callable[[], Any],
        models: tuple[type[BaseModel], type[BaseModel], type[BaseModel]],
        name: str,
        description: str | None,
        size: int,
    ) -> None:
        self.name = name
        self.description = next(iter((description or "").strip().splitlines()), name)
        self.dialect = ModelDialect(*models)
        self._create = create
        self._action = models[0]
        self._slots = EnvironmentSlots(size)
        self.capacity = size
        self.health = self._slots.health
        self._threads: set[DaemonThreads] = set()

    async def acquire(self, deadline: Deadline) -> Environment:
        await self._slots.acquire(deadline)
        thread = DaemonThreads(1, name=f"openenv-{self.name}")
        self._threads.add(thread)
        created: list[Any] = []

        def create() -> Any:
            created.append(self._create())
            _require_concurrent(type(created[0]), self.name, self.capacity)
            return created[0]

        try:
            with fenced(f"env {self.name}: creating it"):
                env = await asyncio.get_running_loop().run_in_executor(thread, create)
        except BaseException:
            # A constructor that still runs cannot be stopped; the same thread closes its environment afterwards.
            thread.submit(lambda: None if not created else _close(created[0]))
            self._release(thread)
            raise
        return HostedEnvironment(
            env, self._action, name=self.name, thread=thread, on_close=lambda: self._release(thread)
        )

    def close(self) -> None:
        for thread in list(self._threads):
            thread.shutdown(wait=False, cancel_futures=True)

    def _release(self, thread: DaemonThreads) -> None:
        thread.shutdown(wait=False)  # after the calls that wait in it, such as `close`
        self._threads.discard(thread)
        self._slots.release()


class HostedEnvironment:
    """One OpenEnv environment in its thread. Satisfies `Environment`; actions are JSON of the declared action model."""

    def __init__(
        self,
        env: Any,
        action: type[BaseModel],
        *,
        name: str,
        thread: DaemonThreads,
        on_close: Callable[[], None],
    ) -> None:
        self._env = env
        self._action = action
        self._name = name
        self._thread = thread
        self._on_close: Callable[[], None] | None = on_close
        self._reset_parameters = _parameter_names(env.reset)

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        parameters, row = self._reset_parameters, dict(task)
        if parameters is not None and "task" not in parameters and isinstance(row.get("task"), Mapping):
            row |= row.pop("task")  # our clients send the row under this name; the class takes its fields as arguments
        # Fields that `reset` does not accept are ignored, as by the server of the package.
        given = {name: value for name, value in row.items() if parameters is None or name in parameters}
        return await self._call("reset", **given)

    async def step(self, action: str) -> Observation:
        try:
            model = self._action.model_validate_json(action)
        except ValidationError as error:
            raise EpisodeError(
                f"env {self._name}: {action[:200]!r} is not a {self._action.__name__}: {error}"
            ) from error
        return await self._call("step", model)

    async def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is None:
            return
        try:
            with fenced(f"env {self._name}.close"):
                # Shielded: a close that waits for a running call is not lost with its caller.
                await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, _close, self._env))
        finally:
            on_close()

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Observation:
        with fenced(f"env {self._name}.{method}"):
            if has_own_async(type(self._env), method):
                seen = await getattr(self._env, f"{method}_async")(*args, **kwargs)
                return self._observation(method, seen, self._env.state)

            def call() -> Any:
                return getattr(self._env, method)(*args, **kwargs)

            # One thread: the next call waits for a cancelled call that still runs.
            seen, state = await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: (call(), self._env.state)
            )
        return self._observation(method, seen, state)

    def _observation(self, method: str, seen: Any, state: Any) -> Observation:
        if not isinstance(seen, BaseModel):
            raise EpisodeError(
                f"env {self._name}: {method} returned {type(seen).__name__} instead of an observation model"
            )
        observed = seen.model_dump(mode="json", exclude=OUTER_FIELDS)
        reward = getattr(seen, "reward", None)
        return Observation(
            text=json.dumps(
                {name: value for name, value in observed.items() if name != "metadata"}, ensure_ascii=False
            ),
            reward=float(reward) if reward is not None else 0.0,
            done=bool(getattr(seen, "done", False)),
            facts={OBSERVED: observed, STATE: state.model_dump(mode="json") if isinstance(state, BaseModel) else {}},
        )


class ModelDialect:
    """The dialect of the action and observation models of a hosted class."""

    def __init__(self, action: type[BaseModel], observation: type[BaseModel], state: type[BaseModel]) -> None:
        self._action = action
        self._schema = {
            "action": action.model_json_schema(),
            "observation": observation.model_json_schema(),
            "state": state.model_json_schema(),
        }

    def task_of(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        return data

    def action_of(self, data: Mapping[str, Any]) -> str:
        try:
            return self._action.model_validate(dict(data)).model_dump_json()
        except ValidationError as error:
            raise WireError(
                ErrorCode.VALIDATION_ERROR, f"step: this is not a {self._action.__name__}: {error}"
            ) from error

    def observed(self, seen: Observation) -> Mapping[str, Any]:
        observed: Mapping[str, Any] = seen.facts[OBSERVED]
        return observed

    def facts(self, seen: Observation) -> Mapping[str, Any]:
        metadata: Mapping[str, Any] = seen.facts[OBSERVED].get("metadata") or {}
        return metadata

    def state(self, state: EpisodeState) -> Mapping[str, Any]:
        extra = {} if state.last is None else state.last.facts.get(STATE, {})
        return {"episode_id": state.episode_id, "step_count": state.step_count, **extra}

    def schema(self) -> Mapping[str, Any]:
        return self._schema


def _require_concurrent(kind: type[Any], name: str, size: int) -> None:
    if size > 1 and not getattr(kind, "SUPPORTS_CONCURRENT_SESSIONS", False):
        raise RunError(
            f"{name} does not set SUPPORTS_CONCURRENT_SESSIONS = True, so its pool size must be 1, not {size}"
        )


def openenv_class(path: str) -> type[Any]:
    """The class at `module:Class`. Raises `RunError` if it is not an OpenEnv class."""
    kind = load_plugin(path, setting="--openenv")
    missing = [name for name in ("reset", "step", "state") if not hasattr(kind, name)]
    if not isinstance(kind, type) or missing:
        raise RunError(
            f"--openenv {path}: not an OpenEnv environment class; missing: {', '.join(missing) or 'a class'}"
        )
    return kind


def model_classes(path: str, kind: type[Any]) -> tuple[type[BaseModel], type[BaseModel], type[BaseModel]]:
    """The action, observation and state models: from `Environment[A, O, S]`, or from the annotations of `step` and `state`."""
    for base in kind.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            models = [
                model for model in typing.get_args(generic) if isinstance(model, type) and issubclass(model, BaseModel)
            ]
            if len(models) == 3:
                return models[0], models[1], models[2]
    hints = typing.get_type_hints(kind.step)
    action = next((hint for name, hint in hints.items() if name != "return" and _is_model(hint)), None)
    observation = hints.get("return")
    getter = getattr(kind.state, "fget", None)
    state = typing.get_type_hints(getter).get("return") if getter is not None else None
    if action is None or not _is_model(observation):
        raise RunError(
            f"--openenv {path}: it does not declare its action and observation models; "
            "derive it from Environment[MyAction, MyObservation, MyState], or annotate step"
        )
    return (
        action,
        typing.cast(type[BaseModel], observation),
        typing.cast(type[BaseModel], state) if _is_model(state) else UndeclaredState,
    )


def has_own_async(kind: type[Any], method: str) -> bool:
    """Whether a class overrides `reset_async` or `step_async`; the base class of the package only calls the plain method."""
    owner = next((base for base in kind.__mro__ if f"{method}_async" in vars(base)), None)
    return owner is not None and not (owner.__name__ == "Environment" and owner.__module__.startswith("openenv."))


def _close(env: Any) -> None:
    close = getattr(env, "close", None)
    if callable(close):
        close()


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel) and hint is not BaseModel


def _parameter_names(function: Callable[..., Any]) -> set[str] | None:
    """The parameter names of a function; None if it accepts any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}
