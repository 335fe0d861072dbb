"""Compiled sources of libraries are kept for the next start, also where Python itself would not keep them."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

REPOSITORY = str(Path(__file__).parents[3])
START_A_CHILD = """
import subprocess, sys
from rollbook.concurrency.child_process.process import python_environment
subprocess.run([sys.executable, "-c", "import torch"], env=python_environment(), check=True)
"""
COMPILE = """
import sys
from rollbook.concurrency.child_process.bytecode import compile_packages
compile_packages(["torch"], cores=int(sys.argv[1]))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A library with the name of the one that decides, so that no process here imports the real one."""
    package = tmp_path / "site" / "torch"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("")
    (package / "models" / "__init__.py").write_text("")
    return package


def run(package: Path, code: str, *arguments: str, **variables: str) -> None:
    path = os.pathsep.join([str(package.parent), REPOSITORY])
    environment: Mapping[str, str] = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "PYTHONPATH": path,
        "HOME": str(package.parents[1] / "home"),
        **variables,
    }
    subprocess.run([sys.executable, "-c", code, *arguments], env=environment, check=True)


def compiled(directory: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in directory.rglob("*.pyc") if "torch" in path.parts)


def test_children_keep_compiled_sources_in_the_home_directory_where_python_would_keep_none(package: Path) -> None:
    run(package, START_A_CHILD, PYTHONDONTWRITEBYTECODE="1")
    assert compiled(package) == []
    assert compiled(package.parents[1] / "home") == ["__init__"]


def test_sources_that_are_compiled_are_not_compiled_again(package: Path) -> None:
    run(package, "import torch")
    assert compiled(package) == ["__init__"]
    run(package, START_A_CHILD, PYTHONDONTWRITEBYTECODE="1")
    assert not (package.parents[1] / "home").exists()


def test_a_place_for_compiled_sources_that_the_user_chose_is_kept(package: Path, tmp_path: Path) -> None:
    run(package, START_A_CHILD, PYTHONPYCACHEPREFIX=str(tmp_path / "chosen"))
    assert compiled(tmp_path / "chosen") == ["__init__"]
    assert not (tmp_path / "home").exists()


def test_a_package_is_compiled_before_its_import_where_there_are_cores_for_it(package: Path) -> None:
    run(package, COMPILE, "2")
    assert compiled(package) == []
    run(package, COMPILE, "8", PYTHONDONTWRITEBYTECODE="1")
    assert compiled(package) == []
    run(package, COMPILE, "8")
    assert compiled(package) == ["__init__", "part"]
