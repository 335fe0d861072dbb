"""The parent's side: start a Python module as a child process, exchange messages with it, and end it.

A child is started as `python -m MODULE CHANNEL_FD ARGUMENTS...` and has one connection to its parent. The connection carries the
messages of both sides, and its end shows each side that the other is gone. What differs between the kinds of children
(messages, environment, process group, output) is in `ChildSpec` or in the code that uses this module.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Final, Protocol, Self

from rollbook.concurrency.child_process.bytecode import bytecode_variables
from rollbook.concurrency.child_process.child import STACK_SIGNAL
from rollbook.concurrency.child_process.frames import BlockingFrames, Frames

PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[3])
KEPT_LINES = 40
"""Last lines of a child's output that are kept for the message when it dies."""
MAX_LINE_BYTES = 1 << 16
"""A longer line is cut, so that output without line ends cannot fill the memory."""
TAIL_BYTES = 8192
STACK_BYTES = 16_384
STACK_S = 0.5
"""How long a child may take to write its stacks. The signal handler does that itself, within milliseconds."""
EXIT_S = 1.0
"""From the end of the connection to the exit of the process."""
KILL_S = 5.0
"""How long the kernel may take to end a killed process."""
END_SIGNALS = (signal.SIGTERM, signal.SIGKILL)

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}


class ChildEndedError(Exception):
    """The child is gone. The text says how it ended. Rooms translate it into their own errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to start and how."""

    module: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] | None = None
    """The whole environment of the child. None: ours, with this package on the Python path."""
    directory: Path | None = None
    """Working directory; None: ours."""
    inherited_fds: Sequence[int] = ()
    has_own_group: bool = False
    """Start a process group: Ctrl-C in the terminal does not reach it, and a kill ends everything the child started."""
    may_fork: bool = False
    """Fork it from the template of this process, if there is one: for modules that the template has imported."""
    template_fd: int | None = None
    """If the child is forked, another fork becomes its own template and gets this end of a socket pair. The child gets the other
    end by `inherited_fds`, and passes it to `use_own_template`. After a plain start, nothing reads this end."""
    output: Path | Callable[[int, str], None] | None = None
    """Where stdout and stderr go: appended to a file, or passed to a function with pid and line. None: to ours."""


def python_environment() -> dict[str, str]:
    """Our environment variables, with a `PYTHONPATH` on which a child finds this package, installed or not, and a place for
    compiled sources if there is none."""
    ours = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    # A child of a child finds it there already.
    path = ours if ours[:1] == [PACKAGE_ROOT] else [PACKAGE_ROOT, *ours]
    return {**os.environ, **bytecode_variables(), "PYTHONPATH": os.pathsep.join(path)}


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package in a child. It needs `python_environment`.

    `-P` keeps the working directory off the import path: in the parent directory of a clone, `import rollbook` would find the
    clone's root instead of the package. Directories of user code are added with `extend_search_path`.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def exit_reason(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is None:
        return "closed its connection"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    return f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"


def process_state(pid: int | None) -> str:
    """What the kernel says about a process: `running`, `stopped by a signal`, ... `unknown` on systems without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown"
    # The name in brackets may itself contain brackets and blanks.
    letter = text.rpartition(")")[2].split()[:1]
    return STATES.get(letter[0], letter[0]) if letter else "unknown"


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal. False if that is unknown: on systems without /proc."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


class RunningProcess(Protocol):
    """A process that was started: `asyncio.subprocess.Process`, or one that a process template forked."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdout(self) -> asyncio.StreamReader | None: ...
    def send_signal(self, signal: int) -> None: ...
    async def wait(self) -> int: ...


Output = IO[bytes] | int | None
"""What a child gets as stdout and stderr. None: ours."""
Fork = Callable[[ChildSpec, socket.socket, Output], Awaitable[RunningProcess | None]]
"""Starts a child with its end of the connection and its output in another way; None if it cannot."""


