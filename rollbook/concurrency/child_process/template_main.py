"""The main function of a process template: import modules once, then fork a child for each request.

Started by `template.py` as `python -m ... CHANNEL_FD REQUESTS_FD MODULE,MODULE,...`; a first frame lists all modules. A request is
one byte with the descriptors of the child, then a JSON frame. The reply is a frame with the child's pid, or an empty one if the
child could not be made.

A child is forked twice: the process in between exits, so the child becomes a child of the process that requested it (see
`template.py`), and neither its life nor its exit status depends on the template. The child then waits for permission to run: a
request whose reply was lost leaves no process behind.
"""

import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rollbook.concurrency.child_process.bytecode import compile_packages
from rollbook.concurrency.child_process.child import connect_to_parent, kill_with_parent
from rollbook.concurrency.child_process.frames import BlockingFrames

FREE_FDS = 200
"""Descriptors below this number stay free for those of the children, which keep the numbers that they had in their parent.
Some libraries leave files open after their import; those get higher numbers."""
MAX_FDS = 64
TEMPLATE_MODULE = "rollbook.concurrency.child_process.template_main"
SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
"""Threads of libraries that start them again in a forked child. Arrow's memory allocator does."""
COMMAND_BYTES = 4096
"""Space for the command line of a child, as shown by `ps`. A longer one is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    command: Sequence[str]
    """`python -m MODULE ARGUMENTS...`, as for a plain start."""
    environment: dict[str, str]
    directory: str | None
    has_own_group: bool
    numbers: Sequence[int]
    """The numbers that the child's descriptors get, in the order in which they are sent."""
    template_fd: int | None = None
    """The number on which the child's own template receives requests; None: it has none."""

    @property
    def module(self) -> str:
        return self.command[self.command.index("-m") + 1]

    @property
    def arguments(self) -> Sequence[str]:
        return self.command[self.command.index("-m") + 2 :]


def main() -> None:
    channel = BlockingFrames(connect_to_parent(int(sys.argv[1])))
    requests = socket.socket(fileno=int(sys.argv[2]))
    kill_with_parent()
    compile_packages()
    # Imports create hundreds of thousands of objects that stay: collections during them take a fifth of the time.
    gc.disable()
    with _low_numbers_kept_free():
        _import(sys.argv[3])
        # A template that was started early learns later what else it has to import.
        others = channel.receive()
        if others is None:
            return
        _import(others.decode())
    reason = _why_not_to_fork()
    channel.send(reason.encode())
    channel.close()
    if reason:
        return
    # Otherwise every child would write what the imports have printed.
    sys.stdout.flush()
    # Children share this memory until they write to it. The collector would write to every object. What the imports left to
    # collect is too little for the half second of a collection.
    gc.freeze()
    gc.enable()
    request = _serve(requests)
    while request is not None and request.template_fd is not None and os.fork() == 0:
        request = _serve(_become_template(request, request.template_fd))
    if request is not None:
        if request.template_fd is not None:
            os.close(request.template_fd)
        _run(request)


def _import(modules: str) -> None:
    for module in modules.split(","):
        importlib.import_module(module)


def _become_template(request: ForkRequest, template_fd: int) -> socket.socket:
    """Turn a copy of a child that has not begun into the child's own template, without its other descriptors."""
    kill_with_parent()
    for number in request.numbers:
        if number > 2 and number != template_fd:
            os.close(number)
    _show_command([sys.executable, "-P", "-m", TEMPLATE_MODULE])
    return socket.socket(fileno=template_fd)


@contextmanager
def _low_numbers_kept_free() -> Iterator[None]:
    placeholders: list[int] = []
    with suppress(OSError):  # a low limit of open files
        while not placeholders or placeholders[-1] < FREE_FDS - 1:
            placeholders.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    yield
    for placeholder in placeholders:
        os.close(placeholder)


