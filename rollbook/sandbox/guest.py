"""The first process inside a sandbox: starts commands, opens files and ports for the host, and enforces the limits.

It is process 1 of its own process namespace, so code in the sandbox can neither kill nor replace it, and everything ends with it.
Its standard input is a socket to the host. Each request is one packet; file descriptors travel with packets, so output, files and
connections go between host and command without passing through this process.

It is passed to the Python of the sandbox (3.9 or newer) as an argument, and imports only small modules: every start waits for them.
`os` takes a millisecond more than `posix`, from which it has its functions.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes 5 ms to import
import _socket
import marshal
import posix as os
import resource
import select
import sys
import time
from _socket import (
    AF_INET,
    AF_UNIX,
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
DEFAULT_PATH = "/bin:/usr/bin"
FILE_TYPE, DIRECTORY = 0o170000, 0o040000
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CLOCK_HZ = os.sysconf("SC_CLK_TCK")
CLOSE_ON_EXEC: int = getattr(_socket, "MSG_CMSG_CLOEXEC", 0)
"""Linux has it. The module is imported elsewhere too."""
EIO, EINVAL = 5, 22
MAPPED_BY_TABLE = 512
"""The kernel needs at most this part of mapped memory for its page tables."""
OWN_MEMORY = (b"RssAnon:", b"RssShmem:", b"VmPTE:")
SOCKET_BYTES = 256 * 1024
"""The buffer of a socket by default, with what the kernel needs for it. The system call filter forbids enlarging it."""
FEW_SOCKETS = 16
"""Not counted: every program has some."""
YOUNG_CHECKS = 2
"""A new process may share the memory of its parent until it runs a program, which the kernel does not report. Its memory counts
from the next check on. Checks, not seconds: on a stalled machine no process makes progress, and none may be ended for that."""


class Guest:
    def __init__(self, channel: socket, limits: dict[str, float]) -> None:
        self._channel = channel
        self._limits = limits
        self._usage = ProcessUsage(limits)
        self._poll = select.poll()
        self._commands: dict[int, int] = {}  # process id -> request number
        self._watches: dict[int, Any] = {}  # of commands, by process id
        self._listeners: dict[
            int, Any
        ] = {}  # the same by their file descriptors, until the last child of the command has ended
        self._running_since = 0.0
        self._ran_s = 0.0

    def serve(self) -> None:
        """Takes: requests. Gives: replies and exit codes. Ends: when the host is gone, or when a limit is exceeded."""
        self._poll.register(self._channel.fileno(), select.POLLIN)
        has_children = False
        next_check = 0.0
        while True:
            for fd, events in self._poll.poll(TICK_MS if has_children else None):
                if fd in self._listeners and events & select.POLLIN:
                    self._listeners[fd].serve()
                    continue
                if fd != self._channel.fileno():
                    self._poll.unregister(fd)
                    self._listeners.pop(fd, None)
                    os.close(fd)
                    continue
                pid = self._receive()
                if pid is not None:
                    pidfd = os.pidfd_open(pid)
                    self._poll.register(pidfd, select.POLLIN)
            has_children = self._reap()
            if has_children and time.monotonic() >= next_check:
                self._check_limits()
                next_check = time.monotonic() + TICK_MS / 1000

    def _receive(self) -> int | None:
        """Handle one request. Returns the process id of a command that it started."""
        packet, ancillary, _, _ = self._channel.recvmsg(MAX_PACKET_BYTES, 64, CLOSE_ON_EXEC)
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
                if not self._commands:
                    self._running_since = time.monotonic()
                self._commands[pid] = number
                return pid
            sent = self._perform(operation, arguments)
            self._reply(number, 0, sent)
        except OSError as error:
            self._reply(number, -(error.errno or EIO), None)
        except (ValueError, TypeError):
            # A path or an argument that the kernel cannot take: with a zero byte, or with half of a surrogate pair.
            self._reply(number, -EINVAL, None)
        finally:
            for fd in fds if sent is None else (*fds, sent):
                os.close(fd)
        return None

    def _perform(self, operation: str, arguments: tuple[Any, ...]) -> int | None:
        """Returns a file descriptor for the host."""
        if operation == "signal":
            command, number = arguments
            for pid in [pid for pid, one in self._commands.items() if one == command]:
                self._watches.pop(pid, None)
                os.killpg(pid, number)
        elif operation == "open":
            return self._open(*arguments)
        elif operation == "discard":
            self._discard(*arguments)
        elif operation == "listen":
            return self._listen(*arguments)
        elif operation == "end":
            self._end_processes()
            self._usage = ProcessUsage(self._limits)
            self._ran_s = 0.0
        return None

    def _end_processes(self) -> None:
        self._watches.clear()
        if os.getpid() != 1:
            for pid in self._commands:
                os.killpg(pid, 9)
            return
        try:
            os.kill(-1, 9)  # all processes of this namespace but this one
        except ProcessLookupError:
            return
        self._reap(0)

    def _spawn(
        self,
        fds: list[int],
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        watch: tuple[str, tuple[Any, ...], bool] | None,
    ) -> int:
        os.chdir(cwd)
        path = executable(argv[0], env.get("PATH", DEFAULT_PATH))
        if watch is not None:
            return self._spawn_watched(path, argv, env, fds, *watch)
        return os.posix_spawn(
            path,
            argv,
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(fds)],
            setsigdef=RESET_SIGNALS,
            setsid=True,
        )

    def _spawn_watched(  # noqa: PLR0917 - one caller
        self,
        path: str,
        argv: list[str],
        env: dict[str, str],
        fds: list[int],
        source: str,
        setting: tuple[Any, ...],
        is_trusted: bool,
    ) -> int:
        """`source`: of `kill_watch.py`."""
        module: dict[str, Any] = {"__name__": "kill_watch"}
        exec(source, module)
        pid, watch = module["start"](path, argv, env, fds, RESET_SIGNALS, setting, is_trusted)
        if watch is not None:
            self._watches[pid] = watch
            if watch.listener >= 0:
                self._listeners[watch.listener] = watch
                self._poll.register(watch.listener, select.POLLIN)
        return int(pid)

    def _open(self, path: str, flags: int, mode: int, makes_parents: bool) -> int:
        if makes_parents:
            make_parents(path)
        # Without O_NONBLOCK, a named pipe without a writer would block this process for ever.
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
        if flags & os.O_CREAT:
            os.fchmod(fd, mode)
        return fd

    def _discard(self, path: str) -> None:
        """By a new name next to it: a directory may be deep, large, and without rights."""
        parent = path.rpartition("/")[0] or "/"
        try:
            mode = os.stat(parent).st_mode
            if not mode & 0o200:
                os.chmod(parent, 0o755)
            os.rename(path, f"{parent}/.discarded-{os.urandom(8).hex()}")
        except FileNotFoundError:
            pass

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
                    if not self._commands:
                        self._ran_s += time.monotonic() - self._running_since
                    code, watch = os.waitstatus_to_exitcode(status), self._watches.pop(pid, None)
                    is_killed_outside = code == -9 and watch is not None and not watch.is_killed_inside
                    if is_killed_outside:
                        # The kernel may have done it because memory was short. If the code used too much, it is the cause.
                        self._check_limits()
                    self._reply(number, code, None, kind="killed" if is_killed_outside else "exit")
        except ChildProcessError:
            return False

    def _check_limits(self) -> None:
        if not self._limits:
            return  # not confined
        used = {"wall_s": self._run_s(), **self._usage.measure()}
        for name, value in used.items():
            if value > self._limits[name]:
                self._exceed(name, value)

    def _run_s(self) -> float:
        """The time in which at least one command ran. Between commands the code waits for others."""
        return self._ran_s + (time.monotonic() - self._running_since if self._commands else 0.0)

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
        path = f"{directory or '.'}/{name}"
        if os.access(path, os.X_OK) and os.stat(path).st_mode & FILE_TYPE != DIRECTORY:
            return path
    raise FileNotFoundError(2, name)


def make_parents(path: str) -> None:
    for end in range(1, len(path)):
        if path[end] == "/":
            try:
                os.mkdir(path[:end])
            except FileExistsError:
                if os.stat(path[:end]).st_mode & FILE_TYPE != DIRECTORY:
                    raise


class ProcessUsage:
    """What all processes of this namespace use together."""

    def __init__(self, limits: dict[str, float]) -> None:
        self._limits = limits
        self._ticks: dict[tuple[str, bytes], int] = {}  # of the processes of the last count, by number and start
        self._checks: dict[tuple[str, bytes], int] = {}  # in which each of them was counted before
        self._ended_ticks = 0
        self._reaped_before = reaped_ticks()

    def measure(self) -> dict[str, float]:
        names = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        terminals = max(0, len(entries("/dev/pts")) - 1)
        if len(names) + terminals > self._limits["processes"]:
            # Without a look at each: a fork bomb makes more in the meantime.
            return {"processes": len(names) + terminals}
        threads = pages = tables = with_children = 0
        ticks: dict[tuple[str, bytes], int] = {}
        checks: dict[tuple[str, bytes], int] = {}
        reporting = []
        for name in names:
            fields = stat_fields(name)
            if fields is None:
                continue
            threads += int(fields[17])  # they count as processes, as the kernel does
            own = int(fields[11]) + int(fields[12])
            process = name, fields[19]
            ticks[process] = own
            checks[process] = self._checks.get(process, 0) + 1
            with_children += own + int(fields[13]) + int(fields[14])
            task, fields = living_task(name, fields)
            if checks[process] > YOUNG_CHECKS:
                reporting.append(task)
            pages += int(fields[21])
            tables += int(fields[20]) // MAPPED_BY_TABLE
        self._checks = checks
        disk, shared = os.statvfs("/"), os.statvfs("/dev/shm")
        of_no_process = (shared.f_blocks - shared.f_bfree) * shared.f_frsize + self._socket_bytes()
        memory_bytes = of_no_process + pages * PAGE_BYTES + tables
        if memory_bytes > self._limits["memory_bytes"]:
            # `rss` has the pages of libraries. Count what is really used only now: it takes longer.
            memory_bytes = of_no_process + sum(map(own_bytes, reporting))
        return {
            "files": disk.f_files - disk.f_ffree + shared.f_files - shared.f_ffree,
            "memory_bytes": memory_bytes,
            "cpu_s": self._cpu_ticks(ticks, with_children) / CLOCK_HZ,
            "processes": threads + terminals,
        }

    def _cpu_ticks(self, ticks: dict[tuple[str, bytes], int], with_children: int) -> float:
        """Each of two counts misses processes: that of the kernel those whose parent ignores their end, ours the short ones."""
        self._ended_ticks += sum(used for process, used in self._ticks.items() if process not in ticks)
        self._ticks = ticks
        of_kernel = with_children + reaped_ticks() - self._reaped_before
        return max(of_kernel, self._ended_ticks + sum(ticks.values()))

    def _socket_bytes(self) -> int:
        """Full buffers for each socket, and what waits in connections beyond that. The kernel counts them for no process."""
        if not self._limits["has_own_network"]:
            return 0
        words = read_file("/proc/net/sockstat").split()  # sockets: used 3 TCP: ...
        more = int(words[2]) - FEW_SOCKETS if words else 0
        if more <= 0:
            return 0
        queued = 0
        for line in (read_file("/proc/net/tcp") + read_file("/proc/net/tcp6")).split(b"\n"):
            fields = line.split()
            if len(fields) > 4 and b":" in fields[4]:
                to_send, received = fields[4].split(b":")
                queued += max(0, int(to_send, 16) + int(received, 16) - SOCKET_BYTES)
        return more * SOCKET_BYTES + queued


def reaped_ticks() -> float:
    """Processor time of the ended children of this process, with theirs."""
    ended = os.times()
    return (ended.children_user + ended.children_system) * CLOCK_HZ


def read_file(path: str) -> bytes:
    """Nothing if it does not exist or its process has ended."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read() or b""
    except OSError:
        return b""


