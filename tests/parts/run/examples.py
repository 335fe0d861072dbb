"""Imports the modules of an example, as a rollout worker does."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def modules_of(example: Path, names: Sequence[str]) -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(example))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(example))
        for name in names:
            sys.modules.pop(name, None)
