"""A sandbox on another machine: a provider starts the machine and one process on it, and this module does the rest.

The process is `relay.py`, which travels as a zip file with the modules that it needs. Its input and output are lines of text, which
every provider can carry. What a provider must offer is in `RemoteMachine`.
"""

import asyncio
import base64
import io
import json
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import rollbook
from rollbook.sandbox.process import REPLY_S
from rollbook.sandbox.relay import LINE_BYTES, READ_BYTES, pack
from rollbook.sandbox.sandbox import (
    DEFAULT_OUTPUT_BYTES,
    DEFAULT_TIMEOUT_S,
    MAX_READ_BYTES,
    ExecResult,
    Image,
    Limits,
    OnOutput,
    SandboxDiedError,
    SandboxError,
    SandboxState,
)

RELAY = "/tmp/rollbook-relay.zip"
"""On the other machine."""
MODULES = (
    "contracts/errors.py",
    "contracts/user_errors.py",
    "sandbox/guest.py",
    "sandbox/plan.py",
    "sandbox/process.py",
    "sandbox/relay.py",
    "sandbox/sandbox.py",
    "sandbox/streams.py",
)
START_S = 60.0
TRANSFER_S = 120.0
"""For one file."""
RENEWED_S = 300
"""For which a machine of a provider lives on when its owner was killed."""
RENEW_S = 60.0
MAX_REASON_CHARS = 400
MAX_SEND_CHARS = 1 << 18
"""Providers refuse messages of some megabytes."""


class RemoteMachine(Protocol):
    """One machine of a provider, with the relay running on it."""

    async def send(self, line: str) -> None:
        """To the input of the relay. Raises `SandboxDiedError` if the machine is gone."""

    async def close(self) -> None:
        """End the machine. Never raises."""


