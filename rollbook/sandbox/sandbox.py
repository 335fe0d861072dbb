"""The protocol of a sandbox: start, exec, read, write, snapshot, close.

    async with open_sandbox() as sandbox:                            # no network, private /, limits as a whole
        await sandbox.write("main.py", b"print(6 * 7)")
        result = await sandbox.exec("python3 main.py", timeout_s=10)
        result.exit_code, result.stdout                              # 0, b"42\\n"

Errors say who is at fault, so that a failure of the machine is never scored as a wrong answer:

    SandboxUnavailableError   no sandbox can run here: the operator must act; code is never run unconfined instead
    SandboxError              this sandbox failed: the episode is unscorable and is played again
    |-- SandboxDiedError      it is gone, and the code inside did not cause it
    `-- SandboxLimitError     the code inside exceeded a limit of the sandbox as a whole, which ended it: an outcome

A command that fails, is killed by its deadline or prints too much is a result, not an error.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rollbook.contracts.errors import EpisodeError, RunError

REMOTE = ("e2b", "modal")
"""Kinds of sandboxes on machines of a provider, which cannot start an image of this machine."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_OUTPUT_BYTES = 2**20
MAX_READ_BYTES = 64 * 2**20
LIFETIME_S = 86_400.0
SHARED_MB = 64
"""The size of /dev/shm, which counts as memory. Containers have as much by default."""


class SandboxUnavailableError(RunError):
    """No sandbox can run on this machine. The message has the reason and the alternatives."""


class SandboxError(EpisodeError):
    """A sandbox failed. The episode is not scored."""


class SandboxDiedError(SandboxError):
    """The sandbox is gone, and the code inside did not cause it."""


class SandboxLimitError(SandboxError):
    """The code inside exceeded a limit of the sandbox, which ended with all its processes. `limit` is the name of the limit."""

    def __init__(self, message: str, limit: str = "") -> None:
        super().__init__(message, limit)
        self.limit = limit

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of a sandbox as a whole. Exceeding one of them ends it, except disk: writes fail when it is full."""

    memory_mb: int = 1024
    """Memory of all processes, with their sockets and /dev/shm. A single process gets an error when it requests more
    than 7/8 of it."""
    cpu_s: float = 600.0
    """Processor time of all processes together."""
    processes: int = 256
    """Processes, threads and pseudo-terminals."""
    disk_mb: int = 512
    """Files in `/`, which are kept in memory."""
    files: int = 100_000
    """Files and directories that the sandbox creates."""
    wall_s: float = 3600.0
    """Time in which commands run. A sandbox that is started in advance, or whose agent waits for the policy, uses none."""
    lifetime_s: float = LIFETIME_S
    """Time for which it may be open. Its end is not caused by the code: it raises `SandboxDiedError`."""

    @property
    def held_mb(self) -> int:
        """Memory of this machine that it can take: files are in memory too."""
        return self.memory_mb + self.disk_mb

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"the limit {name} is {getattr(self, name)!r}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxImage:
    """The files that a sandbox starts with. Everything outside `/usr` and `binds` is private to the sandbox and writable."""

    root: Path | None = None
    """A directory with a Linux root and Python 3.9 or newer, read-only in the sandbox. None: the `/usr` of this machine."""
    layer: Path | None = None
    """A tar file that is unpacked into the sandbox: the result of `snapshot`."""
    binds: Mapping[str, Path] = field(default_factory=dict)
    """Further files and directories of this machine, read-only: path in the sandbox to path here."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all commands. Those of this process are never passed on."""
    workdir: str = "/work"
    """Where commands start, and what relative paths are relative to. Created if needed."""


# Their names in this package; the long ones are public.
Limits = SandboxLimits
Image = SandboxImage


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """A command that has ended."""

    exit_code: int
    """Negative: killed by this signal. 127: not found, 126: cannot be started."""
    stdout: bytes
    stderr: bytes
    dropped_bytes: int = 0
    """Output beyond `output_bytes`, which was discarded."""
    is_timed_out: bool = False
    """The deadline passed, and the command was killed."""

    @property
    def is_ok(self) -> bool:
        return self.exit_code == 0 and not self.is_timed_out

    @property
    def text(self) -> str:
        """Standard output and standard error as text."""
        return (self.stdout + self.stderr).decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxState:
    """What code has left of a sandbox."""

    free_bytes: int
    """Of the disk."""
    free_files: int
    read_only: tuple[str, ...] = ()
    """Files and directories of the image that no code inside can change."""
    moved: tuple[str, ...] = ()
    """Those of them that are no longer at their path: code inside has moved the directory above."""


OnOutput = Callable[[str, bytes], None]
"""Receives output while a command runs: `stdout` or `stderr`, and the bytes. Called in the event loop; must not block."""


class Sandbox(Protocol):
    """One private machine for one episode. Methods may be called concurrently. All raise `SandboxDiedError` or `SandboxLimitError`
    once the sandbox has ended."""

    @property
    def facts(self) -> Mapping[str, object]:
        """What confines it, for the record of the run: `kind`, `network`, `seccomp`, and the limits."""

    async def ended(self) -> None:
        """Returns when it was closed, died, or exceeded a limit."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        on_output: OnOutput | None = None,
        reports_kill: bool = False,
        is_trusted: bool = False,
    ) -> ExecResult:
        """Run a command to its end; a string is run by `sh -c`.

        A command that cannot be started (not found, too long, with a zero byte) is a result with exit code 126 or 127.

        At the deadline its process group is killed. Processes that it left in the background continue: see `end_processes`. The
        first `output_bytes` of both streams are kept and the rest is discarded, slowly. A cancelled call kills the command.

        `reports_kill`: raise `SandboxError` if the command itself was ended by a SIGKILL that neither it nor its children sent.
        Only bubblewrap can tell, on Linux 5.5 and newer. Elsewhere, and without it, this is exit code -9. `is_trusted`: the command
        is no code of a policy. Its own SIGKILL then counts as one from outside, unless something that it started has sent one, too:
        some agents repeat the signal that ended a program of theirs.
        """

    async def read(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """The content of a regular file. Raises `FileNotFoundError` and other `OSError`s, as seen inside the sandbox: symbolic
        links never lead out of it. A file longer than `max_bytes` raises `OSError` (EFBIG), a path that no file can have EINVAL."""

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, with its parent directories. Raises `OSError`, such as ENOSPC when the disk limit is reached."""

    async def discard(self, path: str) -> None:
        """Take a file or a directory, whatever is in it, away from its path, without running a program; nothing there is fine."""

    async def inspect(self) -> SandboxState:
        """What is left of the disk, and whether the system is still in its place. No program is run."""

    async def end_processes(self) -> None:
        """Kill every process in the sandbox. Files stay. The count of processor time and of time begins anew: call it before a
        verifier runs, so that the code leaves it enough of both."""

    async def snapshot(self, layer: Path) -> Image:
        """Save the files of the sandbox as a tar file. Sandboxes that start with the returned image have them."""

    def forward(self, port: int, address: tuple[str, int]) -> AbstractAsyncContextManager[None]:
        """Connect `127.0.0.1:port` inside to `address` outside while the context is open: the only way out without a network."""

    async def close(self) -> None:
        """End every process and remove every file. Never raises, and may be called twice."""
