"""A stand-in for E2B, made from the schema in its package: the messages and routes of its API, and the service of its machines.

Each machine is a private directory of this computer, in which the real relay runs. The package `e2b` talks to it unchanged.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from e2b.api.client.models import NewSandboxV2, Sandbox
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from rollbook.concurrency.sockets import listening_socket, url_of

KEY = "e2b_" + "0" * 40
READ_BYTES = 1 << 16


class Processes:
    """The service `process.Process` of a machine: what `e2b` uses of it."""

    def __init__(self) -> None:
        self.running: dict[int, asyncio.subprocess.Process] = {}

    async def start(self, request: process_pb.StartRequest, _context: Any) -> AsyncIterator[process_pb.StartResponse]:
        assert request.process is not None
        process = await asyncio.create_subprocess_exec(
            request.process.cmd,
            *request.process.args,
            env={"PATH": os.environ["PATH"], **request.process.envs},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self.running[process.pid] = process
        try:
            yield _event("start", process_pb.ProcessEvent.StartEvent(pid=process.pid))
            printed: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
            async with asyncio.TaskGroup() as group:
                for name in ("stdout", "stderr"):
                    group.create_task(_read(getattr(process, name), name, printed))
                for _ in range(2):
                    while (found := await printed.get())[1]:
                        output = Oneof(found[0], found[1])
                        yield _event("data", process_pb.ProcessEvent.DataEvent(output=output))
            code = await process.wait()
            yield _event(
                "end", process_pb.ProcessEvent.EndEvent(exit_code=code, exited=code >= 0, status=f"exit {code}")
            )
        finally:
            self.kill(process.pid)
            del self.running[process.pid]

    async def send_input(self, request: process_pb.SendInputRequest, _context: Any) -> process_pb.SendInputResponse:
        assert request.process is not None
        assert request.input is not None
        match (request.process.selector, request.input.input):
            case Oneof(field="pid", value=pid), Oneof(field="stdin", value=data):
                stdin = self.running[pid].stdin
                assert stdin is not None
                stdin.write(data)
        return process_pb.SendInputResponse()

    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def __getattr__(self, name: str) -> Any:
        """The other methods of the service are not implemented, as its base class says."""
        return getattr(process_connect.Process, name).__get__(self)


def _event(kind: str, value: Any) -> process_pb.StartResponse:
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=Oneof(kind, value)))


async def _read(stream: asyncio.StreamReader, name: str, printed: asyncio.Queue[tuple[str, bytes]]) -> None:
    while data := await stream.read(READ_BYTES):
        printed.put_nowait((name, data))
    printed.put_nowait((name, b""))


class E2BService:
    def __init__(self) -> None:
        self.processes = Processes()
        self.created: list[NewSandboxV2] = []
        self.killed: list[str] = []
        self.renewed: list[str] = []

    @property
    def routes(self) -> list[Route | Mount]:
        return [
            Route("/v2/sandboxes", self._create, methods=["POST"]),
            Route("/sandboxes/{id}", self._kill, methods=["DELETE"]),
            Route("/sandboxes/{id}/timeout", self._renew, methods=["POST"]),
            Route("/health", self._health),
            Mount("/", process_connect.ProcessASGIApplication(self.processes)),
        ]

    async def _create(self, request: Request) -> Response:
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"code": 401, "message": "Invalid API key"}, 401)
        new = NewSandboxV2.from_dict(await request.json())
        if new.template_id != "base":
            return JSONResponse({"code": 404, "message": f"template '{new.template_id}' not found"}, 404)
        self.created.append(new)
        machine = Sandbox(
            template_id=new.template_id,
            sandbox_id=f"machine{len(self.created)}",
            client_id="client",
            envd_version="0.4.0",
            envd_access_token="token",
        )
        return JSONResponse(machine.to_dict(), 201)

    async def _kill(self, request: Request) -> Response:
        self.killed.append(request.path_params["id"])
        for pid in list(self.processes.running):
            self.processes.kill(pid)
        return Response(status_code=204)

    async def _renew(self, request: Request) -> Response:
        self.renewed.append(request.path_params["id"])
        return Response(status_code=204)

    async def _health(self, _request: Request) -> Response:
        return Response(status_code=204 if self.processes.running else 502)


@asynccontextmanager
async def serve_e2b() -> AsyncIterator[tuple[E2BService, dict[str, str]]]:
    """The service, and the environment variables with which `e2b` finds it."""
    service = E2BService()
    with listening_socket("127.0.0.1", 0) as listener:
        url = url_of(listener)
        config = uvicorn.Config(Starlette(routes=service.routes), log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield (
                service,
                {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": KEY, "E2B_HTTP_VERSION": "1.1"},
            )
        finally:
            server.should_exit = True
            await serving
