"""The first process inside a sandbox: starts commands, opens files and ports for the host, and enforces the limits.

It is process 1 of its own process namespace, so code in the sandbox can neither kill nor replace it, and everything ends with it.
Its standard input is a socket to the host. Each request is one packet; file descriptors travel with packets, so output, files and
connections go between host and command without passing through this process.

Its source is passed to the Python of the sandbox (3.9 or newer). It imports only small modules, since every start waits for them.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import sys
import time
from _socket import (
    AF_INET,
    AF_UNIX,
    MSG_CMSG_CLOEXEC,
    SCM_RIGHTS,
    SO_REUSEADDR,
    SOCK_SEQPACKET,
    SOCK_STREAM,
    SOL_SOCKET,
    socket,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TICK_MS = 50
"""How often the limits are checked while a command or one of its children exists."""
MAX_PACKET_BYTES = 1 << 18
RESET_SIGNALS = (13, 25)
"""SIGPIPE and SIGXFSZ: Python ignores them, and a command would inherit that."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CLOCK_HZ = os.sysconf("SC_CLK_TCK")


class Guest:
    def __init__(self, channel: socket, limits: dict[str, float]) -> None:
        self._channel = channel
        self._limits = limits
        self._commands: dict[int, int] = {}  # process id -> request number
        self._started = time.monotonic()

    def serve(self) -> None:
        """Takes: requests. Gives: replies and exit codes. Ends: when the host is gone, or when a limit is exceeded."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        has_children = False
        next_check = 0.0
        while True:
            for fd, _ in poll.poll(TICK_MS if has_children else None):
                if fd != self._channel.fileno():
                    poll.unregister(fd)
                    os.close(fd)
                    continue
                pid = self._receive()
                if pid is not None:
                    pidfd = os.pidfd_open(pid)
                    poll.register(pidfd, select.POLLIN)
            has_children = self._reap()
            if has_children and time.monotonic() >= next_check:
                self._check_limits()
                next_check = time.monotonic() + TICK_MS / 1000

    def _receive(self) -> int | None:
        """Handle one request. Returns the process id of a command that it started."""
        packet, ancillary, _, _ = self._channel.recvmsg(MAX_PACKET_BYTES, 64, MSG_CMSG_CLOEXEC)
        if not packet:
            # As process 1, the kernel kills all other processes with this one. An unconfined guest ends its commands.
            self._end_processes()
            os._exit(0)
        fds: list[int] = []
        for level, kind, data in ancillary:
            if level == SOL_SOCKET and kind == SCM_RIGHTS:
                fds += [int.from_bytes(data[i : i + 4], sys.byteorder) for i in range(0, len(data), 4)]
        number, operation, arguments = marshal.loads(packet)
        sent: int | None = None
        try:
            if operation == "exec":
                pid = self._spawn(fds, *arguments)
                self._commands[pid] = number
                return pid
            sent = self._perform(operation, arguments)
            self._reply(number, 0, sent)
        except OSError as error:
            self._reply(number, -(error.errno or 5), None)
        finally:
            for fd in fds if sent is None else (*fds, sent):
                os.close(fd)
        return None

    def _perform(self, operation: str, arguments: tuple[Any, ...]) -> int | None:
        """Returns a file descriptor for the host."""
        if operation == "signal":
            command, number = arguments
            for pid in [pid for pid, one in self._commands.items() if one == command]:
                os.killpg(pid, number)
        elif operation == "open":
            return self._open(*arguments)
        elif operation == "listen":
            return self._listen(*arguments)
        elif operation == "end":
            self._end_processes()
        return None

    def _end_processes(self) -> None:
        if os.getpid() != 1:
            for pid in self._commands:
                os.killpg(pid, 9)
            return
        try:
            os.kill(-1, 9)  # all processes of this namespace but this one
        except ProcessLookupError:
            return
        self._reap(0)

    def _spawn(self, fds: list[int], argv: list[str], env: dict[str, str], cwd: str) -> int:
        os.chdir(cwd)
        return os.posix_spawn(
            executable(argv[0], env.get("PATH", os.defpath)),
            argv,
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(fds)],
            setsigdef=RESET_SIGNALS,
            setsid=True,
        )

    def _open(self, path: str, flags: int, mode: int, makes_parents: bool) -> int:
        if makes_parents:
            os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        # Without O_NONBLOCK, a named pipe without a writer would block this process for ever.
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
        if flags & os.O_CREAT:
            os.fchmod(fd, mode)
        return fd

    def _listen(self, port: int) -> int:
        listener = socket(AF_INET, SOCK_STREAM)
        listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(64)
        except OSError:
            listener.close()
            raise
        return listener.detach()

    def _reap(self, flags: int = os.WNOHANG) -> bool:
        """Collect ended processes, orphans too. Returns whether any are left. Without flags, wait for all of them."""
        try:
            while True:
                pid, status = os.waitpid(-1, flags)
                if pid == 0:
                    return True
                number = self._commands.pop(pid, None)
                if number is not None:
                    self._reply(number, os.waitstatus_to_exitcode(status), None, kind="exit")
        except ChildProcessError:
            return False

    def _check_limits(self) -> None:
        if not self._limits:
            return  # not confined
        names = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        if len(names) > self._limits["processes"]:
            self._exceed("processes", len(names))  # without a look at each: a fork bomb makes more in the meantime
        processes = pages = 0
        cpu_ticks = sum(map(int, (stat_fields("1") or [b"0"] * 15)[13:15]))  # of processes that have ended
        for name in names:
            fields = stat_fields(name)
            if fields is None:
                continue
            processes += int(fields[17])  # threads count as processes, as the kernel does
            cpu_ticks += sum(map(int, fields[11:15]))
            pages += int(fields[21])
        memory_bytes = pages * PAGE_BYTES
        if memory_bytes > self._limits["memory_bytes"]:
            # `rss` counts pages of libraries once for each process. Count what is really used only now: it takes longer.
            memory_bytes = sum(map(own_bytes, names))
        disk = os.statvfs("/")
        used = {
            "memory_bytes": memory_bytes,
            "cpu_s": cpu_ticks / CLOCK_HZ,
            "processes": processes,
            "files": disk.f_files - disk.f_ffree,
            "wall_s": time.monotonic() - self._started,
        }
        for name, value in used.items():
            if value > self._limits[name]:
                self._exceed(name, value)

    def _exceed(self, name: str, value: float) -> None:
        self._channel.sendall(b"over %s %d" % (name.encode(), int(value)))
        os._exit(0)

    def _reply(self, number: int, value: int, fd: int | None, kind: str = "done") -> None:
        ancillary = [] if fd is None else [(SOL_SOCKET, SCM_RIGHTS, fd.to_bytes(4, sys.byteorder))]
        self._channel.sendmsg([b"%s %d %d" % (kind.encode(), number, value)], ancillary)


def executable(name: str, search_path: str) -> str:
    """The path of a command. Raises `FileNotFoundError`."""
    if "/" in name:
        return name
    for directory in search_path.split(":"):
        path = os.path.join(directory or ".", name)
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    raise FileNotFoundError(2, name)


def stat_fields(name: str) -> list[bytes] | None:
    """Fields of /proc/PID/stat after the name, or None if the process has ended."""
    try:
        with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
            return file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return None


def own_bytes(name: str) -> int:
    """Anonymous and shared memory of a process, without its mapped files."""
    try:
        with open(f"/proc/{name}/status", "rb", buffering=0) as file:
            lines = file.read(8192).split(b"\n")
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith((b"RssAnon:", b"RssShmem:")))


def main() -> None:
    limits = marshal.loads(bytes.fromhex(sys.argv[1]))
    # Standard input is set for each command; the channel must not stay there.
    fd = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    channel = socket(AF_UNIX, SOCK_SEQPACKET, 0, fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits:
        for kind, value in limits.pop("rlimits").items():
            resource.setrlimit(kind, (value, value))
    channel.sendall(b"ready")
    Guest(channel, limits).serve()


if __name__ == "__main__":
    main()
