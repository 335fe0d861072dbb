"""The command that starts a sandbox in a container of podman, for hosts whose administrators trust an engine more than bubblewrap.

It has the same files and the same guest as a sandbox of bubblewrap, so the rest of this room does not know the difference. The
container's root is a tmpfs of fixed size in a mount namespace of its own, which ends with its processes: nothing is left of one
that was killed. Control groups of the engine limit memory and processes at once; the guest reports an excess before that, as an
outcome.
"""

import json
import os
import shutil
from pathlib import Path

from rollbook.sandbox.plan import SandboxPlan
from rollbook.sandbox.sandbox import SHARED_MB, SandboxUnavailableError
from rollbook.sandbox.seccomp import seccomp_profile

PLACE = "/mnt"
"""A directory that every Linux has. It is covered in the private mount namespace only."""
FIRST_UID, NUM_UIDS = 524288, 65536
"""Users of the container on this machine: root inside is nobody here."""
SCRIPT = f"""
set -e
exec 3<&0 </dev/null
mount -t tmpfs -o size="$1",mode=755 tmpfs "$0"
mkdir -p "$0/root/etc" "$0/root/root" "$0/root/proc" "$0/root/dev" "$0/root/sys" "$0/root/$2"
mkdir -m 1777 "$0/root/tmp"
printf %s "$3" > "$0/seccomp.json"
printf 'root:x:0:0:root:/root:/bin/sh\\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\\n' > "$0/root/etc/passwd"
printf 'root:x:0:\\nnogroup:x:65534:\\n' > "$0/root/etc/group"
printf '127.0.0.1 localhost\\n::1 localhost\\n' > "$0/root/etc/hosts"
shift 3
chown -R {FIRST_UID}:{FIRST_UID} "$0/root"
while [ "$1" != -- ]; do
  directory="$0/root${{1%/*}}"
  [ -d "$directory" ] || {{ mkdir "$directory"; chown {FIRST_UID}:{FIRST_UID} "$directory"; }}
  ln -s "$2" "$0/root$1"
  shift 2
done
shift
exec "$@"
"""
"""Arguments: the place, the size, the working directory, the system call filter, links as pairs, `--`, and the command."""
OF_THE_ENGINE = ("/proc", "/dev", "/sys", "/etc/hostname", "/etc/mtab", "/etc/resolv.conf", "/run/.containerenv")
"""What podman mounts or writes: no part of a snapshot."""
TAKE_CHANNEL = "import ctypes, os; os.dup2(3, 0); os.close(3); ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
"""At the start of the guest. The engine has passed the channel as descriptor 3, and mounts /proc writable: a process that is not
dumpable (PR_SET_DUMPABLE) keeps its memory and its settings to itself."""
CONTROL_GROUPS = Path("/sys/fs/cgroup")
MORE_MB = 64
"""For the guest itself."""


def podman_command(plan: SandboxPlan) -> list[str]:
    """Everything before the Python of the container. Its standard input is the channel. Raises `SandboxUnavailableError`."""
    if os.geteuid() != 0:
        raise SandboxUnavailableError('sandbox = "podman" needs root for its tmpfs; without root use "bubblewrap"')
    for program in ("podman", "unshare"):
        if shutil.which(program) is None:
            raise SandboxUnavailableError(
                f'sandbox = "podman": there is no program {program} on the PATH (apt-get install podman)'
            )
    limits, links = plan.limits, plan.links
    memory_mb = limits.held_mb + MORE_MB
    options = {
        "network": "host" if plan.network else "none",
        "memory": f"{memory_mb}m",
        "memory-swap": f"{memory_mb}m",
        "pids-limit": str(2 * limits.processes),
        "shm-size": f"{min(limits.disk_mb, SHARED_MB)}m",
        "hostname": "sandbox",
        "log-driver": "none",
        "cap-drop": "all",
        "preserve-fds": "1",
        "workdir": "/",
    }
    return [
        *("unshare", "--mount", "--propagation", "private", "sh", "-c", SCRIPT),
        *(PLACE, f"{limits.disk_mb}m", plan.image.workdir.lstrip("/"), json.dumps(seccomp_profile())),
        *(part for link in links.items() for part in link),
        *(
            "--",
            "podman",
            *_runtime(),
            "run",
            "--rm",
            "--no-hosts",
            "--ulimit=nofile=4096:4096",
            "--ulimit=nproc=4096:4096",
        ),
        *(
            "--security-opt=no-new-privileges",
            f"--security-opt=seccomp={PLACE}/seccomp.json",
            "--security-opt=mask=/sys",
        ),
        *(f"--{name}map=0:{FIRST_UID}:{NUM_UIDS}" for name in ("uid", "gid")),
        *(f"--{name}={value}" for name, value in options.items() if (name, plan.network) != ("hostname", True)),
        *(f"--env={name}={value}" for name, value in plan.env.items()),
        *(
            f"--mount=type=bind,src={source},dst={path},ro=true"
            for path, source in plan.mounts.items()
            if path not in links
        ),
        *("--rootfs", f"{PLACE}/root"),
    ]


def _runtime() -> list[str]:
    """crun refuses machines whose control groups are of both versions; runc accepts them. Raises `SandboxUnavailableError`."""
    if (CONTROL_GROUPS / "cgroup.controllers").exists():
        return []
    if shutil.which("runc") is not None:
        return ["--runtime", "runc"]
    if (CONTROL_GROUPS / "unified").exists():
        raise SandboxUnavailableError(
            'sandbox = "podman": the control groups of this machine are of both versions: install runc, which accepts that '
            "(apt-get install runc)"
        )
    return []
