"""The wheel alone, in an empty virtual environment: every verb shows its help or names the extra it needs."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from rollbook.cli.main import COMMANDS
from tests.parts.run.small import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PACKAGE_FILES = ("pyproject.toml", "README.md", "LICENSE", "rollbook")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that no build files are left in the repository."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    source.mkdir()
    subprocess.run(["cp", "-r", *(str(REPOSITORY / name) for name in PACKAGE_FILES), str(source)], check=True)
    command = [
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(directory),
        str(source),
    ]
    subprocess.run([sys.executable, "-m", *command], check=True)
    [built] = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a virtual environment with the wheel and its required dependencies."""
    directory = tmp_path_factory.mktemp("venv")
    venv.create(directory, with_pip=True)
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", str(wheel)]
    # With the repository on its path, pip would find the package installed already.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        pytest.skip(f"the dependencies cannot be installed here: {done.stderr[-300:]}")
    return directory / "bin"


@pytest.fixture
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def rollbook(base: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(base / "rollbook"), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("empty_directory")
def test_every_verb_shows_its_help(base: Path) -> None:
    shown = {verb: rollbook(base, verb, "--help") for verb in COMMANDS}
    assert {verb: done.stderr for verb, done in shown.items() if done.returncode != 0} == {}
    assert subprocess.run([str(base / "run-api"), "--help"], capture_output=True, check=False).returncode == 0


@pytest.mark.usefixtures("empty_directory")
def test_a_project_is_created_and_checked_and_training_names_its_extra(base: Path) -> None:
    assert rollbook(base, "init", "game").returncode == 0
    checked = rollbook(base, "config", "check", "game/run.toml")
    assert checked.returncode == 0, checked.stderr
    trained = rollbook(base, "train", "game/run.toml")
    assert trained.returncode == 1
    assert "pip install 'tokenizers" in trained.stderr
    assert "'torch>=" in trained.stderr


def test_the_demo_runs_from_the_wheel(wheel: Path, empty_directory: Path) -> None:
    """With the libraries of this interpreter and the modules of the wheel: torch is too large to install for a test."""
    environment = {**os.environ, "PYTHONPATH": str(empty_directory / "unpacked")}
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), "unpacked"], check=True)
    command = [
        "rollbook",
        "demo",
        "--run-dir",
        "run",
        "--set",
        "trainer.max_steps=2",
        "--set",
        "gate.groups_per_step=4",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-m", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"audit": "ok"' in done.stdout
    assert sysconfig.get_paths()["purelib"] not in (empty_directory / "run" / "run.json").read_text(encoding="utf-8")
