"""What a worker process is built from: names and plain values, because the child builds everything itself."""

import dataclasses
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollbook.contracts.errors import RunError
from rollbook.rollout.settings.groups import GroupRules
from rollbook.rollout.settings.rewards import RewardRules


class RecipeError(RunError):
    """A worker cannot be built from this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecipe:
    builder: str
    """`module:function`; called in the child with `settings`, returns an async context manager of a `RolloutSetup`."""
    rollout: str
    """`module` or `module:attribute` of `make_rollout`."""
    rules: GroupRules
    rewards: RewardRules | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    search_path: tuple[str, ...] = ()
    """Directories in which user modules are looked for, the config's own first."""

    def pickled(self) -> bytes:
        """The recipe as the child gets it. A field that cannot cross the process edge is named here, before anything is spawned."""
        try:
            return pickle.dumps(self)
        except Exception as error:
            culprit = next(
                (_culprit(name, value) for name, value in self._parts() if not _can_pickle(value)), "a part of it"
            )
            raise RecipeError(
                f"the worker's recipe cannot be sent to its process: {culprit} cannot be pickled "
                f"({type(error).__name__}: {error}); pass names and plain values, and build objects in the builder"
            ) from error

    def _parts(self) -> list[tuple[str, object]]:
        parts: list[tuple[str, object]] = [(f"settings[{key!r}]", value) for key, value in self.settings.items()]
        parts += [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        return parts


def _culprit(path: str, value: object) -> str:
    """The innermost part of a value that cannot be pickled: `settings['grader']['client'] (a lock)`."""
    parts: list[tuple[str, object]] = []
    if isinstance(value, Mapping):
        parts = [(f"{path}[{key!r}]", inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{number}]", inner) for number, inner in enumerate(value)]
    for inner_path, inner in parts:
        if not _can_pickle(inner):
            return _culprit(inner_path, inner)
    return f"{path} (a {type(value).__qualname__})"


def _can_pickle(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
