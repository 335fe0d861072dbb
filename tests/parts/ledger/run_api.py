"""The command `run-api` in its own processes. Its server process can be killed."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 60.0


class RunApi:
    def __init__(self, store: str, port: int, *options: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rollbook.commands.servers.run_api",
                "--port",
                str(port),
                "--store",
                store,
                *options,
            ],
            cwd=ROOT,
        )

    def server(self) -> psutil.Process:
        """The server process, a child of the process that holds the socket."""
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            children = [p for p in psutil.Process(self._process.pid).children() if p.status() != psutil.STATUS_ZOMBIE]
            if children:
                return children[0]
            time.sleep(0.02)
        raise RuntimeError("run-api started no server")

    def kill_server(self) -> None:
        self.server().kill()

    def stop(self) -> int:
        self._process.terminate()
        return self._process.wait(TIMEOUT_S)

    def wait(self) -> int:
        """Wait for the command to end by itself; its exit code."""
        return self._process.wait(TIMEOUT_S)

    def wait_until_ready(self) -> None:
        """The server responds. A connection waits while it opens its store, and breaks when it is killed."""
        self.wait_until_listening()
        until = time.monotonic() + TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/status", timeout=TIMEOUT_S).close()
                return
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def wait_until_listening(self) -> None:
        until = time.monotonic() + TIMEOUT_S
        host, port = self.url.removeprefix("http://").split(":")
        while True:
            try:
                socket.create_connection((host, int(port))).close()
                return
            except ConnectionRefusedError:
                if time.monotonic() > until or self._process.poll() is not None:
                    raise
                time.sleep(0.05)


@contextmanager
def running_api(store: str, *options: str) -> Iterator[RunApi]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    api = RunApi(store, port, *options)
    try:
        yield api
    finally:
        api.stop()