def entries(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def stat_fields(name: str) -> list[bytes] | None:
    """Fields of /proc/PID/stat after the name, or None if the process has ended."""
    return read_file(f"/proc/{name}/stat").rpartition(b")")[2].split() or None


def living_task(name: str, fields: list[bytes]) -> tuple[str, list[bytes]]:
    """A thread that reports the memory of the process: the first one does not, if it has ended before the others."""
    if fields[0] == b"Z" and int(fields[17]) > 1:
        for task in entries(f"/proc/{name}/task"):
            of_task = stat_fields(task)
            if of_task is not None and of_task[0] not in (b"Z", b"X"):
                return task, of_task
    return name, fields


def own_bytes(name: str) -> int:
    """Anonymous and shared memory of a process with its page tables, without its mapped files. `smaps` would divide shared pages,
    but a process that forks all the time keeps it locked."""
    lines = map(bytes.split, read_file(f"/proc/{name}/status").split(b"\n"))
    return sum(int(words[1]) * 1024 for words in lines if words and words[0] in OWN_MEMORY)


def main() -> None:
    # Python has a handler for SIGINT. Without one, the kernel discards every signal that code inside sends to process 1.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    limits = marshal.loads(bytes.fromhex(sys.argv[-1]))
    # Standard input is set for each command; the channel must not stay there.
    fd = os.dup(0)
    null = os.open("/dev/null", os.O_RDONLY)
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
