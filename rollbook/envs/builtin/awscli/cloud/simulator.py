"""One MiniStack process: start on a port, health check, reset, stop."""

import asyncio
import contextlib
import secrets
import socket
from pathlib import Path

import aiohttp

from rollbook.concurrency.child_process.process import ChildProcess
from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.concurrency.tasks import first_error
from rollbook.contracts.plugin import install_command
from rollbook.envs.builtin.awscli.cloud.simulator_guard import HEADER, TOKEN_VARIABLE
from rollbook.envs.sandboxes.process import private_directory, remove_directory, start_sandbox_process
from rollbook.envs.sandboxes.sandbox import SandboxStartError
from rollbook.sandbox.sandbox import SandboxDiedError

MODULE = "rollbook.envs.builtin.awscli.cloud.simulator_process"
HOST = "127.0.0.1"
START_S = 60.0
# Long enough for an overloaded machine: replacing a healthy simulator would only add load.
HEALTH_S = 5.0
RESET_S = 10.0
KEEP_ALIVE_S = 60.0
"""How long an idle connection is kept, even if its client has closed it: one for each service that a session
used."""
# Pending connections: one worker and the pool's health checks, with a margin.
BACKLOG = 64
ENVIRONMENT = {
    "BIND_HOST": HOST,
    "LAMBDA_STRICT": "1",  # never run Lambda code on this machine
    "LOG_LEVEL": "WARNING",
    "IOT_MTLS_ENABLED": "0",  # it would bind a fixed port, which fails in a second simulator
    "SFTP_ENABLED": "0",
    "MINISTACK_WORKER_THREADS": "8",
}


class Simulator:
    """One running MiniStack. All of its state is in memory."""

    def __init__(self, child: ChildProcess, directory: Path, port: int, http: aiohttp.ClientSession) -> None:
        self._child = child
        self._directory = directory
        self._http = http
        self.port = port
        self.endpoint = f"http://{HOST}:{port}"

    @classmethod
    async def start(cls, port: int) -> "Simulator":
        """Start on `port` (0: any free one) and wait for the first response. Raises `SandboxStartError` with the cause."""
        with listening_socket(port) as listener:
            port = listener.getsockname()[1]
            directory = private_directory(f"ministack-{port}")
            token = secrets.token_hex()
            try:
                child = await start_sandbox_process(
                    MODULE,
                    settings={"socket_fd": listener.fileno(), "keep_alive_s": KEEP_ALIVE_S},
                    directory=directory,
                    environment={**ENVIRONMENT, "GATEWAY_PORT": str(port), TOKEN_VARIABLE: token},
                    inherited_fds=(listener.fileno(),),
                )
            except BaseException:
                remove_directory(directory)
                raise
        # Our copy of the socket is closed now, so connections are refused at once if the child dies.
        http = aiohttp.ClientSession(
            base_url=f"http://{HOST}:{port}",
            headers={HEADER: token},
            timeout=aiohttp.ClientTimeout(total=RESET_S),
        )
        simulator = cls(child, directory, port, http)
        try:
            await simulator._wait_until_ready()
        except BaseException:
            await simulator.stop()
            raise
        return simulator

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    @property
    def pid(self) -> int:
        return self._child.pid

    def memory_bytes(self) -> int:
        return self._child.memory_bytes()

    async def ended(self) -> None:
        await self._child.ended()

    async def is_healthy(self) -> bool:
        if not self._child.is_alive:
            return False
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_S)
            async with self._http.get("/_ministack/health", timeout=timeout) as reply:
                await reply.read()
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def reset(self) -> None:
        """Delete the state of every account."""
        try:
            async with self._http.post("/_ministack/reset") as reply:
                body = await reply.text()
                if reply.status != 200:
                    raise SandboxDiedError(f"ministack:{self.port}: reset returned {reply.status}: {body[:200]}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SandboxDiedError(f"ministack:{self.port}: reset failed: {type(error).__name__}: {error}") from error

    async def stop(self) -> None:
        """End the process and remove its directory. Never raises."""
        with contextlib.suppress(Exception):
            await self._http.close()
        await self._child.kill()
        remove_directory(self._directory)

    async def _wait_until_ready(self) -> None:
        # The socket is already listening, so the first request waits in its queue until the simulator is up; no polling is needed.
        try:
            async with Deadline(START_S, "simulator start").limit("MiniStack"), asyncio.TaskGroup() as group:
                ended = group.create_task(self._raise_at_exit(), name="envs.simulator_ended")
                await self._first_response()
                ended.cancel()
        except* SandboxStartError as errors:
            raise first_error(errors) from None
        except* DeadlineExceededError as errors:
            raise SandboxStartError(
                f"ministack:{self.port}: {first_error(errors)}; {self._child.last_output()}"
            ) from None

    async def _first_response(self) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=START_S)
            async with self._http.get("/_ministack/health", timeout=timeout) as reply:
                await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SandboxStartError(
                f"ministack:{self.port} did not respond: {type(error).__name__}: {error}; {self._child.last_output()}"
            ) from error

    async def _raise_at_exit(self) -> None:
        code = await self._child.ended()
        raise SandboxStartError(
            f"ministack:{self.port} ended with code {code} before it responded; is the extra installed "
            f"({install_command('aws')})? {self._child.last_output()}"
        )


def listening_socket(port: int) -> socket.socket:
    """Bind before the process starts, to report a port in use at once."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SandboxStartError(
            f"port {port} of {HOST} cannot be used: {error.strerror}; another pool or server uses it. Stop that one, "
            "or choose another base port (base_port, AWS_RL_ENV_MINISTACK_BASE_PORT; 0 takes any free ports)"
        ) from error
    return listener
