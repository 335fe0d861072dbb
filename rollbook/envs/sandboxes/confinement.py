"""Confines a child process: kernel limits, and an audit hook that Python calls before it opens files, processes and connections.

The hook cannot be removed. It confines libraries whose input comes from an agent (the AWS CLI, a simulator): a path, an address or
a command outside the permissions raises an error. It does not stop native code of an attacker.
"""

import os
import resource
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PROCESS_EVENTS = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"}
)
# Audit event -> how many of its first arguments are paths that it changes.
CHANGE_EVENTS = {
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
    "sqlite3.connect": 1,
}
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
HARMLESS_DEVICES = frozenset({"/dev/null", "/dev/urandom"})


class NotPermittedError(PermissionError):
    """The confinement refused an operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """What a child may use: files below `writable` and `readable` but not below `hidden`, TCP ports of this machine, or HTTPS
    anywhere.
    """

    writable: tuple[str, ...]
    readable: tuple[str, ...]
    hidden: tuple[str, ...] = ()
    ports: frozenset[int] = frozenset()
    is_online: bool = False
    may_fork: bool = False

    def allows_read(self, path: str) -> bool:
        if _is_below(path, self.hidden):
            return False
        return path in HARMLESS_DEVICES or _is_below(path, self.readable) or _is_below(path, self.writable)

    def allows_write(self, path: str) -> bool:
        return path in HARMLESS_DEVICES or (_is_below(path, self.writable) and not _is_below(path, self.hidden))

    def allows_connection(self, address: Any) -> bool:
        if not isinstance(address, tuple):
            return False
        return address[1] == 443 if self.is_online else address[0] in LOOPBACK and address[1] in self.ports

    def allows_lookup(self, host: str) -> bool:
        return self.is_online or host in LOOPBACK


def package_root() -> str:
    """The directory of this package."""
    return os.path.realpath(Path(__file__).parents[2])


def is_of_packages(path: str) -> bool:
    """Whether an entry of the module search path has installed packages, not the project of the user. Installers write a folder
    `NAME.dist-info` beside each."""
    if not path:
        return False  # the working directory
    return Path(path).name in {"site-packages", "dist-packages"} or any(Path(path).glob("*.dist-info"))


def interpreter_roots() -> tuple[str, ...]:
    """The directories of Python's standard library and of installed packages, which every child must read, and system data.

    Not the whole prefix: it may contain the project of the user.
    """
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = {sysconfig.get_path(name) for name in names} | {path for path in sys.path if is_of_packages(path)}
    data = {"/etc/ssl", "/usr/share/zoneinfo", "/etc/mime.types"}
    return tuple(sorted(os.path.realpath(root) for root in libraries | data))


def limit_resources(*, memory_bytes: int, file_bytes: int) -> None:
    """Set kernel limits on memory and file size, for this process and its forks."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))


def confine(permissions: Permissions) -> None:
    """Enforce the permissions on all Python code of this process, for the rest of its life."""
    sys.addaudithook(guard(permissions))


def guard(permissions: Permissions) -> Callable[[str, tuple[Any, ...]], None]:
    """The audit hook: raises `NotPermittedError`."""

    def check(event: str, args: tuple[Any, ...]) -> None:
        rule = RULES.get(event)
        refusal = None if rule is None else rule(permissions, event, args)
        if refusal is not None:
            raise NotPermittedError(refusal)

    return check


# A rule says why an event is refused, or None if it is permitted.


def _open(permissions: Permissions, _: str, args: tuple[Any, ...]) -> str | None:
    path, mode, flags = args
    is_writing = bool(flags & WRITE_FLAGS) if isinstance(flags, int) else bool(mode and set(mode) & set("wax+"))
    return _change("writing", path, permissions) if is_writing else _read("reading", path, permissions)


def _list(permissions: Permissions, _: str, args: tuple[Any, ...]) -> str | None:
    path = args[0] if args and args[0] is not None else "."
    return _read("listing", path, permissions)


def _change_paths(permissions: Permissions, event: str, args: tuple[Any, ...]) -> str | None:
    refusals = (_change("changing", path, permissions) for path in args[: CHANGE_EVENTS[event]])
    return next(filter(None, refusals), None)


def _start_program(permissions: Permissions, event: str, _: tuple[Any, ...]) -> str | None:
    is_permitted = event == "os.fork" and permissions.may_fork
    return None if is_permitted else "starting other programs is not permitted"


def _connect(permissions: Permissions, _: str, args: tuple[Any, ...]) -> str | None:
    if permissions.allows_connection(args[1]):
        return None
    return f"connecting to {args[1]!r} is not permitted: only its own endpoint is"


def _bind(_: Permissions, __: str, args: tuple[Any, ...]) -> str | None:
    """Libraries bind to port 0 of loopback to make socket pairs."""
    match args[1]:
        case (host, 0, *_) if host in LOOPBACK:
            return None
        case address:
            return f"listening on {address!r} is not permitted"


def _look_up(permissions: Permissions, _: str, args: tuple[Any, ...]) -> str | None:
    host = args[0].decode("utf-8", errors="replace") if isinstance(args[0], bytes) else str(args[0])
    return (
        None if permissions.allows_lookup(host) else f"looking up {host!r} is not permitted: only its own endpoint is"
    )


RULES: dict[str, Callable[[Permissions, str, tuple[Any, ...]], str | None]] = {
    "open": _open,
    "os.listdir": _list,
    "os.scandir": _list,
    **dict.fromkeys(CHANGE_EVENTS, _change_paths),
    **dict.fromkeys(PROCESS_EVENTS, _start_program),
    "socket.connect": _connect,
    "socket.sendto": _connect,
    "socket.bind": _bind,
    "socket.getaddrinfo": _look_up,
}


def _read(verb: str, path: Any, permissions: Permissions) -> str | None:
    if _is_descriptor(path) or permissions.allows_read(_real(path)):
        return None
    return f"{verb} {os.fsdecode(path)!r} is not permitted: only the working directory can be read"


def _change(verb: str, path: Any, permissions: Permissions) -> str | None:
    if _is_descriptor(path) or permissions.allows_write(_real(path)):
        return None
    return f"{verb} {os.fsdecode(path)!r} is not permitted: only the working directory can be changed"


def _is_descriptor(path: Any) -> bool:
    """Whether the event names an open file, or none, instead of a path."""
    return isinstance(path, int) or path is None


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def _real(path: Any) -> str:
    return os.path.realpath(os.fsdecode(path))
