"""A ledger service on loopback, in this process or in a child process that can be killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.batch import BatchManifest, EncodedBatch, EndOfRun
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.http.auth import Keys
from rollbook.ledger.rules.run_transaction import find_run
from rollbook.ledger.serve import open_ledger_service
from rollbook.ledger.service import Ledger, open_ledger
from rollbook.ledger.stores.registry import sqlite_url
from rollbook.ledger.stores.sqlite.store import open_memory_store
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def open_memory_ledger(
    *, config: LedgerConfig | None = None, clock: Clock | None = None
) -> AsyncIterator[Ledger]:
    """A real ledger whose store is in memory, without HTTP."""
    log = EventLog("ledger", echo=sys.stdout)
    async with (
        open_memory_store() as store,
        open_ledger(store, config or LedgerConfig(), clock=clock or SystemClock(), log=log) as ledger,
    ):
        yield ledger


async def read_batch(ledger: Ledger, step: int, *, epoch: int, wait_s: float) -> EncodedBatch | EndOfRun | None:
    """The batch as a trainer reads it, without HTTP."""
    decided = await ledger.decide(RUN, step, epoch=epoch, wait_s=wait_s)
    if not isinstance(decided, BatchManifest):
        return decided
    payloads = tuple([payload async for payload in ledger.payloads(RUN, decided)])
    run = await ledger.read(lambda tx: find_run(tx, RUN))
    split = await ledger.split_of(RUN, step)
    return EncodedBatch(manifest=decided, payloads=payloads, limits=run.settings.limits, split=split)


@asynccontextmanager
async def serving(
    directory: Path,
    *,
    config: LedgerConfig | None = None,
    clock: Clock | None = None,
    port: int = 0,
    run_directory: Path | None = None,
    keys: Keys | None = None,
) -> AsyncIterator[tuple[str, Ledger]]:
    log = EventLog("ledger", echo=sys.stdout)
    with listening_socket("127.0.0.1", port) as sock:
        async with (
            open_ledger_service(
                sqlite_url(directory),
                config or LedgerConfig(),
                log=log,
                clock=clock,
                run_directory=run_directory,
                keys=keys,
            ) as service,
            service.serving(sock.dup(), drain_s=5),
        ):
            yield url_of(sock), service.ledger


class LedgerChild:
    """A ledger in its own process, with the same port after each restart."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ready = self.directory / "ready"
        ready.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parts.ledger.service", str(self.directory), str(self.port)], cwd=ROOT
        )
        until = time.monotonic() + 60
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the ledger did not start: exit code {self._process.poll()}")
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


async def _serve_forever(directory: Path, port: int) -> None:
    async with serving(directory, port=port):
        (directory / "ready").touch()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve_forever(Path(sys.argv[1]), int(sys.argv[2])))
