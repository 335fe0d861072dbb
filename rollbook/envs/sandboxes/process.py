"""The child processes of a sandbox: own process group, private directory, bare environment.

The command line of such a process names its owner, and so does the name of its directory. A later start on the same machine thereby
recognises what a killed owner left behind (`sandboxes.orphans`).
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollbook.concurrency.child_process.process import PACKAGE_ROOT, ChildProcess, ChildSpec
from rollbook.envs.sandboxes.sandbox import SandboxStartError

DIRECTORY_PREFIX = "rollbook-sandbox-"
# What a sandbox process gets of our environment: enough to start Python, and no secrets.
INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT", "COVERAGE_PROCESS_START")


def owner_mark(pid: int) -> str:
    """`pid-starttime`: identifies a process also after its pid was reused. The start time is 0 on systems without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{pid}-0"
    return f"{pid}-{stat.rpartition(')')[2].split()[19]}"


def private_directory(name: str) -> Path:
    """A new directory that only this user can enter, named after its owner."""
    return Path(tempfile.mkdtemp(prefix=f"{DIRECTORY_PREFIX}{owner_mark(os.getpid())}-{name}-")).resolve()


def remove_directory(directory: Path) -> None:
    """Remove a private directory, if it exists."""
    shutil.rmtree(directory, ignore_errors=True)


async def start_sandbox_process(
    module: str,
    *,
    settings: Mapping[str, Any],
    directory: Path,
    environment: Mapping[str, str],
    inherited_fds: Sequence[int] = (),
) -> ChildProcess:
    """Start a module with JSON settings. Its output is in `output.txt` of the directory. Raises `SandboxStartError`."""
    inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    spec = ChildSpec(
        module=module,
        arguments=(json.dumps({**settings, "directory": str(directory)}), f"--owner={owner_mark(os.getpid())}"),
        environment={
            **inherited,
            "PYTHONPATH": PACKAGE_ROOT,
            "HOME": str(directory),
            "TMPDIR": str(directory),
            **environment,
        },
        directory=directory,
        inherited_fds=inherited_fds,
        has_own_group=True,
        output=directory / "output.txt",
    )
    try:
        return await ChildProcess.start(spec)
    except OSError as error:
        raise SandboxStartError(f"{module} could not be started: {error}") from error
