"""What a worker process is built from: names and plain values, because the child process builds all objects itself."""

import dataclasses
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollbook.contracts.errors import RunError
from rollbook.rollout.config import RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    builder: str
    """`module:function`. The child calls it with `settings`; it returns an async context manager of a `RolloutSetup`."""
    config: RolloutConfig
    settings: Mapping[str, Any] = field(default_factory=dict)
    search_path: tuple[str, ...] = ()
    """Directories of user modules; the directory of the config file is first."""
    failures: str | None = None
    """Directory for failed episodes; None: they are not recorded."""
    judgements: str | None = None
    """File for the answers of judges; None: they are kept in memory."""
    teacher_scores: str | None = None
    """File for the answers of teachers; None: they are kept in memory."""

    def pickled(self) -> bytes:
        """The spec for the child process. Raises `RunError` that names a value which cannot be pickled."""
        try:
            return pickle.dumps(self)
        except Exception as error:
            values = [(f"settings[{key!r}]", value) for key, value in self.settings.items()]
            values += [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
            culprit = next((_culprit(name, value) for name, value in values if not _can_pickle(value)), "a part of it")
            raise RunError(
                f"the worker spec cannot be sent to its process: {culprit} cannot be pickled "
                f"({type(error).__name__}: {error}); pass names and plain values, and build objects in the builder"
            ) from error


def _culprit(path: str, value: object) -> str:
    """The innermost part that cannot be pickled: `settings['grader']['client'] (a lock)`."""
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
