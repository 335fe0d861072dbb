"""The command that starts a sandbox in a container of Docker, for hosts that offer Docker and neither bubblewrap nor podman.

It has the same files and the same guest as a sandbox of bubblewrap. Docker passes no file descriptors and has no root of a fixed
size, so the container begins with a program of ours that has the rights to mount (`SETUP`): it connects to the host through a
socket that is bound into the container, builds the private `/` in a tmpfs, leaves the container's own files, gives up every right,
installs the system call filter, and becomes the guest. No code of a model runs before that.

The container ends with its guest, and the guest with the process that opened the sandbox. Docker then removes the container.
"""

import hashlib
import io
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollbook.sandbox.plan import SandboxPlan
from rollbook.sandbox.root import ETC
from rollbook.sandbox.sandbox import SHARED_MB, SandboxUnavailableError

CHANNEL = "/channel"
"""The directory of the socket, in the container. It is not in the sandbox."""
IMAGE = "rollbook-sandbox"
"""The name of the image, which has no files but the links of the root (`/bin` to `usr/bin`)."""
COMMAND_S = 60.0
MORE_MB = 64
"""For the guest itself."""
SETUP = """
import _socket, ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*[a.encode() if isinstance(a, str) else a for a in arguments]):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str((name, *arguments)))
def bind(path, flags):
    target = "/mnt" + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT, 0o644))
    call("mount", path, target, None, MS_BIND | MS_REC, None)
    seal(target, flags, AT_RECURSIVE)
def seal(target, flags, scope):
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    call("syscall", 442, AT_FDCWD, target, scope, attributes, 32)  # mount_setattr
AT_FDCWD, AT_RECURSIVE, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = -100, 0x8000, 4096, 16384, 1 << 18, 2
READ_ONLY, NOSUID, NODEV = 1, 2, 4
channel = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
channel.connect(SOCKET)
os.dup2(channel.detach(), 0)
os.umask(0)
call("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)
call("mount", "tmpfs", "/mnt", "tmpfs", NOSUID | NODEV, "mode=755,size=%d" % SIZE)
for path in DIRECTORIES:
    os.makedirs("/mnt" + path, exist_ok=True)
os.makedirs("/mnt/tmp")
os.chmod("/mnt/tmp", 0o1777)
for path, text in FILES.items():
    with open("/mnt" + path, "w") as file:
        file.write(text)
for path, target in LINKS.items():
    os.makedirs(os.path.dirname("/mnt" + path), exist_ok=True)
    os.symlink(target, "/mnt" + path)
for path in BINDS:
    bind(path, READ_ONLY | NOSUID | NODEV)
bind("/proc", NOSUID | NODEV)
for path in HIDDEN:
    if os.path.exists("/mnt" + path):
        call("mount", "/dev/null", "/mnt" + path, None, MS_BIND, None)
seal("/mnt/proc", READ_ONLY | NOSUID, AT_RECURSIVE)
bind("/dev", NOSUID)
seal("/mnt/dev", READ_ONLY, 0)
os.chdir("/mnt")
call("syscall", {"x86_64": 155, "aarch64": 41}[os.uname().machine], ".", ".")  # pivot_root
call("umount2", ".", MNT_DETACH)
os.chdir("/")
os.umask(0o022)
call("prctl", 28, 0x2F, 0, 0, 0)  # PR_SET_SECUREBITS: root has no privileges, locked
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
code = ctypes.create_string_buffer(bytes.fromhex(FILTER), len(FILTER) // 2)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
call("prctl", 22, 2, ctypes.byref(Program(len(FILTER) // 16, ctypes.addressof(code))), 0, 0)  # PR_SET_SECCOMP
"""
"""Runs before the guest, in its process. The names in capitals that it does not define are set by `setup_program`."""


def setup_program(plan: SandboxPlan, hidden: Sequence[str], filter_code: bytes) -> str:
    mounts, links = plan.mounts, plan.links
    binds = [path for path in mounts if path not in links]
    values: dict[str, object] = {
        "SOCKET": f"{CHANNEL}/socket",
        "SIZE": plan.limits.disk_mb * 2**20,
        "DIRECTORIES": ["/etc", "/root", plan.image.workdir],
        "FILES": {f"/etc/{name}": text for name, text in ETC.items() if f"/etc/{name}" not in mounts},
        "LINKS": links,
        "BINDS": [*binds, *(["/etc/resolv.conf"] if plan.network and "/etc/resolv.conf" not in mounts else [])],
        "HIDDEN": list(hidden),
        "FILTER": filter_code.hex(),
    }
    return "".join(f"{name} = {value!r}\n" for name, value in values.items()) + SETUP


def docker_command(plan: SandboxPlan, channel: Path) -> list[str]:
    """Everything before the Python of the container. Makes the image if it is not there. Raises `SandboxUnavailableError`."""
    if shutil.which("docker") is None:
        raise SandboxUnavailableError('sandbox = "docker": there is no program docker on the PATH')
    limits, links = plan.limits, plan.links
    memory_mb = limits.held_mb + MORE_MB
    options = {
        "network": "host" if plan.network else "none",
        "memory": f"{memory_mb}m",
        "memory-swap": f"{memory_mb}m",
        "pids-limit": str(2 * limits.processes),
        "shm-size": f"{min(limits.disk_mb, SHARED_MB)}m",
        "log-driver": "none",
        "workdir": "/",
        "attach": "stderr",
        "cap-drop": "all",
    }
    return [
        *("docker", "run", "--rm", "--ulimit=nofile=4096:4096"),
        # Given up by the setup, before any code of a model runs.
        *(f"--cap-add={name}" for name in ("SYS_ADMIN", "SETPCAP")),
        *("--security-opt=seccomp=unconfined", "--security-opt=apparmor=unconfined"),
        *(f"--{name}={value}" for name, value in options.items()),
        *([] if plan.network else ["--hostname=sandbox"]),
        *(f"--env={name}={value}" for name, value in plan.env.items()),
        *(_bind(path, source) for path, source in plan.mounts.items() if path not in links),
        _bind(CHANNEL, channel),
        _image(links),
    ]


def _bind(path: str, source: Path) -> str:
    return f"--mount=type=bind,src={source},dst={path},readonly"


def _image(links: Mapping[str, str]) -> str:
    """The name of an image with these links, which Docker needs to find the loader of programs."""
    digest = hashlib.blake2b(repr(sorted(links.items())).encode(), digest_size=6).hexdigest()
    name = f"{IMAGE}:{digest}"
    if _docker(["image", "inspect", "--format={{.Id}}", name]).returncode == 0:
        return name
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        directory = tarfile.TarInfo("mnt")
        directory.type, directory.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(directory)
        for path, target in sorted(links.items()):
            link = tarfile.TarInfo(path.lstrip("/"))
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
    done = _docker(["import", "-", name], buffer.getvalue())
    if done.returncode != 0:
        raise SandboxUnavailableError(f'sandbox = "docker": {done.stderr.decode(errors="replace").strip()}')
    return name


def _docker(arguments: Sequence[str], sent: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["docker", *arguments], input=sent, capture_output=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailableError(f'sandbox = "docker": {error}') from error
