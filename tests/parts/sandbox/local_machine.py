"""A remote machine that is this one: the relay runs as a process, as a provider would run it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
async def open_e2b_stand_in(
    work: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[tuple[Any, Sandbox]]:
    """The stand-in for the service of E2B, and a sandbox of it. Skips the test if the package `e2b` is not installed."""
    pytest.importorskip("e2b", reason="e2b is not installed (make test-e2b)")
    serve_e2b = load_on_demand("tests.parts.sandbox.e2b_service:serve_e2b")
    async with serve_e2b() as (service, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        async with open_sandbox(Image(workdir=str(work / "work")), kind="e2b", **settings) as sandbox:
            yield service, sandbox
