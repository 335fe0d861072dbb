"""The host's side of a sandbox: sends requests to the guest (`guest.py`), reads the output of commands, and ends everything.

Files and ports are opened by the guest, with the rights and the paths of the sandbox, and arrive here as file descriptors. The host
never resolves a path of the sandbox, so a symbolic link cannot lead it anywhere else.
"""

import asyncio
import errno
import marshal
import os
import posixpath
import signal
import socket
import stat
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rollbook.sandbox.guest import MAX_PACKET_BYTES
from rollbook.sandbox.plan import SandboxPlan
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
    SandboxLimitError,
    SandboxState,
)
from rollbook.sandbox.streams import (
    Output,
    accept_connections,
    input_fd,
    read_all,
    require_regular,
    until_event,
    write_all,
)

REPLY_S = 10.0
"""How long the guest may take to answer. It does so within a millisecond, unless the machine is overloaded."""
KILL_S = 10.0
"""How long the kernel may take to end a killed sandbox."""
SNAPSHOT_S = 120.0
INLINE_BYTES = 1 << 20
"""Shorter files are read and written in the event loop: they are in memory, and a thread would take longer."""
MAX_STDERR_BYTES = 4096
UNITS = {"memory_bytes": ("memory_mb", 2**20, "MB"), "cpu_s": ("cpu_s", 1, "s"), "wall_s": ("wall_s", 1, "s")}


