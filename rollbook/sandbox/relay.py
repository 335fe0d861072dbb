"""Serves a sandbox to another machine by lines of text: the part of `remote.py` that runs inside a remote sandbox.

The remote machine is private to the sandbox, so what runs there is the host's side of an unconfined sandbox (`process.py`) with its
guest. A line is a JSON object; bytes are base64. Requests arrive on standard input; replies, output and the bytes of connections
leave on standard output. The modules that it needs travel with it: the image of the machine needs Python 3.11 and nothing else.
"""

import asyncio
import base64
import errno
import json
import marshal
import os
import pkgutil
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import Any

from rollbook.sandbox.plan import SandboxPlan
from rollbook.sandbox.process import ProcessSandbox
from rollbook.sandbox.sandbox import Image, Limits, SandboxError

RUN = "import sys; exec(compile(sys.argv[1], 'guest.py', 'exec'))"
READ_BYTES = 1 << 16
LINE_BYTES = 1 << 28
START_S = 30.0


def pack(data: bytes) -> str:
    return base64.b64encode(data).decode()


class SandboxRelay:
    """Takes: requests. Gives: replies and the bytes of connections. Ends: when its input ends."""

    def __init__(self, sandbox: ProcessSandbox) -> None:
        self._sandbox = sandbox
        self._running: dict[int, asyncio.Task[None]] = {}
        self._servers: dict[int, asyncio.Server] = {}
        self._connections: dict[int, asyncio.StreamWriter] = {}
        self._next_connection = 0

    async def serve(self, requests: asyncio.StreamReader) -> None:
        async with asyncio.TaskGroup() as group:
            while line := await requests.readline():
                message = json.loads(line)
                operation, number = message["operation"], message["number"]
                if operation == "cancel":
                    if number in self._running:
                        self._running[number].cancel()
                elif operation == "data":
                    self._to_connection(number, base64.b64decode(message["data"]))
                else:
                    task = group.create_task(self._answer(number, operation, message), name=f"relay.{operation}")
                    self._running[number] = task
                    task.add_done_callback(partial(self._forget, number))
            for task in self._running.values():
                task.cancel()

    def _forget(self, number: int, _task: asyncio.Task[None]) -> None:
        del self._running[number]

    async def _answer(self, number: int, operation: str, message: dict[str, Any]) -> None:
        try:
            value = await getattr(self, f"_{operation}")(number, **message["arguments"])
        except OSError as error:
            self._send(number=number, error=error.errno or errno.EIO, reason=error.strerror or str(error))
        except (ValueError, SandboxError) as error:
            self._send(number=number, error=errno.EINVAL, reason=str(error))
        else:
            self._send(number=number, value=value)

    async def _exec(self, number: int, stdin: str, **settings: Any) -> dict[str, Any]:
        def on_output(stream: str, data: bytes) -> None:
            self._send(number=number, stream=stream, data=pack(data))

        result = await self._sandbox.exec(stdin=base64.b64decode(stdin), on_output=on_output, **settings)
        # Some errors of a command are no output of it.
        own = pack(result.stderr) if result.exit_code in (126, 127) and not result.dropped_bytes else ""
        return {
            "exit_code": result.exit_code,
            "dropped_bytes": result.dropped_bytes,
            "is_timed_out": result.is_timed_out,
            "stderr": own,
        }

    async def _read(self, _number: int, path: str, max_bytes: int) -> str:
        return pack(await self._sandbox.read(path, max_bytes=max_bytes))

    async def _write(self, _number: int, path: str, data: str, mode: int) -> None:
        await self._sandbox.write(path, base64.b64decode(data), mode=mode)

    async def _discard(self, _number: int, path: str) -> None:
        await self._sandbox.discard(path)

    async def _inspect(self, _number: int) -> dict[str, int]:
        state = await self._sandbox.inspect()
        return {"free_bytes": state.free_bytes, "free_files": state.free_files}

    async def _end(self, _number: int) -> None:
        await self._sandbox.end_processes()

    async def _listen(self, number: int, port: int) -> None:
        accept = partial(self._accept, number)
        self._servers[number] = await asyncio.start_server(accept, "127.0.0.1", port)

    async def _unlisten(self, _number: int, listener: int) -> None:
        self._servers.pop(listener).close()

    async def _accept(self, listener: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._next_connection += 1
        connection = self._next_connection
        self._connections[connection] = writer
        self._send(listener=listener, connection=connection)
        with suppress(OSError):
            while data := await reader.read(READ_BYTES):
                self._send(connection=connection, data=pack(data))
        self._send(connection=connection, data="")

    def _to_connection(self, connection: int, data: bytes) -> None:
        """Without data: its end."""
        writer = self._connections.get(connection)
        if writer is None:
            return
        if data:
            writer.write(data)
            return
        del self._connections[connection]
        writer.close()

    def _send(self, **message: Any) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def start_guest(workdir: str) -> ProcessSandbox:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    source = pkgutil.get_data("rollbook.sandbox", "guest.py")
    assert source is not None
    program = [sys.executable, "-I", "-S", "-c", RUN, source.decode(), marshal.dumps({}, 2).hex()]
    try:
        process = subprocess.Popen(
            program, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=writer, start_new_session=True
        )
    finally:
        theirs.close()
        os.close(writer)
    plan = SandboxPlan(kind="none", image=Image(workdir=workdir), limits=Limits(), env=dict(os.environ))
    return ProcessSandbox(process, ours, plan, stderr_fd=reader)


async def main(workdir: str) -> None:
    os.makedirs(workdir, exist_ok=True)  # noqa: PTH103 - before anything else, of a string
    sandbox = start_guest(workdir)
    await sandbox.wait_until_ready(START_S)
    requests = asyncio.StreamReader(limit=LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, requests), sys.stdin)
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()
    try:
        await SandboxRelay(sandbox).serve(requests)
    finally:
        await sandbox.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
