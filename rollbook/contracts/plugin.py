"""Things users name in the config by dotted path: `module` or `module:attribute`."""

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from rollbook.contracts.errors import RunError


class DottedPathError(RunError):
    """What the config names cannot be found or is not what it must be."""


def extend_search_path(search_path: Sequence[str]) -> None:
    """Let user modules beside the config be imported. For good: such a module may import others later."""
    for place in reversed(search_path):
        if place not in sys.path:
            sys.path.insert(0, place)


def load_attribute(path: str, search_path: Sequence[str], *, default: str | None, role: str) -> Any:
    """The object at `module:attribute`, or the `default` attribute of `module`. `role` says what the path is for."""
    module_name, colon, attribute = path.partition(":")
    if not colon and default is not None:
        attribute = default
    if not module_name or not attribute:
        raise DottedPathError(f"{role} {path!r} is not a dotted path; write it as module:attribute")
    module = _import(module_name, path, search_path, role)
    found = getattr(module, attribute, None)
    if found is None:
        raise DottedPathError(
            f"{role} {path!r}: module {module_name} has no {attribute!r}; define it, or change the path in the config"
        )
    if not callable(found):
        raise DottedPathError(f"{role} {path!r}: {attribute} is a {type(found).__name__}, not something to call")
    return found


def _import(module_name: str, path: str, search_path: Sequence[str], role: str) -> ModuleType:
    extend_search_path(search_path)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            looked = ", ".join(search_path) or "the installed packages"
            raise DottedPathError(f"{role} {path!r}: no module {module_name!r}; looked in {looked}") from error
        raise DottedPathError(f"{role} {path!r}: {module_name} imports {missing!r}, which is not installed") from error
    except Exception as error:
        raise DottedPathError(f"{role} {path!r}: importing it raised {type(error).__name__}: {error}") from error