class ChildProcess:
    """One running child, in an event loop. Made by `start`; ends by itself, by `stop` or by `kill`."""

    own_fork: ClassVar[Fork | None] = None
    """Starts the children that may be forked, in a process with its own template."""

    def __init__(self, process: RunningProcess, frames: Frames, spec: ChildSpec) -> None:
        self._process = process
        self._frames = frames
        self._spec = spec
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._num_lines = 0
        self._received_at = time.monotonic()
        self._is_over = False
        """The child and its group have been killed: from now on another process may have its pid."""
        self._has_sent = False
        """Whether it has sent a message, so that `connect_to_parent` has returned in it."""
        self._output_task = (
            asyncio.create_task(self._follow_output(spec.output), name=f"child.output.{process.pid}")
            if callable(spec.output)
            else None
        )

    @classmethod
    async def start(cls, spec: ChildSpec, *, fork: Fork | None = None) -> Self:
        """Raises `OSError` when the process cannot be started. A start that is cancelled leaves no process behind."""
        fork = fork or (cls.own_fork if spec.may_fork else None)
        ours, theirs = socket.socketpair()
        process: RunningProcess | None = None
        try:
            with theirs, _opened(spec.output) as output:
                process = None if fork is None else await fork(spec, theirs, output)
                if process is None:
                    process = await asyncio.create_subprocess_exec(
                        *child_command(spec, theirs), **_options(spec, theirs, output), stdin=subprocess.DEVNULL
                    )
            return cls(process, await Frames.open(ours), spec)
        except BaseException:
            ours.close()
            if process is not None:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                await process.wait()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it is alive; negative: the signal that ended it."""
        return self._process.returncode

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def exit_reason(self) -> str:
        return exit_reason(self._process.returncode)

    @property
    def silent_s(self) -> float:
        """Seconds since its last message, or since its start."""
        return time.monotonic() - self._received_at

    def send(self, payload: bytes) -> None:
        """Buffer a message. Without effect when the child is gone: `receive` reports that."""
        self._frames.send(payload)

    async def receive(self) -> bytes:
        """The next message. Raises `ChildEndedError` when the child is gone."""
        payload = await self._frames.receive()
        if payload is None:
            await self._ends_within(EXIT_S)
            raise ChildEndedError(self.exit_reason)
        self._received_at, self._has_sent = time.monotonic(), True
        return payload

    async def ended(self) -> int:
        """Wait for the exit of the process; its exit code."""
        return await self._process.wait()

    async def stop(self, *, grace_s: float, request: bytes | None = None) -> bool:
        """End the child: send `request`, then SIGTERM, then SIGKILL, `grace_s` apart. False when it had to be killed."""
        if request is not None and self.is_alive:
            self.send(request)
            await self._ends_within(grace_s)
        if self.is_alive:
            self.send_signal(signal.SIGTERM)
            await self._ends_within(grace_s)
        is_graceful = not self.is_alive
        await self.kill()
        return is_graceful

    async def kill(self) -> None:
        """SIGKILL, wait for the end, and close the connection. May be called twice."""
        self.send_kill()
        await self._ends_within(KILL_S)
        self._is_over = not self.is_alive
        self._frames.close()
        if self._output_task is not None:
            # The pipe ends with the process, unless a program that the child started still holds it.
            await asyncio.wait({self._output_task}, timeout=EXIT_S)
            self._output_task.cancel()

    def send_signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def send_kill(self) -> None:
        """SIGKILL, to the whole group if the child has one. Even when the child has ended: its group may live on until `kill`."""
        if self._is_over:
            return
        if self._spec.has_own_group:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        else:
            self.send_signal(signal.SIGKILL)

    async def stack(self) -> str:
        """The stacks of its threads, written by the child itself; what the kernel says about it if it cannot write them."""
        if not (self._has_sent or catches(self.pid, STACK_SIGNAL)):
            # The signal would kill it.
            return f"it has no stacks yet: it is still importing its modules ({process_state(self.pid)})"
        path = self._spec.output
        before = path.stat().st_size if isinstance(path, Path) else self._num_lines
        self.send_signal(STACK_SIGNAL)
        await asyncio.sleep(STACK_S)
        if isinstance(path, Path):
            text = _read(path, before, STACK_BYTES).strip()
        else:
            new = min(self._num_lines - before, len(self._lines))
            text = "\n".join(list(self._lines)[len(self._lines) - new :])
        return text or f"it does not respond ({process_state(self.pid)})"

    def last_output(self, max_lines: int = KEPT_LINES) -> str:
        """The last lines that it wrote, for the message when it dies."""
        path = self._spec.output
        if not isinstance(path, Path):
            return "\n".join(list(self._lines)[-max_lines:])
        return "\n".join(_read(path, -TAIL_BYTES, TAIL_BYTES).splitlines()[-max_lines:])

    def memory_bytes(self) -> int:
        """Its resident memory; 0 on systems without /proc."""
        try:
            fields = Path(f"/proc/{self.pid}/statm").read_text(encoding="utf-8").split()
        except OSError:
            return 0
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    async def _ends_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()

    async def _follow_output(self, on_line: Callable[[int, str], None]) -> None:
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(MAX_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                self._num_lines += 1
                on_line(self.pid, text)


class BlockingChild:
    """One running child, for code without an event loop. Its output goes to ours or to a file."""

    def __init__(self, spec: ChildSpec) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs, _opened(spec.output) as output:
                self._process = subprocess.Popen(
                    child_command(spec, theirs), **_options(spec, theirs, output), stdin=subprocess.DEVNULL
                )
        except BaseException:
            ours.close()
            raise
        self._frames = BlockingFrames(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, payload: bytes) -> None:
        """Raises `ChildEndedError` when the child is gone."""
        try:
            self._frames.send(payload)
        except OSError as error:
            self._ends_within(EXIT_S)
            raise ChildEndedError(exit_reason(self._process.returncode)) from error

    def require_alive(self) -> None:
        """Raises `ChildEndedError` if the child has ended."""
        if self._process.poll() is not None:
            raise ChildEndedError(exit_reason(self._process.returncode))

    def join(self, grace_s: float) -> None:
        """Wait `grace_s` for the child to end by itself, then kill it."""
        self._ends_within(grace_s)
        self._process.kill()
        self._process.wait()
        self._frames.close()

    def _ends_within(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


@contextmanager
def _opened(output: Path | Callable[[int, str], None] | None) -> Iterator[Output]:
    """What a child gets as stdout and stderr."""
    if isinstance(output, Path):
        with output.open("ab") as file:
            yield file
    else:
        yield None if output is None else subprocess.PIPE


def child_command(spec: ChildSpec, channel: socket.socket) -> list[str]:
    return python_command(spec.module, str(channel.fileno()), *spec.arguments)


def child_environment(spec: ChildSpec) -> dict[str, str]:
    return python_environment() if spec.environment is None else dict(spec.environment)


def _options(spec: ChildSpec, channel: socket.socket, output: Output) -> dict[str, Any]:
    return {
        "stdout": output,
        "stderr": None if output is None else subprocess.STDOUT,
        "pass_fds": (channel.fileno(), *spec.inherited_fds),
        "env": child_environment(spec),
        "cwd": spec.directory,
        "start_new_session": spec.has_own_group,
    }


EVENT_LOOP = f"asyncio{os.sep}runners.py"
"""The event loop in a stack. uvloop has no Python frames."""


def innermost_frame(stack: str) -> str:
    """The innermost frame of the main thread, in stacks that `faulthandler` wrote; it writes the innermost first."""
    frames = [line.strip() for line in stack.partition("Current thread")[2].splitlines() if line.startswith("  File")]
    own = [frame for frame in frames if "importlib" not in frame]
    if own and EVENT_LOOP in own[0]:
        return "its event loop: it waits for a reply or for another process"
    return (own or frames or [stack.strip().splitlines()[0] if stack.strip() else "an unknown place"])[0]


def _read(path: Path, start: int, size: int) -> str:
    """Part of a file; a negative `start` counts from its end. Empty when it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(start if start >= 0 else max(0, os.fstat(file.fileno()).st_size + start))
        return file.read(size).decode(errors="replace")
    return ""


async def end_process(process: asyncio.subprocess.Process, *, grace_s: float, has_own_group: bool = False) -> None:
    """End a program that is not a `ChildProcess`, such as an agent's command or a vLLM server: SIGTERM, then SIGKILL.

    Returns when it has ended, at the latest `grace_s` after each signal.

    `has_own_group`: it was started with `start_new_session`. Then the programs that it started are signalled too, even if it has
    ended itself.
    """
    for number in END_SIGNALS:
        if process.returncode is not None and not has_own_group:
            return
        with suppress(ProcessLookupError, PermissionError):
            if has_own_group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        if process.returncode is not None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()


def end_process_blocking(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """The same for code without an event loop."""
    for number in END_SIGNALS:
        if process.poll() is None:
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