@cache
def relay_archive() -> bytes:
    """What `python3 FILE WORKDIR` runs on the other machine."""
    package = Path(rollbook.__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("rollbook", "rollbook/contracts", "rollbook/sandbox"):
            archive.writestr(f"{name}/__init__.py", "")
        for module in MODULES:
            archive.write(package / module, f"rollbook/{module}")
        run = "import asyncio, sys\nfrom rollbook.sandbox.relay import main\nasyncio.run(main(sys.argv[1]))\n"
        archive.writestr("__main__.py", run)
    return buffer.getvalue()


def remote_facts(kind: str, *, network: bool, **place: str) -> dict[str, object]:
    """`place`: the image or template of the provider."""
    return {"kind": kind, **place, "network": "internet" if network else "none", "limits": {}}


def pieces(line: str) -> Iterator[str]:
    """What a provider takes in one message."""
    for at in range(0, len(line), MAX_SEND_CHARS):
        yield line[at : at + MAX_SEND_CHARS]


class RemoteSandbox:
    """Satisfies `Sandbox`. The provider calls `on_text` with what the relay prints, and `on_end` when it ended."""

    def __init__(self, image: Image, limits: Limits, facts: Mapping[str, object]) -> None:
        self.facts = facts
        self._image = image
        self._machine: RemoteMachine | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._has_ended = asyncio.Event()
        self._error: SandboxError | None = None
        self._partial = ""
        self._next_number = 0
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._outputs: dict[int, Callable[[str, bytes], None]] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._connections: dict[int, asyncio.Queue[bytes]] = {}
        self._relays: set[asyncio.Task[None]] = set()
        self.on_close: list[Callable[[], None]] = []
        self._lifetime = self._loop.call_later(limits.lifetime_s, self._on_lifetime, limits.lifetime_s)

    async def wait_until_ready(self, machine: RemoteMachine) -> None:
        self._machine = machine
        try:
            async with asyncio.timeout(START_S):
                await self._ready
        except TimeoutError as error:
            raise SandboxDiedError(f"the remote sandbox did not start within {START_S:g} s") from error

    async def ended(self) -> None:
        await self._has_ended.wait()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        on_output: OnOutput | None = None,
        reports_kill: bool = False,
        is_trusted: bool = False,
    ) -> ExecResult:
        kept = {"stdout": bytearray(), "stderr": bytearray()}

        def keep(stream: str, data: bytes) -> None:
            # The relay keeps the limit, unless the code inside writes in its name.
            data = data[: output_bytes - len(kept[stream])]
            kept[stream] += data
            if on_output is not None:
                on_output(stream, data)

        reply = await self._call(
            "exec",
            on_output=keep,
            command=command if isinstance(command, str) else list(command),
            stdin=pack(stdin),
            env={**self._image.env, **(env or {})},
            cwd=cwd,
            timeout_s=timeout_s,
            output_bytes=output_bytes,
        )
        return ExecResult(
            exit_code=reply["exit_code"],
            stdout=bytes(kept["stdout"]),
            stderr=bytes(kept["stderr"]) or base64.b64decode(reply["stderr"]),
            dropped_bytes=reply["dropped_bytes"],
            is_timed_out=reply["is_timed_out"],
        )

    async def read(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        found: str = await self._call("read", within_s=TRANSFER_S, path=path, max_bytes=max_bytes)
        return base64.b64decode(found)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._call("write", within_s=TRANSFER_S, path=path, data=pack(data), mode=mode)

    async def discard(self, path: str) -> None:
        await self._call("discard", within_s=REPLY_S, path=path)

    async def inspect(self) -> SandboxState:
        return SandboxState(**await self._call("inspect", within_s=REPLY_S))

    async def end_processes(self) -> None:
        await self._call("end", within_s=REPLY_S)

    async def snapshot(self, layer: Path) -> Image:
        raise SandboxError(f"a remote sandbox cannot be saved as {layer}: use an image of the provider")

    @asynccontextmanager
    async def forward(self, port: int, address: tuple[str, int]) -> AsyncIterator[None]:
        number = self._next_number + 1
        self._addresses[number] = address
        try:
            await self._call("listen", within_s=REPLY_S, port=port)
            yield
        finally:
            del self._addresses[number]
            if self._error is None:
                with suppress(SandboxError):
                    await self._call("unlisten", within_s=REPLY_S, listener=number)

    async def close(self) -> None:
        self._fail(SandboxDiedError("the sandbox was closed"))
        machine, self._machine = self._machine, None
        if machine is not None:
            await machine.close()
        calls, self.on_close = self.on_close, []
        for call in calls:
            call()

    async def _call(
        self,
        operation: str,
        *,
        within_s: float | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
        **arguments: Any,
    ) -> Any:
        if self._error is not None:
            raise self._error
        assert self._machine is not None
        self._next_number += 1
        number = self._next_number
        reply: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._replies[number] = reply
        if on_output is not None:
            self._outputs[number] = on_output
        try:
            async with asyncio.timeout(within_s):
                await self._send(number=number, operation=operation, arguments=arguments)
                message = await reply
        except TimeoutError:
            self._fail(SandboxDiedError(f"the remote sandbox did not answer {operation!r} within {within_s:g} s"))
            assert self._error is not None
            raise self._error from None
        except asyncio.CancelledError:
            if self._error is None:
                await asyncio.shield(self._send(number=number, operation="cancel"))
            raise
        finally:
            self._replies.pop(number, None)
            self._outputs.pop(number, None)
        if "error" in message:
            raise OSError(message["error"], message["reason"], arguments.get("path"))
        return message["value"]

    async def _send(self, **message: Any) -> None:
        if self._machine is not None:
            await self._machine.send(json.dumps(message) + "\n")

    def on_text(self, text: str) -> None:
        *lines, self._partial = (self._partial + text).split("\n")
        try:
            for line in lines:
                if line:
                    self._on_message(json.loads(line))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            # The code inside has the rights of the relay, and can write in its name.
            self._fail(SandboxDiedError(f"the remote sandbox sent an invalid message: {error!r}"))
        if len(self._partial) > LINE_BYTES:
            self._fail(SandboxDiedError(f"the remote sandbox sent a line of more than {LINE_BYTES} bytes"))

    def on_end(self, reason: str) -> None:
        self._fail(SandboxDiedError(f"the remote sandbox ended unexpectedly: {reason}"))

    def _on_message(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            if not self._ready.done():
                self._ready.set_result(None)
        elif "connection" in message:
            self._on_connection(message)
        elif "stream" in message:
            on_output = self._outputs.get(message["number"])
            if on_output is not None:
                on_output(message["stream"], base64.b64decode(message["data"]))
        else:
            reply = self._replies.get(message["number"])
            if reply is not None and not reply.done():
                reply.set_result(message)

    def _on_connection(self, message: dict[str, Any]) -> None:
        connection = message["connection"]
        if "data" in message:
            if connection in self._connections:
                self._connections[connection].put_nowait(base64.b64decode(message["data"]))
            return
        address = self._addresses.get(message["listener"])
        if address is not None:
            self._connections[connection] = asyncio.Queue()
            task = self._loop.create_task(self._relay(connection, address), name="sandbox.connection")
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)

    async def _relay(self, connection: int, address: tuple[str, int]) -> None:
        """Bytes of a connection of the sandbox to an address here, and back. Nothing: the end."""
        received = self._connections[connection]
        with suppress(OSError, SandboxError):
            reader, writer = await asyncio.open_connection(*address)
            try:
                back = self._loop.create_task(self._to_sandbox(connection, reader), name="sandbox.relay_in")
                while data := await received.get():
                    writer.write(data)
                    await writer.drain()
                writer.write_eof()
                await back
            finally:
                back.cancel()
                writer.close()
        del self._connections[connection]
        with suppress(SandboxError):
            await self._send(number=connection, operation="data", data="")

    async def _to_sandbox(self, connection: int, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(READ_BYTES):
            await self._send(number=connection, operation="data", data=pack(data))
        await self._send(number=connection, operation="data", data="")

    def _on_lifetime(self, lifetime_s: float) -> None:
        self._fail(SandboxDiedError(f"the sandbox was open for {lifetime_s:g} s (lifetime_s)"))

    def _fail(self, error: SandboxError) -> None:
        if self._error is not None:
            return
        self._error = error
        self._lifetime.cancel()
        self._has_ended.set()
        for task in self._relays:
            task.cancel()
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._replies.values()]
        for one in waiting:
            if not one.done():
                one.set_exception(error)
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # mark it as retrieved