class ProcessSandbox:
    """A sandbox whose guest is a child process. Satisfies `Sandbox`."""

    def __init__(
        self, process: subprocess.Popen[bytes], channel: socket.socket, plan: SandboxPlan, *, stderr_fd: int
    ) -> None:
        self.facts: Mapping[str, object] = plan.facts
        self._process = process
        self._channel = channel
        self._stderr_fd = stderr_fd
        self.plan = plan
        # Now: the machine may replace a file later, of which the sandbox keeps the old one.
        self._mounts = {path: _identity_of(source) for path, source in plan.mounts.items()}
        self._excluded = (*plan.others, *plan.mounts)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._has_ended = asyncio.Event()
        self._replies: dict[int, asyncio.Future[_Reply]] = {}
        self._next_number = 0
        self._error: SandboxError | None = None
        self._is_closed = False
        self._guest_fd: int | None = None
        self.printed = ""
        """What it printed before it ended unexpectedly."""
        self.on_close: list[Callable[[], None]] = []
        channel.setblocking(False)
        self._loop.add_reader(channel.fileno(), self._on_packets)
        self._lifetime = self._loop.call_later(plan.limits.lifetime_s, self._on_lifetime)

    async def wait_until_ready(self, within_s: float) -> None:
        """Raises `SandboxDiedError` with what it printed, if it ended before."""
        async with asyncio.timeout(within_s):
            await self._ready

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
        stdin_fd = input_fd(stdin)
        try:
            return await self._run(
                ["/bin/sh", "-c", command] if isinstance(command, str) else list(command),
                stdin_fd,
                {**self.plan.env, **(env or {})},
                self._path(cwd or "."),
                timeout_s,
                Output(output_bytes, on_output),
                (*self.plan.kill_watch, is_trusted) if reports_kill and self.plan.kill_watch else None,
            )
        finally:
            os.close(stdin_fd)

    async def read(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        fd = await self._open(path, os.O_RDONLY)
        try:
            require_regular(fd, path)
            size = os.fstat(fd).st_size
            if size > max_bytes:
                raise OSError(errno.EFBIG, f"it is longer than {max_bytes} bytes", path)
            is_long = size > INLINE_BYTES
            data = await asyncio.to_thread(read_all, fd, max_bytes) if is_long else read_all(fd, max_bytes)
            if len(data) > max_bytes:
                raise OSError(errno.EFBIG, f"it is longer than {max_bytes} bytes", path)
            return data
        finally:
            os.close(fd)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        fd = await self._open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode, makes_parents=True)
        try:
            require_regular(fd, path)
            if len(data) > INLINE_BYTES:
                await asyncio.to_thread(write_all, fd, data)
            else:
                write_all(fd, data)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
        finally:
            os.close(fd)

    async def discard(self, path: str) -> None:
        reply = await self._request("discard", self._path(path))
        if reply.value:
            raise OSError(-reply.value, os.strerror(-reply.value), path)

    async def inspect(self) -> SandboxState:
        fd = await self._open("/", os.O_RDONLY | os.O_DIRECTORY)
        try:
            disk = os.fstatvfs(fd)
        finally:
            os.close(fd)
        return SandboxState(
            free_bytes=disk.f_bavail * disk.f_frsize,
            free_files=self.plan.limits.files - (disk.f_files - disk.f_ffree),
            read_only=tuple(self._mounts),
            moved=tuple([path for path, known in self._mounts.items() if await self._identity(path) != known]),
        )

    async def _identity(self, path: str) -> "_Identity | None":
        try:
            fd = await self._open(path, os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            seen = os.fstat(fd)
            return os.readlink("", dir_fd=fd) if stat.S_ISLNK(seen.st_mode) else (seen.st_dev, seen.st_ino)
        finally:
            os.close(fd)

    async def end_processes(self) -> None:
        await self._request("end")

    async def snapshot(self, layer: Path) -> Image:
        if not self._excluded:
            raise SandboxError('sandbox = "none" has no files of its own: a snapshot needs bubblewrap')
        excluded = [f"--exclude=.{mount}" for mount in self._excluded]
        most_bytes = 2 * self.plan.limits.disk_mb * 2**20
        partial = layer.with_name(f"{layer.name}.partial")
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            with partial.open("wb") as file:
                written = 0

                def keep(stream: str, data: bytes) -> None:
                    nonlocal written
                    if stream == "stdout" and written <= most_bytes:
                        written += file.write(data)

                command = ["tar", "-C", "/", "--one-file-system", "--sparse", *excluded, "-cf", "-", "."]
                output = Output(MAX_STDERR_BYTES, keep, is_kept=False)
                result = await self._run(command, null, dict(self.plan.env), "/", SNAPSHOT_S, output)
            # 1: a file changed while it was read.
            if result.exit_code not in (0, 1) or written > most_bytes:
                raise SandboxError(
                    f"the snapshot failed: {_last_line(result.stderr) or f'{written} bytes are too many'}"
                )
            partial.replace(layer)
        finally:
            os.close(null)
            partial.unlink(missing_ok=True)
        return replace(self.plan.image, layer=layer)

    async def unpack(self, layer: Path) -> None:
        """Unpack a tar file of the host. The file is passed itself: only before any foreign code runs in this sandbox."""
        fd = os.open(layer, os.O_RDONLY)
        try:
            command = ["tar", "-C", "/", "--no-same-owner", "-xpf", "-"]
            result = await self._run(command, fd, dict(self.plan.env), "/", SNAPSHOT_S, Output(MAX_STDERR_BYTES, None))
        finally:
            os.close(fd)
        if result.exit_code != 0:
            raise SandboxError(f"the image {layer} cannot be unpacked: {_last_line(result.stderr)}")

    @asynccontextmanager
    async def forward(self, port: int, address: tuple[str, int]) -> AsyncIterator[None]:
        reply = await self._request("listen", port)
        if reply.fd is None:
            raise SandboxError(f"port {port} of the sandbox cannot be opened: {os.strerror(-reply.value)}")
        listener = socket.socket(fileno=reply.fd)
        listener.setblocking(False)
        accepting = self._loop.create_task(accept_connections(listener, address), name=f"sandbox.forward.{port}")
        try:
            yield
        finally:
            accepting.cancel()
            await asyncio.wait({accepting})
            listener.close()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._end(SandboxDiedError("the sandbox was closed"))
        # The guest has ended only when all processes of its namespace have.
        ends = [fd for fd in (self._guest_fd, _pidfd_of(self._process)) if fd is not None]
        try:
            async with asyncio.timeout(KILL_S):
                for fd in ends:
                    await until_event(self._loop.add_reader, self._loop.remove_reader, fd)
        except TimeoutError:
            self._kill_process()
        finally:
            self._process.poll()
            for fd in (*ends, self._stderr_fd):
                os.close(fd)
            for call in self.on_close:
                call()

    async def _run(  # noqa: PLR0917 - one caller for each form of a command
        self,
        argv: list[str],
        stdin_fd: int,
        env: dict[str, str],
        cwd: str,
        timeout_s: float | None,
        output: Output,
        kill_watch: tuple[Any, ...] | None = None,
    ) -> ExecResult:
        number, ended = self._new_reply()
        fds = output.open(self._loop)
        is_timed_out = False
        try:
            try:
                await self._send(number, "exec", (argv, env, cwd, kill_watch), (stdin_fd, *fds))
            except _TooLongError as error:
                return _not_started(
                    126, f"{argv[0][:99]}: the command {error.strerror}; write it to a file and run that"
                )
            finally:
                for fd in fds:
                    os.close(fd)
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await asyncio.shield(ended)
            except TimeoutError:
                is_timed_out = True
                reply = await self._kill(number, ended)
            except asyncio.CancelledError:
                self._signal(number)
                raise
        finally:
            output.close()
            self._forget(number)
        if not reply.is_exit:
            is_found = -reply.value not in (errno.ENOENT, errno.ENOTDIR)
            return _not_started(126 if is_found else 127, f"{argv[0]}: {os.strerror(-reply.value)} (in {cwd})")
        return output.result(reply.value, is_timed_out=is_timed_out)

    async def _kill(self, number: int, ended: "asyncio.Future[_Reply]") -> "_Reply":
        self._signal(number)
        try:
            async with asyncio.timeout(KILL_S):
                return await asyncio.shield(ended)
        except TimeoutError:
            error = SandboxDiedError(f"the sandbox did not end a command within {KILL_S:g} s of its deadline")
            self._end(error)
            raise error from None

    def _signal(self, command: int) -> None:
        """Kill the process group of a command, without waiting for the reply."""
        self._next_number += 1
        packet = marshal.dumps((self._next_number, "signal", (command, int(signal.SIGKILL))), 2)
        with suppress(OSError):
            self._channel.send(packet)

    async def _open(self, path: str, flags: int, mode: int = 0, *, makes_parents: bool = False) -> int:
        reply = await self._request("open", self._path(path), flags, mode, makes_parents)
        if reply.fd is None:
            raise OSError(-reply.value, os.strerror(-reply.value), path)
        return reply.fd

    def _path(self, path: str) -> str:
        return posixpath.join(self.plan.image.workdir, path)

    def _on_lifetime(self) -> None:
        self._end(SandboxDiedError(f"the sandbox was open for {self.plan.limits.lifetime_s:g} s (lifetime_s)"))

    async def _request(self, operation: str, *arguments: Any) -> "_Reply":
        number, reply = self._new_reply()
        try:
            async with asyncio.timeout(REPLY_S):
                await self._send(number, operation, arguments)
                return await reply
        except asyncio.CancelledError:
            if reply.done() and not reply.cancelled() and reply.exception() is None:
                fd = reply.result().fd  # it arrived together with the cancellation
                if fd is not None:
                    os.close(fd)
            raise
        except TimeoutError:
            error = SandboxDiedError(f"the sandbox did not answer {operation!r} within {REPLY_S:g} s")
            self._end(error)
            raise error from None
        finally:
            self._forget(number)

    def _new_reply(self) -> tuple[int, "asyncio.Future[_Reply]"]:
        if self._error is not None:
            raise self._error
        self._next_number += 1
        reply: asyncio.Future[_Reply] = self._loop.create_future()
        self._replies[self._next_number] = reply
        return self._next_number, reply

    def _forget(self, number: int) -> None:
        reply = self._replies.pop(number, None)
        if reply is not None and not reply.cancel() and not reply.cancelled():
            reply.exception()  # mark it as retrieved

    async def _send(self, number: int, operation: str, arguments: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
        packet = marshal.dumps((number, operation, arguments), 2)
        too_long = _TooLongError(errno.E2BIG, f"has {len(packet)} bytes")
        if len(packet) > MAX_PACKET_BYTES:
            raise too_long
        while True:
            if self._error is not None:
                raise self._error
            try:
                socket.send_fds(self._channel, [packet], list(fds))
            except BlockingIOError:
                await until_event(self._loop.add_writer, self._loop.remove_writer, self._channel.fileno())
            except (BrokenPipeError, ConnectionResetError):
                self._on_packets()
                continue  # the reason is known now
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                raise too_long from error
            else:
                return

    def _on_packets(self) -> None:
        while self._error is None:
            try:
                packet, ancillary, _, _ = self._channel.recvmsg(4096, 256)
            except BlockingIOError:
                return
            except OSError:
                packet, ancillary = b"", []
            if not packet:
                self.printed = self._read_errors()
                reason = f": {self.printed}" if self.printed else ""
                self._end(SandboxDiedError(f"the sandbox ended unexpectedly{reason}"))
            else:
                self._on_packet(packet.decode().split(), ancillary)

    def _on_packet(self, words: list[str], ancillary: list[tuple[int, int, bytes]]) -> None:
        parts = {kind: data for level, kind, data in ancillary if level == socket.SOL_SOCKET}
        fds = [fd for (fd,) in struct.iter_unpack("i", parts.get(socket.SCM_RIGHTS, b""))]
        match words:
            case ["ready"]:
                # The kernel adds the process id of the sender, as this process sees it.
                pid, _, _ = struct.unpack("3i", parts[socket.SCM_CREDENTIALS])
                self._guest_fd = os.pidfd_open(pid)
                _prefer(pid)
                if not self._ready.done():
                    self._ready.set_result(None)
            case ["over", name, value]:
                self._end(_over(self.plan.limits, name, int(value)))
            case ["killed", number, _]:
                reply = self._replies.get(int(number))
                if reply is not None and not reply.done():
                    reply.set_exception(SandboxError("the command was killed (SIGKILL) from outside of its sandbox"))
            case [("done" | "exit") as kind, number, value]:
                reply = self._replies.get(int(number))
                if reply is not None and not reply.done():
                    reply.set_result(_Reply(kind == "exit", int(value), fds.pop() if fds else None))
        for fd in fds:
            os.close(fd)

    def _end(self, error: SandboxError) -> None:
        if self._error is not None:
            return
        self._error = error
        self._lifetime.cancel()
        self._has_ended.set()
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if self._excluded:
            # The kernel ends a process namespace with its first process, the guest. Unconfined, the guest ends what it started.
            self._kill_process()
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._replies.values()]
        for reply in waiting:
            if not reply.done():
                reply.set_exception(error)
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # mark it as retrieved

    def _kill_process(self) -> None:
        if self._guest_fd is not None:
            # The guest in a container of Docker may be of another user. It ends with the channel.
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._guest_fd, signal.SIGKILL)
        self._process.kill()

    def _read_errors(self) -> str:
        try:
            return os.read(self._stderr_fd, MAX_STDERR_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""


_Identity: TypeAlias = tuple[int, int] | str
"""Device and number of a file, or the target of a symbolic link."""


def _identity_of(source: Path) -> _Identity:
    if source.is_symlink():
        return str(source.readlink())
    found = source.stat()
    return found.st_dev, found.st_ino


class _TooLongError(OSError):
    """A request that does not fit into one packet."""


class _Reply(NamedTuple):
    is_exit: bool
    """The command has ended, and `value` is its exit code. Otherwise `value` is 0 or a negative error number."""
    value: int
    fd: int | None


def _prefer(pid: int) -> None:
    """Let the guest run before the commands, which do not inherit that: a thousand new processes must not keep it from ending them.
    The kernel allows it to root only; it limits the processes of an ordinary user itself."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, pid, -20)
        os.sched_setscheduler(pid, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def _not_started(exit_code: int, reason: str) -> ExecResult:
    """By the command's own fault."""
    return ExecResult(exit_code=exit_code, stdout=b"", stderr=f"{reason}\n".encode(errors="replace"))


def _over(limits: Limits, name: str, value: int) -> SandboxLimitError:
    setting, scale, unit = UNITS.get(name, (name, 1, ""))
    return SandboxLimitError(
        f"the code used {value // scale} {unit or name}, and the sandbox allows {getattr(limits, setting):g} ({setting}): "
        "it was ended with all its processes",
        setting,
    )


def _last_line(text: bytes) -> str:
    return text.decode(errors="replace").strip().rpartition("\n")[2]


def _pidfd_of(process: subprocess.Popen[bytes]) -> int | None:
    """None: it has been reaped, and its number may belong to another process."""
    return None if process.poll() is not None else os.pidfd_open(process.pid)
