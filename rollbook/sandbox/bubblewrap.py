"""Starts sandboxes with bubblewrap: own namespaces for everything, a private `/` of fixed size, no privileges.

A sandbox sees `/usr` of this machine (or of `Image.root`) read-only, the Python that runs Rollbook, and nothing else of the
machine: no home directories, no `/etc`, no environment variables, no processes, no network. Everything that it writes is in one
tmpfs. It ends with the process that started it, however that ends. `kind="podman"` and `kind="docker"` start the same sandbox in a
container.

Where bubblewrap cannot run, `open_sandbox` raises. Code runs unconfined only with `kind="none"`.
"""

import asyncio
import marshal
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rollbook.concurrency.deadline import finish
from rollbook.contracts.plugin import MissingExtraError, load_on_demand
from rollbook.sandbox.docker import docker_command, setup_program
from rollbook.sandbox.plan import SandboxPlan
from rollbook.sandbox.podman import OF_THE_ENGINE, TAKE_CHANNEL, podman_command
from rollbook.sandbox.process import KILL_S, ProcessSandbox
from rollbook.sandbox.quota import acquire
from rollbook.sandbox.remote import RemoteSandbox
from rollbook.sandbox.root import ETC, environment_of, mounts_of, python_of
from rollbook.sandbox.sandbox import (
    REMOTE,
    SHARED_MB,
    Image,
    Limits,
    Sandbox,
    SandboxDiedError,
    SandboxUnavailableError,
)
from rollbook.sandbox.seccomp import ARCHITECTURES, kill_watch_filter, seccomp_filter

Kind = Literal["bubblewrap", "podman", "docker", "e2b", "modal", "none"]

START_S = 30.0
"""A start takes milliseconds; an overloaded machine needs longer."""
OPEN_FILES = 4096
QUEUED_SIGNALS = 1024
QUEUED_BYTES = 819_200
"""In POSIX message queues."""
RUN_SOURCE = "import sys; exec(compile(sys.argv[1], 'guest.py', 'exec'))"
RUN_COMPILED = "import marshal, sys; exec(marshal.loads(bytes.fromhex(sys.argv[1])))"
PRIVATE_PROC = frozenset(
    {"keys", "key-users", "kallsyms", "iomem", "ioports", "sched_debug", "timer_list", "config.gz"}
)
"""Files of /proc about the kernel that every user may read in part."""
HELP = (
    "Install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap), allow user namespaces (sysctl "
    "kernel.unprivileged_userns_clone=1; on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; in a container its engine must "
    'permit them), or use another Linux machine. sandbox = "none" runs the code unconfined, with all rights of this process, and '
    "is recorded with the run"
)
MAX_FIRST_STARTS = 3
"""A process whose first sandboxes all end without a message cannot start any."""
_started: set[str] = set()
"""The kinds of which this process has started one."""


@asynccontextmanager
async def open_sandbox(
    image: Image | None = None, limits: Limits | None = None, *, kind: Kind = "bubblewrap", network: bool = False
) -> AsyncIterator[Sandbox]:
    """A sandbox for the block. `network`: share the network of this machine. `kind`: `bubblewrap`, `podman`, `docker`, `e2b` or
    `modal` (a machine of that provider), or `none`: a temporary directory, no confinement.

    Raises `SandboxUnavailableError` if no sandbox can run on this machine, `SandboxDiedError` if this one did not start.
    """
    sandbox = await start(image, limits, kind=kind, network=network)
    try:
        yield sandbox
    finally:
        await finish(sandbox.close(), within_s=2 * KILL_S, name="sandbox.close")


async def start(
    image: Image | None = None, limits: Limits | None = None, *, kind: Kind = "bubblewrap", network: bool = False
) -> Sandbox:
    """Like `open_sandbox`, for an object that closes the sandbox itself."""
    image, limits = image or Image(), limits or Limits()
    place = await acquire(limits)
    try:
        sandbox = await _start(image, limits, kind=kind, network=network)
    except BaseException:
        if place is not None:
            os.close(place)
        raise
    if place is not None:
        sandbox.on_close.append(partial(os.close, place))
    return sandbox


