"""Which directories the processes of a run import from, and what happens when a process cannot import its modules."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.commands.servers import run_api
from rollbook.concurrency.child_process.process import PACKAGE_ROOT, python_command, python_environment


@pytest.fixture
def parent_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a folder `rollbook` that is not the package, and no PYTHONPATH."""
    (tmp_path / "rollbook").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


@pytest.fixture
def _signal_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "module",
    [
        "rollbook.run.supervision.child_main",
        "rollbook.commands.servers.run_api",
    ],
)
def test_a_child_finds_the_package_in_the_parent_directory_of_a_clone(parent_of_a_clone: Path, module: str) -> None:
    done = subprocess.run(
        python_command(module, "--help"), env=python_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_an_environment_in_the_working_directory_is_found_there(parent_of_a_clone: Path) -> None:
    (parent_of_a_clone / "broken_lock.py").write_text("raise ValueError('imported')\n", encoding="utf-8")
    # As the console script does it: the working directory is not on the import path.
    code = f"import sys; sys.path.append({PACKAGE_ROOT!r}); from rollbook.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "env", "play", "--env", "broken_lock:Lock", "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "broken_lock:Lock" in done.stderr
    assert "ValueError: imported" in done.stderr


@pytest.mark.usefixtures("_signal_handlers")
def test_run_api_gives_up_on_a_server_that_cannot_import_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    starts: list[str] = []

    def broken(module: str, *_: str) -> list[str]:
        starts.append(module)
        return [sys.executable, "-c", "import no_such_module"]

    monkeypatch.setattr(run_api, "python_command", broken)
    code = run_api.main(["--port", "0", "--store", f"sqlite:///{tmp_path / 'store'}"])
    printed = capfd.readouterr().err
    assert code == 1
    assert len(starts) == 1
    assert "run-api: the server cannot start (exit code 1); its error is printed above" in printed
    assert "no_such_module" in printed
