"""Compiled sources of libraries, so that child processes do not compile them at every start.

Python compiles a source file when it is imported, and writes the result next to it for the next process. With
PYTHONDONTWRITEBYTECODE, which many container images set, and in a directory that cannot be written, it does not: then each start
of a run compiles torch and transformers again, which takes longer than the rest of their import.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

CACHE: Final = Path(".cache", "rollbook", "bytecode")
"""In the home directory of the user."""
LARGEST = ("torch", "sympy", "transformers", "rollbook")
"""Four fifths of the sources that a trainer imports."""
NOT_IMPORTED = "/(models|tests?|testing)/"
"""Parts of them that are not compiled in advance: the code of all architectures is larger than the rest of transformers."""
LEAST_CORES = 8
"""With fewer, compiling these packages as a whole takes longer than compiling what is imported of them."""


@cache
def bytecode_variables() -> Mapping[str, str]:
    """Environment variables with which children keep compiled sources in the home directory of the user, where that is needed."""
    torch = _directory("torch")
    if sys.pycache_prefix is not None or torch is None or _is_compiled(torch) or _is_kept(torch):
        return {}
    try:
        home = Path.home()
    except RuntimeError:  # a user without an entry in the system's list, as in some containers
        return {}
    return {"PYTHONPYCACHEPREFIX": str(home / CACHE), "PYTHONDONTWRITEBYTECODE": ""}


def compile_packages(names: Sequence[str] = LARGEST, *, cores: int | None = None) -> None:
    """Compile packages on all cores, before they are imported one file after the other, unless that was done."""
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    found = [directory for name in names if (directory := _directory(name)) is not None]
    missing = [str(directory) for directory in found if not _is_compiled(directory) and _is_kept(directory)]
    if cores >= LEAST_CORES and missing:
        command = [sys.executable, "-P", "-m", "compileall", "-qq", "-j", str(cores), "-x", NOT_IMPORTED, *missing]
        # Files that do not compile are not imported either.
        subprocess.run(command, stdin=subprocess.DEVNULL, check=False)


def _directory(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _is_compiled(package: Path) -> bool:
    return Path(importlib.util.cache_from_source(str(package / "__init__.py"))).exists()


def _is_kept(package: Path) -> bool:
    """Whether this process would write what it compiles."""
    return not sys.dont_write_bytecode and (sys.pycache_prefix is not None or os.access(package, os.W_OK))