async def _start(image: Image, limits: Limits, *, kind: Kind, network: bool) -> ProcessSandbox | RemoteSandbox:
    if kind == "none":
        return await _start_unconfined(image, limits)
    if kind in REMOTE:
        return await _start_remote(image, limits, kind=kind, network=network)
    starts = {"bubblewrap": _start_bubblewrap, "podman": _start_podman, "docker": _start_docker}
    if kind not in starts:
        known = ", ".join(map(repr, [*starts, *REMOTE]))
        raise SandboxUnavailableError(f"sandbox = {kind!r} is not known; it is {known} or 'none'")
    for _ in range(MAX_FIRST_STARTS):
        is_bubblewrap = kind == "bubblewrap"
        plan = SandboxPlan(
            kind=kind,
            image=image,
            limits=limits,
            network=network,
            env=environment_of(image),
            mounts=dict(mounts_of(image)),
            others=("/proc", "/dev") if is_bubblewrap else OF_THE_ENGINE,
            kill_watch=_kill_watch() if is_bubblewrap else None,
        )
        try:
            return await _ready(await starts[kind](plan))
        except SandboxDiedError as error:
            if kind in _started:
                raise
            cause = error
    raise SandboxUnavailableError(
        f"{kind} cannot start a sandbox: {MAX_FIRST_STARTS} ended without a message ({cause}). {HELP}"
    )


async def _start_remote(image: Image, limits: Limits, *, kind: str, network: bool) -> RemoteSandbox:
    if image.root is not None or image.layer is not None or image.binds:
        raise SandboxUnavailableError(
            f'sandbox = "{kind}" cannot start an image of this machine, and a coding agent or a Harbor task needs one: use '
            '"bubblewrap", "podman" or "docker"'
        )
    try:
        # Its package is imported only where it is used.
        start_machine = load_on_demand(f"rollbook.sandbox.providers.{kind}:start_{kind}")
    except MissingExtraError as error:
        raise SandboxUnavailableError(f'sandbox = "{kind}": {error}') from error
    sandbox: RemoteSandbox = await start_machine(image, limits, network=network)
    return sandbox


async def _start_bubblewrap(plan: SandboxPlan) -> ProcessSandbox:
    program = _program()
    with ExitStack() as stack:
        files = {f"/etc/{name}": stack.enter_context(_memory_file(name, text.encode())) for name, text in ETC.items()}
        filter_fd = stack.enter_context(_memory_file("seccomp", _filter()))
        command = [program, *_arguments(plan, files, filter_fd), "--"]
        return _spawn(command, plan, fds=[*files.values(), filter_fd])


async def _start_podman(plan: SandboxPlan) -> ProcessSandbox:
    return _spawn(podman_command(plan), plan)


async def _start_docker(plan: SandboxPlan) -> ProcessSandbox:
    setup = setup_program(plan, _secrets_of_root(), _filter())
    with TemporaryDirectory(prefix="rollbook-docker-") as directory:
        listener = _listen(Path(directory, "socket"))
        try:
            command = await asyncio.to_thread(docker_command, plan, Path(directory))
            process, stderr_fd = _popen([*command, *_guest_command(plan, setup)], stdin=subprocess.DEVNULL, env=None)
            channel = await _accept(listener, process)
        finally:
            listener.close()
    return ProcessSandbox(process, channel, plan, stderr_fd=stderr_fd)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Inherited by the connection: its first message has the process id of the guest.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.bind(str(path))
        listener.listen(1)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


