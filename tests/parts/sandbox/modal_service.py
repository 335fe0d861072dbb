"""A stand-in for Modal, made from the protobuf files in its package: the calls of its API and of its workers that a sandbox needs.

Each sandbox is a process of this computer, in which the real relay runs. The package `modal` talks to it unchanged, by gRPC.
"""

import asyncio
import base64
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import modal
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Server
from modal.exception import AuthError
from modal_proto import api_pb2, task_command_router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from rollbook.concurrency.sockets import listening_socket, url_of
from tests.parts.concurrency.until import until

READ_BYTES = 1 << 16
TOKEN = "as-" + "0" * 22


class ModalService(ModalClientBase):  # type: ignore[misc]
    def __init__(self, url: str) -> None:
        self._url = url
        self.created: list[Any] = []
        self.terminated: list[str] = []
        self.inputs: list[bytes] = []
        self.running: dict[str, asyncio.subprocess.Process] = {}

    async def ClientHello(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.ClientHelloResponse())

    async def EnvironmentGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata))

    async def AppGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        if stream.metadata.get("x-modal-token-secret") != TOKEN:
            raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id="ap-1"))

    async def ImageGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        if any("absent" in line for line in request.image.dockerfile_commands):
            raise GRPCError(Status.NOT_FOUND, "image 'absent' not found")
        done = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        await stream.send_message(api_pb2.ImageGetOrCreateResponse(image_id="im-1", result=done))

    async def AuthTokenGet(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=_jwt()))

    async def SandboxCreateV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        self.created.append(request.definition)
        task = f"ta-{len(self.created)}"
        _, *arguments = request.definition.entrypoint_args
        self.running[task] = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            env={"PATH": os.environ["PATH"]},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        access = api_pb2.CommandRouterAccess(jwt=_jwt(), url=self._url)
        response = api_pb2.SandboxCreateV2Response(
            sandbox_id=f"sb-2-{len(self.created)}", task_id=task, command_router_access=access
        )
        await stream.send_message(response)

    async def SandboxTerminateV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        self.terminated.append(request.sandbox_id)
        for task in self.running:
            self.kill(task)
        await stream.send_message(api_pb2.SandboxTerminateResponse())

    def kill(self, task: str) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.running[task].pid, signal.SIGKILL)


class Worker(TaskCommandRouterBase):  # type: ignore[misc]
    """What a worker of Modal does for its sandboxes."""

    def __init__(self, service: ModalService) -> None:
        self._service = service

    async def SandboxStdinWriteV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        process = self._service.running[request.task_id]
        self._service.inputs.append(request.data)
        assert process.stdin is not None
        process.stdin.write(request.data)
        await stream.send_message(task_command_router_pb2.SandboxStdinWriteV2Response())

    async def SandboxStdioReadV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        process = self._service.running[request.task_id]
        is_output = request.file_descriptor == task_command_router_pb2.SANDBOX_STDIO_FILE_DESCRIPTOR_STDOUT
        source = process.stdout if is_output else process.stderr
        assert source is not None
        while data := await source.read(READ_BYTES):
            await stream.send_message(task_command_router_pb2.SandboxStdioReadV2Response(data=data))


def _jwt() -> str:
    payload = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 3600}).encode()).decode().rstrip("=")
    return f"e30.{payload}.signature"


def _without_the_rest(base: type, name: str, service: type) -> type:
    """The class with all other calls of its service, which are not implemented."""

    async def refuse(_self: Any, stream: Any) -> None:
        raise GRPCError(Status.UNIMPLEMENTED, "not implemented")

    missing = base.__abstractmethods__ - set(service.__dict__)  # type: ignore[attr-defined]
    return type(name, (service,), dict.fromkeys(missing, refuse))


@asynccontextmanager
async def serve_modal() -> AsyncIterator[tuple[ModalService, dict[str, str]]]:
    """The service, and the environment variables with which `modal` finds it."""
    with listening_socket("127.0.0.1", 0) as listener:
        url = url_of(listener)
        service = _without_the_rest(ModalClientBase, "Service", ModalService)(url)
        server = Server([service, _without_the_rest(TaskCommandRouterBase, "Worker", Worker)(service)])
        await server.start(sock=listener)
        try:
            yield (
                service,
                {
                    "MODAL_SERVER_URL": url,
                    "MODAL_TOKEN_ID": "ak-test",
                    "MODAL_TOKEN_SECRET": TOKEN,
                    "MODAL_CONFIG_PATH": os.devnull,
                },
            )
        finally:
            for task, process in service.running.items():
                service.kill(task)
                await process.wait()
            # The package keeps one connection for each process.
            with suppress(AuthError):
                await (await modal.Client.from_env.aio()).close.aio()
            await until(lambda: all(connection.closing for connection in server._handlers))
            server.close()
            await server.wait_closed()
