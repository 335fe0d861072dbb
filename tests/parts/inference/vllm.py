"""Starts a vLLM server on the CPU, in its own virtual environment (`make vllm-cpu`). Used by `make test-vllm` only."""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollbook.access.tokens import read_token
from rollbook.run.directory import RunDirectory
from rollbook.run.processes.vllm_server import GUARD_FLAGS, REQUIRED_FLAGS, server_environment

PYTHON = Path(__file__).parents[3] / ".venvs" / "vllm" / "bin" / "python"
WANTED = "ROLLBOOK_TEST_VLLM"
START_S = 700.0
"""35 to 76 s on two idle cores."""


def why_not() -> str | None:
    """The reason for skipping vLLM tests. None: they run."""
    if not os.environ.get(WANTED):
        return "vLLM is tested by `make test-vllm`"
    return None if PYTHON.exists() else f"{PYTHON} is missing: run `make vllm-cpu`"


@contextmanager
def vllm_server(model_dir: Path, log: Path, *, has_adapters: bool = False) -> Iterator[tuple[str, str]]:
    """The URL of a server behind the guard of a run, and the token that steers it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "policy", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-num-batched-tokens", "65536", "--max-model-len", "512", *REQUIRED_FLAGS]
    command += ["--weight-transfer-config", '{"backend": "rollbook"}']
    directory = RunDirectory(log.parent / "run")
    directory.prepare()
    env = {**server_environment(directory), "OMP_NUM_THREADS": "1"}
    command += GUARD_FLAGS
    if has_adapters:
        command += ["--enable-lora", "--max-loras", "4", "--max-cpu-loras", "16", "--max-lora-rank", "8"]
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)
        try:
            _await_health(url, process, log)
            yield url, read_token(directory.token_file)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


def _await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise AssertionError(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"vLLM was not ready within {START_S:g} s:\n{log.read_text(errors='replace')[-3000:]}")
