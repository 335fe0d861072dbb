"""What the code inside a child may do to its host: a guard that Python itself asks before every file, process and connection.

Entered once in the child: limits of the kernel first, then an audit hook that cannot be taken off again. It confines
*libraries* that an agent steers with words (the AWS CLI, a simulator): their own code runs, and whatever path, address or command
an agent talks them into is refused with an error that says so. It is not a wall against native code of an attacker.
"""

import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PROCESS_EVENTS = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"}
)
# Event -> how many of its first arguments are paths that get changed.
CHANGES = {
    "os.remove": 1,
    "os.rename": 2,
    "os.mkdir": 1,
    "os.rmdir": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.chmod": 1,
    "os.chown": 1,
    "os.utime": 1,
    "shutil.rmtree": 1,
    "shutil.copyfile": 2,
    "shutil.move": 2,
}
LOOKS = frozenset({"os.listdir", "os.scandir"})
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
NULL = frozenset({"/dev/null", "/dev/urandom"})


class OutOfReachError(PermissionError):
    """The sandbox refused something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a child can get at: files below `writable` and `readable`, TCP ports of this machine, or HTTPS anywhere."""

    writable: tuple[str, ...]
    readable: tuple[str, ...]
    ports: frozenset[int] = frozenset()
    is_online: bool = False
    may_fork: bool = False

    def allows_read(self, path: str) -> bool:
        return path in NULL or _is_below(path, self.readable) or _is_below(path, self.writable)

    def allows_write(self, path: str) -> bool:
        return path in NULL or _is_below(path, self.writable)

    def allows_connection(self, address: Any) -> bool:
        if not isinstance(address, tuple):
            return False
        return address[1] == 443 if self.is_online else address[0] in LOOPBACK and address[1] in self.ports

    def allows_lookup(self, host: str) -> bool:
        return self.is_online or host in LOOPBACK


def interpreter_roots() -> tuple[str, ...]:
    """Where Python, its libraries and this package lie: readable for everybody, since nothing runs without them."""
    package = Path(__file__).resolve().parents[2]
    roots = {
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        str(package),
        "/etc/ssl",
        "/usr/share/zoneinfo",
        "/etc/mime.types",
    }
    return tuple(sorted(os.path.realpath(root) for root in roots))


def limit(*, memory_bytes: int, file_bytes: int) -> None:
    """Accept limits of the kernel on memory and file size, for this process and what it forks."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))


def confine(reach: Reach) -> None:
    """From now on nothing outside `reach` can be opened, changed, started or connected to by Python code in this process."""
    sys.addaudithook(guard(reach))


def guard(reach: Reach) -> Callable[[str, tuple[Any, ...]], None]:
    """The hook itself: raises `OutOfReachError` for what is out of reach."""

    def ask(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            _ask_open(reach, *args)
        elif event in CHANGES:
            for path in args[: CHANGES[event]]:
                if not isinstance(path, int) and not reach.allows_write(_real(path)):
                    raise OutOfReachError(
                        f"changing {_name(path)!r} is out of reach: only the working directory can be changed"
                    )
        elif event in LOOKS:
            path = args[0] if args and args[0] is not None else "."
            if not isinstance(path, int) and not reach.allows_read(_real(path)):
                raise OutOfReachError(
                    f"listing {_name(path)!r} is out of reach: only the working directory can be read"
                )
        elif event in PROCESS_EVENTS and not (event == "os.fork" and reach.may_fork):
            raise OutOfReachError("starting other programs is out of reach")
        elif event in {"socket.connect", "socket.sendto"}:
            if not reach.allows_connection(args[1]):
                raise OutOfReachError(f"connecting to {args[1]!r} is out of reach: only the own endpoint answers")
        elif event == "socket.bind" and not _is_ephemeral(args[1]):
            raise OutOfReachError(f"listening on {args[1]!r} is out of reach")
        elif event == "socket.getaddrinfo" and not reach.allows_lookup(_text(args[0])):
            raise OutOfReachError(f"looking up {_text(args[0])!r} is out of reach: only the own endpoint answers")

    return ask


def _ask_open(reach: Reach, path: Any, mode: Any, flags: Any) -> None:
    if isinstance(path, int) or path is None:
        return
    real = _real(path)
    is_writing = bool(flags & WRITING) if isinstance(flags, int) else bool(mode and set(mode) & set("wax+"))
    if is_writing:
        if not reach.allows_write(real):
            raise OutOfReachError(f"writing {_name(path)!r} is out of reach: only the working directory can be changed")
    elif not reach.allows_read(real):
        raise OutOfReachError(f"reading {_name(path)!r} is out of reach: only the working directory can be read")


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def _real(path: Any) -> str:
    return os.path.realpath(os.fsdecode(path))


def _name(path: Any) -> str:
    return os.fsdecode(path)


def _text(host: Any) -> str:
    return host.decode("utf-8", errors="replace") if isinstance(host, bytes) else str(host)


def _is_ephemeral(address: Any) -> bool:
    """Libraries bind to port 0 of loopback for pairs of their own sockets."""
    return isinstance(address, tuple) and address[0] in LOOPBACK and address[1] == 0
