"""Starts sandboxes with bubblewrap: own namespaces for everything, a private `/` of fixed size, no privileges.

A sandbox sees `/usr` of this machine (or of `Image.root`) read-only, the Python that runs Rollbook, and nothing else of the
machine: no home directories, no `/etc`, no environment variables, no processes, no network. Everything that it writes is in one
tmpfs. It ends with the process that started it, however that ends.

Where bubblewrap cannot run, `open_sandbox` raises. Code runs unconfined only with `kind="none"`.
"""

import marshal
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rollbook.concurrency.deadline import finish
from rollbook.sandbox.process import KILL_S, ProcessSandbox
from rollbook.sandbox.sandbox import SYSTEM_PATH, Image, Limits, Sandbox, SandboxDiedError, SandboxUnavailableError
from rollbook.sandbox.seccomp import seccomp_filter

Kind = Literal["bubblewrap", "none"]

START_S = 30.0
"""A start takes milliseconds; an overloaded machine needs longer."""
OPEN_FILES = 4096
WHOLE = frozenset({"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"})
"""Directories of a root that are read-only as a whole. Of the others, each entry is: files can be created next to them."""
PRIVATE = frozenset({"proc", "dev", "sys", "tmp", "run", "mnt", "media", "boot", "lost+found"})
"""Directories of a root that are not shown."""
HOST_ETC = ("alternatives", "ld.so.cache", "ssl/certs", "mime.types", "os-release")
"""What programs of `/usr` read in `/etc`: links to their variants, the cache of libraries, root certificates."""
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
HELP = (
    "Install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap), allow user namespaces (sysctl "
    "kernel.unprivileged_userns_clone=1; on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; in a container its engine must "
    'permit them), or use another Linux machine. sandbox = "none" runs the code unconfined, with all rights of this process, and '
    "is recorded with the run"
)
_started: set[str] = set()
"""The kinds of which this process has started one."""


