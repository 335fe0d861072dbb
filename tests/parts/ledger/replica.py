"""A replica of the ledger's service in a process of its own, on a listening socket that its parent keeps open over its deaths."""

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from rollbook.ledger.config import Durability, LedgerConfig, LedgerServerConfig
from rollbook.ledger.serve import serve_ledger
from rollbook.telemetry.events import EventLog

ROOT = Path(__file__).parents[3]
BACKLOG = 512


class Replica:
    """The parent's side."""

    def __init__(self, store: str, *, durability: Durability = Durability.POWER_LOSS, port: int = 0) -> None:
        self._store = store
        self._durability = durability
        self._socket = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **environment: str) -> None:
        """Does not wait: who calls it finds the socket open and is answered once the store is."""
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.parts.ledger.replica", "--store", self._store),
                *("--durability", self._durability.value, "--socket-fd", str(self._socket.fileno())),
            ],
            cwd=ROOT,
            pass_fds=[self._socket.fileno()],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.DEVNULL,
        )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        self._socket.close()


async def serve(store_url: str, durability: Durability, sock: socket.socket) -> None:
    config = LedgerServerConfig(store=store_url, ledger=LedgerConfig(durability=durability))
    await serve_ledger(config, log=EventLog("ledger", echo=sys.stdout), sock=sock)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--durability", type=Durability, required=True)
    parser.add_argument("--socket-fd", type=int, required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.store, arguments.durability, socket.socket(fileno=arguments.socket_fd)))
