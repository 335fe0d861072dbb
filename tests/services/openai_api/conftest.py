"""`rollbook policy serve` with a tiny model, and the official openai client."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from rollbook.rollout.chat.tokenizer import ModelTokenizer
from tests.parts.inference.chat_model import chat_model

ROOT = Path(__file__).parents[3]


START_S = 400.0
"""Below the limit of a test; on a busy machine the imports alone take minutes."""


class PolicyProcess:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def stop(self) -> str:
        """Terminate it and return its stderr."""
        self.process.send_signal(signal.SIGTERM)
        _, stderr = self.process.communicate(timeout=60)
        return stderr


@contextmanager
def policy_process(scratch: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[PolicyProcess]:
    ready = scratch / f"ready-{time.monotonic_ns()}.json"
    command = [sys.executable, "-m", "rollbook", "policy", "serve", "--port", "0", "--ready-file", str(ready)]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    try:
        until = time.monotonic() + START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                raise AssertionError(f"the server did not start:\n{process.communicate()[1]}")
            time.sleep(0.02)
        yield PolicyProcess(process, json.loads(ready.read_text())["url"])
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("openai") / "model")


@pytest.fixture(scope="module")
def served(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyProcess]:
    scratch = tmp_path_factory.mktemp("serve")
    with policy_process(scratch, "--model", str(model_dir), "--served-model-name", "tiny") as process:
        yield process


@pytest.fixture
def client(served: PolicyProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> ModelTokenizer:
    return ModelTokenizer.from_directory(model_dir)
