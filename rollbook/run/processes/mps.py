"""The process that owns the MPS server of a run: starts NVIDIA's control program in the foreground, watches it, and ends it.

A client whose server has died cannot go on, so the supervisor ends all clients when this process dies, and starts them after it.
A request to stop is fulfilled when no client is left: a batch system sends it to all processes at once, and the trainer then still
writes a checkpoint.
"""

import asyncio
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

from rollbook.concurrency.child_process.process import exit_reason, python_environment
from rollbook.contracts.errors import RunError, WorkerError
from rollbook.run.resources.mps import (
    CLIENTS,
    HOW_TO_INSTALL,
    PID_FILE,
    PROGRAM,
    has_clients,
    is_program,
    kill_programs,
    mps_directory,
    mps_environment,
    other_server,
    program,
    programs_of,
)
from rollbook.run.supervision.child_main import RoleContext

START_S = 30.0
"""Limit for the start of the control program and its first server."""
LISTEN_S = 1.0
"""How long commands wait for the file with its process id."""
COMMAND_S = 10.0
"""Limit for the reply to one command."""
POLL_S = 0.1
STATUS_EVERY_S = 3.0
ORPHAN_S = 2.0
"""After the death of the supervisor, clients may end in order for this long. This process is forced to exit soon after."""
QUIT_S = 1.0
KILL_S = 1.0
SHOWN_BYTES = 2000
"""Of each log, in an error."""
FAULT = "FAULT"
"""The status of a server one of whose clients had a fatal error on a GPU. It accepts no client until all have ended."""
START_SERVER = f"start_server -uid {os.getuid()}"
BELONGING = """
import os, sys
from rollbook.concurrency.child_process.child import kill_with_parent
kill_with_parent()
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Starts a program that the kernel kills when this process dies."""
PROBE = """
import ctypes, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit(0)
name, context = ctypes.c_char_p(), ctypes.c_void_p()
fault = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
if fault:
    cuda.cuGetErrorName(fault, ctypes.byref(name))
    sys.exit(f"CUDA error {fault} ({(name.value or b'unknown').decode()})")
cuda.cuDevicePrimaryCtxRelease(0)
"""
"""Uses a GPU as a client would. Without a CUDA driver there is nothing to try."""


async def main(context: RoleContext) -> str:
    place = mps_directory(context.directory)
    if left := kill_programs(place):
        context.log.warning("mps.left_over_ended", pids=left)
    server = _Server(context, place)
    try:
        await server.start()
        found = other_server(os.environ)
        context.log.info("mps.serving", place=str(place), pids=programs_of(place), other=found)
        context.channel.ready(f"serving{'' if found is None else f'; {found}, which is left alone'}")
        await server.watch()
    finally:
        await server.end()
    return "stopped"