async def _accept(listener: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket:
    """The connection of the guest; one that is closed if the container ended without it, or took too long."""
    loop = asyncio.get_running_loop()
    accepting = loop.create_task(loop.sock_accept(listener), name="sandbox.accept")
    ended = asyncio.create_task(asyncio.to_thread(process.wait, START_S), name="sandbox.container")
    try:
        await asyncio.wait({accepting, ended}, return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            return accepting.result()[0]
    except BaseException:
        process.kill()
        raise
    finally:
        accepting.cancel()
        ended.cancel()
    process.kill()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    return ours


async def _start_unconfined(image: Image, limits: Limits) -> ProcessSandbox:
    if image.root is not None or image.layer is not None or image.binds:
        raise SandboxUnavailableError(f'sandbox = "none" cannot start an image. {HELP}')
    directory = TemporaryDirectory(prefix="rollbook-unconfined-")
    image = Image(env={"HOME": directory.name, **image.env}, workdir=directory.name)
    sandbox = _spawn([], SandboxPlan(kind="none", image=image, limits=limits, env=environment_of(image)))
    sandbox.on_close.append(directory.cleanup)
    return await _ready(sandbox)


async def _ready(sandbox: ProcessSandbox) -> ProcessSandbox:
    """The sandbox, when its guest answers and its files are there."""
    plan = sandbox.plan
    try:
        await sandbox.wait_until_ready(START_S)
        if plan.image.layer is not None:
            await sandbox.unpack(plan.image.layer)
        _started.add(plan.kind)
    except BaseException as error:
        await sandbox.close()
        if isinstance(error, TimeoutError):
            raise SandboxDiedError(f"the sandbox did not start within {START_S:g} s") from error
        # Where one has started, bubblewrap works, and the cause is a state of the machine that may pass. One that was killed while
        # it started prints nothing.
        if isinstance(error, SandboxDiedError) and plan.kind not in _started and sandbox.printed:
            raise SandboxUnavailableError(f"{plan.kind} cannot start a sandbox: {error}. {HELP}") from error
        raise
    return sandbox


def _spawn(command: Sequence[str], plan: SandboxPlan, *, fds: Sequence[int] = ()) -> ProcessSandbox:
    """`command`: everything before the Python of the sandbox."""
    is_container = plan.kind == "podman"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Before the guest starts: a message that is sent earlier has no process id.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    try:
        process, stderr_fd = _popen(
            [*command, *_guest_command(plan, TAKE_CHANNEL if is_container else "")],
            stdin=theirs.fileno(),
            # An engine needs the environment of this process. Its container gets another one.
            env=None if is_container else plan.env,
            fds=fds,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ProcessSandbox(process, ours, plan, stderr_fd=stderr_fd)


def _guest_command(plan: SandboxPlan, setup: str = "") -> list[str]:
    """`setup`: code that runs before the guest, in its process."""
    run, program = guest_program(plan.image)
    return [python_of(plan.image), "-I", "-S", "-c", setup + run, program, marshal.dumps(_guest_limits(plan), 2).hex()]


def _popen(
    command: Sequence[str], *, stdin: int, env: Mapping[str, str] | None, fds: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and a file descriptor of what it prints as errors."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=writer,
            env=env,
            pass_fds=fds,
            start_new_session=True,
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return process, reader


def _arguments(plan: SandboxPlan, files: Mapping[str, int], filter_fd: int) -> Iterator[str]:
    limits = plan.limits
    yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--uid", "0", "--gid", "0")
    yield from ("--die-with-parent", "--as-pid-1", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox")
    if plan.network:
        yield "--share-net"
    # One file system for everything that is written, so that one limit holds for all of it.
    yield from ("--size", str(limits.disk_mb * 2**20), "--tmpfs", "/", "--dir", "/etc")
    links = plan.links
    for path, source in plan.mounts.items():
        yield from ("--symlink", links[path], path) if path in links else ("--ro-bind", str(source), path)
    for path, fd in files.items():
        if path not in plan.mounts:
            yield from ("--file", str(fd), path)
    if plan.network and Path("/etc/resolv.conf").exists():
        yield from ("--ro-bind", "/etc/resolv.conf", "/etc/resolv.conf")
    # /proc is read-only: where this process is root, the sandbox could change settings of the machine in /proc/sys otherwise.
    # /dev is read-only too: it is a file system without a size.
    yield from ("--proc", "/proc")
    for path in _secrets_of_root():
        yield from ("--ro-bind", "/dev/null", path)
    yield from ("--remount-ro", "/proc", "--dev", "/dev")
    shared_bytes = min(limits.disk_mb, SHARED_MB) * 2**20
    yield from ("--perms", "1777", "--size", str(shared_bytes), "--tmpfs", "/dev/shm", "--remount-ro", "/dev")
    yield from ("--perms", "1777", "--dir", "/tmp", "--dir", "/root", "--dir", plan.image.workdir, "--chdir", "/")
    yield from ("--seccomp", str(filter_fd))


@cache
def _secrets_of_root() -> tuple[str, ...]:
    """Files of /proc about the whole kernel that only root reads. Where this process is root, code inside is too."""
    if os.getuid() != 0:
        return ()
    files = [path for path in Path("/proc").iterdir() if not path.name.isdigit() and path.is_file()]
    secret = [path for path in files if path.lstat().st_mode & 0o044 == 0]
    return tuple(sorted({*map(str, secret), *(str(path) for path in files if path.name in PRIVATE_PROC)}))


def _guest_limits(plan: SandboxPlan) -> dict[str, object]:
    if plan.kind == "none":
        return {}
    limits = plan.limits
    memory_bytes = limits.memory_mb * 2**20
    rlimits = {
        resource.RLIMIT_DATA: memory_bytes * 7 // 8,
        resource.RLIMIT_NOFILE: min(OPEN_FILES, _most(resource.RLIMIT_NOFILE)),
        # The kernel counts both for the user of this machine, too.
        resource.RLIMIT_SIGPENDING: min(QUEUED_SIGNALS, _most(resource.RLIMIT_SIGPENDING)),
        resource.RLIMIT_MSGQUEUE: min(QUEUED_BYTES, _most(resource.RLIMIT_MSGQUEUE)),
    }
    if os.getuid() != 0 and _kernel() >= (5, 14):
        # Counted for each user namespace since this kernel, and never for root. It holds a fork bomb until the guest ends it.
        rlimits[resource.RLIMIT_NPROC] = 2 * limits.processes
    return {
        "memory_bytes": memory_bytes,
        "cpu_s": limits.cpu_s,
        "processes": limits.processes,
        "files": limits.files,
        "wall_s": limits.wall_s,
        "has_own_network": not plan.network,
        "rlimits": rlimits,
    }


def _kernel() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", platform.release())[:2]))


def _most(kind: int) -> int:
    """What the kernel lets this process request."""
    _, most = resource.getrlimit(kind)
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def guest_program(image: Image) -> tuple[str, str]:
    """What `python -c` runs, and its argument: the program of the guest. It is compiled here, unless the root has a Python of its
    own: every start would wait for the compiler, for a tenth of its time."""
    return (RUN_SOURCE, _guest_source()) if image.root is not None else (RUN_COMPILED, _guest_code())


@cache
def _guest_source() -> str:
    return Path(__file__).with_name("guest.py").read_text(encoding="utf-8")


@cache
def _kill_watch() -> tuple[object, ...] | None:
    """What a guest needs to report kills. None: this kernel cannot."""
    setting = kill_watch_filter()
    if setting is None or _kernel() < (5, 5):
        return None
    return Path(__file__).with_name("kill_watch.py").read_text(encoding="utf-8"), setting


@cache
def _guest_code() -> str:
    return marshal.dumps(compile(_guest_source(), "guest.py", "exec", dont_inherit=True, optimize=2)).hex()


@contextmanager
def _memory_file(name: str, content: bytes) -> Iterator[int]:
    fd = os.memfd_create(name)
    try:
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _filter() -> bytes:
    code = seccomp_filter()
    if code is None:
        raise SandboxUnavailableError(
            f"bubblewrap needs a filter of system calls, and there is none for {platform.machine()}. Use a machine with "
            f'{" or ".join(ARCHITECTURES)}, or sandbox = "podman". {HELP}'
        )
    return code


def _program() -> str:
    if sys.platform != "linux":
        raise SandboxUnavailableError(f"bubblewrap runs on Linux only, and this is {platform.system()}. {HELP}")
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnavailableError(f"bubblewrap is not installed: there is no program bwrap on the PATH. {HELP}")
    return program