@asynccontextmanager
async def open_sandbox(
    image: Image | None = None, limits: Limits | None = None, *, kind: Kind = "bubblewrap", network: bool = False
) -> AsyncIterator[Sandbox]:
    """A sandbox for the block. `network`: share the network of this machine. `kind="none"`: a temporary directory, no confinement.

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
    if kind == "none":
        return await _start_unconfined(image, limits)
    if kind != "bubblewrap":
        raise SandboxUnavailableError(f"sandbox = {kind!r} is not known; it is 'bubblewrap' or 'none'")
    program = _program()
    with ExitStack() as stack:
        files = {f"/etc/{name}": stack.enter_context(_memory_file(name, text.encode())) for name, text in ETC.items()}
        code = seccomp_filter()
        filter_fd = None if code is None else stack.enter_context(_memory_file("seccomp", code))
        mounts = dict(_mounts(image))
        command = [program, *_arguments(image, limits, mounts, files, filter_fd, network=network)]
        facts = {
            "kind": kind,
            "network": "host" if network else "none",
            "seccomp": code is not None,
            "limits": asdict(limits),
        }
        sandbox = _spawn(
            [*command, "--", _python(image)],
            image,
            limits,
            guest_limits=_guest_limits(limits),
            facts=facts,
            fds=[*files.values(), *([] if filter_fd is None else [filter_fd])],
            mounts=["/proc", "/dev", *mounts],
        )
    await _wait_until_ready(sandbox, image)
    return sandbox


async def _start_unconfined(image: Image, limits: Limits) -> Sandbox:
    if image.root is not None or image.layer is not None or image.binds:
        raise SandboxUnavailableError(f'sandbox = "none" cannot start an image. {HELP}')
    directory = TemporaryDirectory(prefix="rollbook-unconfined-")
    image = Image(env={"HOME": directory.name, **image.env}, workdir=directory.name)
    facts = {"kind": "none", "network": "host", "seccomp": False, "limits": {}}
    sandbox = _spawn([sys.executable], image, limits, guest_limits={}, facts=facts, fds=[], mounts=[])
    sandbox.on_close = directory.cleanup
    await _wait_until_ready(sandbox, image)
    return sandbox


async def _wait_until_ready(sandbox: ProcessSandbox, image: Image) -> None:
    try:
        await sandbox.wait_until_ready(START_S)
        if image.layer is not None:
            await sandbox.unpack(image.layer)
        _started.add(str(sandbox.facts["kind"]))
    except BaseException as error:
        await sandbox.close()
        if isinstance(error, TimeoutError):
            raise SandboxDiedError(f"the sandbox did not start within {START_S:g} s") from error
        # Where one has started, bubblewrap works, and the cause is a state of the machine that may pass.
        if isinstance(error, SandboxDiedError) and sandbox.facts["kind"] not in _started:
            raise SandboxUnavailableError(f"bubblewrap cannot start a sandbox: {error}. {HELP}") from error
        raise


def _spawn(
    command: list[str],
    image: Image,
    limits: Limits,
    *,
    guest_limits: Mapping[str, object],
    facts: Mapping[str, object],
    fds: list[int],
    mounts: list[str],
) -> ProcessSandbox:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Before the guest starts: a message that is sent earlier has no process id.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    stderr_reader, stderr_writer = os.pipe()
    os.set_blocking(stderr_reader, False)
    try:
        process = subprocess.Popen(
            [*command, "-I", "-S", "-c", _guest_source(), marshal.dumps(dict(guest_limits), 2).hex()],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=stderr_writer,
            env=_environment(image),
            pass_fds=fds,
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        os.close(stderr_reader)
        raise
    finally:
        theirs.close()
        os.close(stderr_writer)
    return ProcessSandbox(
        process,
        ours,
        stderr_fd=stderr_reader,
        image=image,
        limits=limits,
        env=_environment(image),
        facts=facts,
        mounts=mounts,
    )


def _arguments(
    image: Image,
    limits: Limits,
    mounts: Mapping[str, Path],
    files: Mapping[str, int],
    filter_fd: int | None,
    *,
    network: bool,
) -> Iterator[str]:
    yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--uid", "0", "--gid", "0")
    yield from ("--die-with-parent", "--as-pid-1", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox")
    if network:
        yield "--share-net"
    # One file system for everything that is written, so that one limit holds for all of it.
    yield from ("--size", str(limits.disk_mb * 2**20), "--tmpfs", "/", "--dir", "/etc")
    for path, source in mounts.items():
        if source.is_symlink():
            yield from ("--symlink", str(source.readlink()), path)
        else:
            yield from ("--ro-bind", str(source), path)
    for path, fd in files.items():
        if path not in mounts:
            yield from ("--file", str(fd), path)
    if network and Path("/etc/resolv.conf").exists():
        yield from ("--ro-bind", "/etc/resolv.conf", "/etc/resolv.conf")
    # /proc is read-only: where this process is root, the sandbox could change settings of the machine in /proc/sys otherwise.
    # /dev is read-only too: it is a file system without a size.
    yield from ("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev")
    yield from ("--size", str(limits.disk_mb * 2**20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev")
    yield from ("--perms", "1777", "--dir", "/tmp", "--dir", "/root", "--dir", image.workdir, "--chdir", "/")
    if filter_fd is not None:
        yield from ("--seccomp", str(filter_fd))


def _mounts(image: Image) -> Iterator[tuple[str, Path]]:
    """Path in the sandbox, and its source on this machine."""
    if image.root is None:
        for name in sorted(WHOLE):
            if Path("/", name).exists():
                yield f"/{name}", Path("/", name)
        for name in HOST_ETC:
            if Path("/etc", name).exists():
                yield f"/etc/{name}", Path("/etc", name).resolve()
        for directory in _python_directories():
            yield str(directory), directory
    else:
        for entry in sorted(image.root.iterdir()):
            if entry.name in WHOLE:
                yield f"/{entry.name}", entry
            elif entry.is_dir() and entry.name not in PRIVATE:
                for child in sorted(entry.iterdir()):
                    yield f"/{entry.name}/{child.name}", child
    for path, source in image.binds.items():
        yield path, source.resolve()


@cache
def _python_directories() -> tuple[Path, ...]:
    """The programs and libraries of the Python that runs this process, unless they are in /usr."""
    prefix = Path(sys.base_prefix).resolve()
    if prefix.is_relative_to("/usr"):
        return ()
    return tuple(path for path in (prefix / "bin", prefix / "lib") if path.is_dir())


def _python(image: Image) -> str:
    return "/usr/bin/python3" if image.root is not None else os.path.realpath(sys.executable)


def _environment(image: Image) -> dict[str, str]:
    path = image.env.get("PATH", SYSTEM_PATH)
    if image.root is None:
        path = f"{Path(_python(image)).parent}:{path}"
    return {"HOME": "/root", "LANG": "C.UTF-8", "USER": "root", **image.env, "PATH": path}


def _guest_limits(limits: Limits) -> dict[str, object]:
    memory_bytes = limits.memory_mb * 2**20
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    most_files = OPEN_FILES if most_files == resource.RLIM_INFINITY else min(OPEN_FILES, most_files)
    kernel = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    rlimits = {resource.RLIMIT_DATA: memory_bytes * 7 // 8, resource.RLIMIT_NOFILE: most_files}
    if os.getuid() != 0 and kernel >= (5, 14):
        # Counted for each user namespace since this kernel, and never for root. It holds a fork bomb until the guest ends it.
        rlimits[resource.RLIMIT_NPROC] = 2 * limits.processes
    return {
        "memory_bytes": memory_bytes,
        "cpu_s": limits.cpu_s,
        "processes": limits.processes,
        "files": limits.files,
        "wall_s": limits.wall_s,
        "rlimits": rlimits,
    }


@cache
def _guest_source() -> str:
    return Path(__file__).with_name("guest.py").read_text(encoding="utf-8")


@contextmanager
def _memory_file(name: str, content: bytes) -> Iterator[int]:
    fd = os.memfd_create(name)
    try:
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _program() -> str:
    if sys.platform != "linux":
        raise SandboxUnavailableError(f"bubblewrap runs on Linux only, and this is {platform.system()}. {HELP}")
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnavailableError(f"bubblewrap is not installed: there is no program bwrap on the PATH. {HELP}")
    return program