class _Server:
    def __init__(self, context: RoleContext, place: Path) -> None:
        self._context = context
        self._place = place
        resources = context.loaded.config.resources
        are_named = resources.trainer_gpus and resources.policy_gpus
        gpus = sorted({*resources.trainer_gpus, *resources.policy_gpus}) if are_named else []
        ours = {name: value for name, value in python_environment().items() if not name.startswith("CUDA_MPS_")}
        self._environment = {**ours, **mps_environment(context.directory, gpus)}
        self._control: asyncio.subprocess.Process | None = None
        self._servers: list[int] = []
        self._parent = os.getppid()
        self._orphan_since: float | None = None

    async def start(self) -> None:
        """Returns when a client could use it. Raises `RunError` with the cause and what to do."""
        path = program()
        if path is None:
            raise RunError(f"{PROGRAM} is not on the PATH. {HOW_TO_INSTALL}. Install it, or set resources.mps = false")
        # Sockets of a server that was killed would be taken for its successor's.
        shutil.rmtree(self._place, ignore_errors=True)
        (mps_directory(self._context.directory) / CLIENTS).touch()
        self._control = control = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", BELONGING, path, "-f", env=self._environment, stdin=asyncio.subprocess.DEVNULL
        )
        began = time.monotonic()
        until, listens_by = began + START_S, began + LISTEN_S
        while not self._context.draining.is_set():
            if control.returncode is not None:
                raise self._no_server(f"it {exit_reason(control.returncode)}")
            if not (self._place / PID_FILE).exists() and time.monotonic() < listens_by:
                await asyncio.sleep(POLL_S)
                continue
            # The client starts a server too. If both fail, the list is empty.
            await self._command(START_SERVER)
            if fault := await self._why_no_client():
                cause = f"a client got {fault}"
            elif any(word.isdigit() for word in (await self._command("get_server_list")).split()):
                self._servers = [pid for pid in programs_of(self._place) if pid != control.pid]
                return
            else:
                cause = "it started no server"
            if time.monotonic() > until:
                raise self._no_server(f"{cause} within {START_S:g} s")
            await asyncio.sleep(POLL_S)

    async def watch(self) -> None:
        """Returns when the run stops and no client is left. Raises `WorkerError` if the server can no longer be used."""
        assert self._control is not None
        asked_at = time.monotonic()
        while not (self._context.draining.is_set() and await self._is_released()):
            if self._control.returncode is not None:
                raise WorkerError(f"{PROGRAM} {exit_reason(self._control.returncode)}")
            if dead := [pid for pid in self._servers if not is_program(pid)]:
                raise WorkerError(f"its server (pid {dead[0]}) died")
            if time.monotonic() - asked_at >= STATUS_EVERY_S:
                asked_at = time.monotonic()
                for pid in self._servers:
                    if FAULT in await self._command(f"get_server_status {pid}"):
                        raise WorkerError(
                            f"its server (pid {pid}) ended its clients, because one had an error on the GPU"
                        )
            await asyncio.sleep(POLL_S)

    async def end(self) -> None:
        """End the control program and its servers, in order or by force, and remove their files. The logs stay with the run."""
        if self._control is not None and self._control.returncode is None:
            await self._command("quit", within_s=QUIT_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIT_S):
                    await self._control.wait()
        until = time.monotonic() + KILL_S
        while kill_programs(self._place) and time.monotonic() < until:  # noqa: ASYNC110  # their ends have no event
            await asyncio.sleep(POLL_S)
        for log in self._place.glob("*.log"):
            with suppress(OSError):
                shutil.copyfile(log, self._context.directory.logs / f"mps-{log.name}")
        shutil.rmtree(self._place, ignore_errors=True)

    async def _is_released(self) -> bool:
        """Whether no client is left. Without a supervisor, clients are waited for only a moment."""
        if self._orphan_since is None and os.getppid() != self._parent:
            self._orphan_since = time.monotonic()
        is_late = self._orphan_since is not None and time.monotonic() - self._orphan_since > ORPHAN_S
        return is_late or not has_clients(self._place)

    async def _why_no_client(self) -> str:
        code, output = await _run([sys.executable, "-P", "-c", PROBE], self._environment, within_s=START_S)
        return "" if code == 0 else output.strip() or f"no answer ({exit_reason(code)})"

    async def _command(self, command: str, *, within_s: float = COMMAND_S) -> str:
        """The reply of the control program to a command; empty if it gave none."""
        path = program()
        if path is None:
            return ""
        _, output = await _run([path], self._environment, within_s=within_s, given=f"{command}\n")
        return output

    def _no_server(self, cause: str) -> RunError:
        found = other_server(os.environ)
        logs = [_end_of(log) for log in sorted(self._place.glob("*.log"))]
        return RunError(
            f"{PROGRAM} -f cannot be used: {cause}. "
            + (f"There is another one: {found}. " if found else "")
            + "A GPU in the mode EXCLUSIVE_PROCESS (nvidia-smi -q -d COMPUTE) accepts one server only. Correct that, or set "
            "resources.mps = false: the processes then take turns on the GPU"
            + "".join(f"\n{text}" for text in logs if text)
        )


async def _run(
    command: list[str], environment: dict[str, str], *, within_s: float, given: str = ""
) -> tuple[int | None, str]:
    """The exit code and the output of a command. Without an exit code: it was killed after `within_s`."""
    # All of the input is in the pipe before the command starts: uvloop fails to write to a command that has ended.
    reading, writing = os.pipe()
    try:
        os.write(writing, given.encode())
        os.close(writing)
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=reading,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    finally:
        os.close(reading)
    try:
        async with asyncio.timeout(within_s):
            output, _ = await process.communicate()
            return process.returncode, output.decode(errors="replace")
    except TimeoutError:
        return None, f"no answer within {within_s:g} s"
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _end_of(log: Path) -> str:
    with suppress(OSError):
        text = log.read_bytes()[-SHOWN_BYTES:].decode(errors="replace").strip()
        return f"{log.name}: {text}" if text else ""
    return ""
