"""The API tests that atroposlib ships in its package, run against our server. Only the port is changed."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compatibility.test_ledger_atropos_clients import PYTHON
from tests.parts.ledger.run_api import ROOT

FILES = {"test_api_compression.py": 7, "test_api_legacy.py": 3, "test_api_messages_handling.py": 26}
# The suite starts its server with `python -m atroposlib.cli.run_api`.
OUR_SERVER = "from rollbook.commands.servers.run_api import run\nrun()\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs atroposlib in its own environment: make test-atropos"),
]


def installed_suite() -> Path:
    [found] = PYTHON.parents[1].glob("lib/python*/site-packages/atroposlib/tests")
    return found


@pytest.mark.parametrize("name", FILES)
def test_the_api_tests_of_atroposlib_pass_with_our_server(tmp_path: Path, name: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    package = tmp_path / "atroposlib"
    for folder in (package, package / "cli", package / "tests"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    (package / "cli" / "run_api.py").write_text(OUR_SERVER, encoding="utf-8")
    for file in ("conftest.py", "api_test_utils.py", name):
        text = (installed_suite() / file).read_text(encoding="utf-8")
        (package / "tests" / file).write_text(re.sub(r"\b8000\b", port, text), encoding="utf-8")

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [*command, f"atroposlib/tests/{name}"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"{FILES[name]} passed" in done.stdout
