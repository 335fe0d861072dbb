"""A remote machine that is this one: the relay runs as a process, as a provider would run it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest

from rollbook.contracts.plugin import load_on_demand
from rollbook.sandbox.bubblewrap import open_sandbox
from rollbook.sandbox.remote import RemoteSandbox, relay_archive
from rollbook.sandbox.sandbox import Image, Limits, Sandbox


class LocalMachine:
    def __init__(self, process: asyncio.subprocess.Process, sandbox: RemoteSandbox) -> None:
        self.process = process
        self._reading = asyncio.create_task(self._read(sandbox))

    async def _read(self, sandbox: RemoteSandbox) -> None:
        assert self.process.stdout is not None
        while data := await self.process.stdout.read(100_000):
            sandbox.on_text(data.decode())
        sandbox.on_end("the process ended")

    async def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode())

    async def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()
        await self._reading


@asynccontextmanager
async def open_on_this_machine(limits: Limits | None = None) -> AsyncIterator[RemoteSandbox]:
    with TemporaryDirectory() as directory:
        relay, work = Path(directory, "relay.zip"), Path(directory, "work")
        relay.write_bytes(relay_archive())
        sandbox = RemoteSandbox(Image(workdir=str(work)), limits or Limits(), {"kind": "local", "network": "host"})
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(relay),
            str(work),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "HOME": directory},
        )
        try:
            await sandbox.wait_until_ready(LocalMachine(process, sandbox))
            yield sandbox
        finally:
            await sandbox.close()


@asynccontextmanager
async def serve_stand_in(kind: Literal["e2b", "modal"], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """The stand-in for the service of a provider. Skips the test if its package is not installed."""
    pytest.importorskip(kind, reason=f"{kind} is not installed (make test-{kind})")
    serve = load_on_demand(f"tests.parts.sandbox.{kind}_service:serve_{kind}")
    async with serve() as (service, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield service


@asynccontextmanager
async def open_stand_in(
    kind: Literal["e2b", "modal"], work: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Any, Sandbox]]:
    """The stand-in, and a sandbox of it."""
    async with (
        serve_stand_in(kind, monkeypatch) as service,
        open_sandbox(Image(workdir=str(work / "work")), kind=kind) as sandbox,
    ):
        yield service, sandbox