def _why_not_to_fork() -> str:
    """Empty if this process can be forked: the child of a process with threads or an open GPU does not work."""
    others = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    names = {(task / "comm").read_text(encoding="utf-8", errors="replace").strip() for task in others}
    if names - SAFE_THREADS:
        return f"its modules started threads: {', '.join(sorted(names))}"
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            if (file := str(link.readlink())).startswith("/dev/nvidia"):
                return f"its modules opened {file}"
    return ""


def _serve(requests: socket.socket) -> ForkRequest | None:
    """Fork a child for each request. Returns the request in the child, and None in the template when its parent is gone."""
    frames = BlockingFrames(requests)
    while True:
        received, fds, _, _ = socket.recv_fds(requests, 1, MAX_FDS)
        payload = frames.receive() if received else None
        if payload is None:
            return None
        request = ForkRequest(**json.loads(payload))
        pid_reader, pid_writer = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() != 0:
                os._exit(0)
            requests.close()
            os.close(pid_reader)
            _become_child(request, fds, pid_writer)
            return request
        os.close(pid_writer)
        for fd in fds:
            os.close(fd)
        os.waitpid(between, 0)
        with os.fdopen(pid_reader, "rb") as reader:
            frames.send(reader.read())


def _become_child(request: ForkRequest, fds: Sequence[int], pid_writer: int) -> None:
    """Take over the descriptors and settings of the request, report the pid, and wait for permission to run.

    The last descriptor is the permission: one byte, or its end.
    """
    try:
        if request.has_own_group:
            os.setsid()
        if request.directory is not None:
            os.chdir(request.directory)
        pid_writer, permission = _place(fds, request.numbers, pid_writer)
        os.environ.clear()
        os.environ.update(request.environment)
        os.write(pid_writer, str(os.getpid()).encode())
        os.close(pid_writer)
        if not os.read(permission, 1):
            os._exit(1)
        os.close(permission)
    except OSError:
        os._exit(1)  # without a pid, the parent starts the child without the template


def _place(fds: Sequence[int], numbers: Sequence[int], pid_writer: int) -> tuple[int, int]:
    """Give the descriptors their numbers. Returns the descriptors of the pid and of the permission."""
    above = max(FREE_FDS, *numbers) + 1
    *placed, permission = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    moved_writer = fcntl.fcntl(pid_writer, fcntl.F_DUPFD_CLOEXEC, above)
    for fd in (*fds, pid_writer):
        os.close(fd)
    for fd, number in zip(placed, numbers, strict=True):
        if number > 2 and Path(f"/proc/self/fd/{number}").exists():
            raise OSError(f"descriptor {number} is in use")
        os.dup2(fd, number)
    for fd in placed:
        os.close(fd)
    return moved_writer, permission


def _run(request: ForkRequest) -> None:
    """Run the module of the request as `python -m MODULE` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _show_command(request.command)
    _seed()
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(request.module)
    if spec is None or spec.loader is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {request.module!r}")
    sys.argv = [spec.origin, *request.arguments]
    main_module = types.ModuleType("__main__")
    main_module.__file__, main_module.__spec__, main_module.__package__ = spec.origin, spec, spec.parent
    sys.modules["__main__"] = main_module
    exec(spec.loader.get_code(request.module), main_module.__dict__)  # type: ignore[attr-defined]  # source loaders have it


def _show_command(command: Sequence[str]) -> None:
    """Overwrite the arguments of the template, so that `ps` shows the child's command."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    # Fields 48 and 49 of proc(5), counted from the field after the name, which is the third.
    start, end = int(fields[45]), int(fields[46])
    if start == 0:
        return  # the kernel hides the addresses from this process
    text = b"".join(os.fsencode(part) + b"\0" for part in command)
    ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _seed() -> None:
    """Random numbers of a child differ from those of its siblings. The module `random` does this itself."""
    for name in ("numpy.random", "torch"):
        if (module := sys.modules.get(name)) is not None:
            module.seed()


if __name__ == "__main__":
    main()
