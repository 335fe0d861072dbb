"""`rollbook policy serve` in a process of its own, as a user starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
START_S = 120.0


class PolicyProcess:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> str:
        """Ask it to end; what it said."""
        self.process.send_signal(signal.SIGTERM)
        _, told = self.process.communicate(timeout=60)
        return told


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
