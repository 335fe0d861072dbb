"""A child process that a sandbox is made of: own process group, private directory, watched by its parent, and gone with it.

Whoever kills the parent, by whatever signal, the child ends: it holds the read end of a pipe whose write end only the parent has
(`concurrency.parent_watch`). The child's command line names its owner and its private directory, so that a later start on the same
machine recognises what a lost one left behind (`sandboxes.orphans`).
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollbook
from rollbook.envs.sandboxes.sandbox import SandboxStartError

DIRECTORY_PREFIX = "rollbook-sandbox-"
# What a child sees of our environment: enough to start Python, nothing that is secret.
INHERITED = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT", "COVERAGE_PROCESS_START")
KILL_WITHIN_S = 5.0
# Replies are JSON lines; a reply longer than this is a fault of ours, since outputs are bounded well below.
LINE_BYTES = 16 * 2**20


def owner_mark(pid: int) -> str:
    """`pid-starttime`: names a process for ever, also after its number was given to another. Start time 0 where it is not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{pid}-0"
    return f"{pid}-{stat.rpartition(')')[2].split()[19]}"


def private_directory(name: str) -> Path:
    """A fresh directory that only we can enter, named after its owner."""
    return Path(tempfile.mkdtemp(prefix=f"{DIRECTORY_PREFIX}{owner_mark(os.getpid())}-{name}-")).resolve()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run: a module of ours, its settings as JSON, the environment it gets beside the bare minimum, sockets to inherit."""

    module: str
    settings: Mapping[str, Any]
    directory: Path
    environment: Mapping[str, str]
    sockets: Sequence[int] = ()


class Child:
    """One running child. Its stdin and stdout are the channel to it; what it says on stderr lies in `stderr.txt`."""

    def __init__(self, process: asyncio.subprocess.Process, spec: ChildSpec, watch_fd: int) -> None:
        self._process = process
        self._spec = spec
        self._watch_fd = watch_fd

    @classmethod
    async def start(cls, spec: ChildSpec) -> "Child":
        read_fd, write_fd = os.pipe()
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment |= {
            "PYTHONPATH": str(Path(rollbook.__file__).resolve().parents[1]),
            "HOME": str(spec.directory),
            "TMPDIR": str(spec.directory),
            **spec.environment,
        }
        settings = {**spec.settings, "watch_fd": read_fd, "directory": str(spec.directory)}
        # -P: the private directory must not be searched for modules; an agent may be able to write there.
        line = [sys.executable, "-P", "-m", spec.module, json.dumps(settings), f"--owner={owner_mark(os.getpid())}"]
        try:
            with (spec.directory / "stderr.txt").open("ab") as errors:
                process = await asyncio.create_subprocess_exec(
                    *line,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    cwd=spec.directory,
                    env=environment,
                    pass_fds=(read_fd, *spec.sockets),
                    start_new_session=True,
                    limit=LINE_BYTES,
                )
        except OSError as error:
            os.close(write_fd)
            raise SandboxStartError(f"{spec.module} could not be started: {error}") from error
        finally:
            os.close(read_fd)
        return cls(process, spec, write_fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ended(self) -> int:
        return await self._process.wait()

    async def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def receive(self) -> dict[str, Any]:
        """The next message. Raises `EOFError` when the child is gone."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError(f"{self._spec.module} (process {self.pid}) has ended")
        message: dict[str, Any] = json.loads(line)
        return message

    def last_words(self) -> str:
        """The end of its stderr, for an error that must say why."""
        with contextlib.suppress(OSError):
            return (self._spec.directory / "stderr.txt").read_text(encoding="utf-8", errors="replace")[-2000:].strip()
        return ""

    def memory_bytes(self) -> int:
        """Resident memory that is this process's own; 0 where the system does not tell."""
        try:
            fields = Path(f"/proc/{self.pid}/statm").read_text(encoding="utf-8").split()
        except OSError:
            return 0
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    async def kill(self) -> None:
        """End the whole process group at once: a sandbox has nothing to save. Does no harm when it has ended."""
        if self._watch_fd >= 0:
            os.close(self._watch_fd)
            self._watch_fd = -1
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_WITHIN_S):
                await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def remove_directory(directory: Path) -> None:
    """Remove a private directory; one that is gone already does no harm."""
    shutil.rmtree(directory, ignore_errors=True)
