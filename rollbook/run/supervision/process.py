"""One supervised process: spawn it with its pipes, listen to its notes, and end it by asking, then insisting, then forcing."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from enum import StrEnum

from rollbook.concurrency.process_state import process_state
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision.channel import ChildNote, Note
from rollbook.run.supervision.child_main import STACK_SIGNAL

# How a process is ended: seconds from the polite request to the forced end. A trainer in the middle of a step is given more by
# the supervisor, which waits for its drain.
TERM_GRACE_S = 8.0
# How long a process may take to write its stack down. Done by the signal handler itself, so it is a matter of milliseconds.
STACK_S = 0.5
STACK_BYTES = 16_384


class ProcessState(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    ENDED = "ended"
    STOPPED = "stopped"
    FAILED = "failed"


class ManagedProcess:
    """The supervisor's view of one process, over all its incarnations."""

    def __init__(
        self,
        name: str,
        role: str,
        directory: RunDirectory,
        *,
        addresses: dict[str, str],
        listening: socket.socket | None = None,
        env: dict[str, str] | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.role = role
        self.state = ProcessState.WAITING
        self.doing = ""
        self.ended_with = ""
        self.fault: str | None = None
        self.lives_s: list[float] = []
        self.was_ready = False
        """In any of its lives."""
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()
        """Set while no incarnation is alive."""
        self.gone.set()
        self._directory = directory
        self._addresses = addresses
        self._listening = listening
        self._env = {**os.environ, **(env or {})}
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._since = time.monotonic()
        self._started = 0.0
        self._heard = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def restarts(self) -> int:
        return max(0, len(self.lives_s) - (0 if self.pid is not None else 1))

    @property
    def since_s(self) -> float:
        return time.monotonic() - self._since

    @property
    def silent_s(self) -> float:
        """Seconds since anything was heard from it."""
        return time.monotonic() - self._heard

    def move(self, state: ProcessState, doing: str = "") -> None:
        self.state, self.doing, self._since = state, doing, time.monotonic()
        self._changed()

    async def live(self) -> int:
        """One incarnation, from spawn to exit; the answer is its return code (negative: the signal that ended it)."""
        self.ready.clear()
        self.gone.clear()
        self.move(ProcessState.STARTING)
        parent_read, parent_write = os.pipe()
        channel_read, channel_write = os.pipe()
        fds = [parent_read, channel_write, *([self._listening.fileno()] if self._listening else [])]
        try:
            with self._directory.stderr_file(self.name).open("ab") as stderr:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command(parent_read, channel_write),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    pass_fds=fds,
                    env=self._env,
                    # Its own group: Ctrl-C in the terminal reaches the supervisor alone, which then decides.
                    start_new_session=True,
                )
            os.close(parent_read)
            os.close(channel_write)
            self._started = self._heard = time.monotonic()
            self._changed()
            listener = asyncio.create_task(self._listen(channel_read), name=f"run.listen.{self.name}")
            code = await self._process.wait()
            self.lives_s.append(time.monotonic() - self._started)
            await listener
            return code
        finally:
            os.close(parent_write)
            self.kill()
            self.gone.set()

    def ask_to_stop(self) -> None:
        self._signal(signal.SIGTERM)

    async def stack(self) -> str:
        """What each of its threads is doing, as far as it can still say so."""
        path = self._directory.stderr_file(self.name)
        before = path.stat().st_size if path.exists() else 0
        self._signal(STACK_SIGNAL)
        await asyncio.sleep(STACK_S)
        try:
            with path.open("rb") as file:
                file.seek(before)
                told = file.read(STACK_BYTES).decode(errors="replace").strip()
        except OSError:
            told = ""
        return told or f"it cannot say where it is ({process_state(self.pid)})"

    def kill(self) -> None:
        """The whole process group: workers that a dying parent leaves behind go with it."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_words(self, lines: int = 12) -> str:
        """The end of its stderr: what a person wants to see first."""
        try:
            with self._directory.stderr_file(self.name).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _command(self, parent_fd: int, channel_fd: int) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "rollbook.run.supervision.child_main",
            "--role",
            self.role,
            "--name",
            self.name,
        ]
        command += ["--run-dir", str(self._directory.path), "--addresses", json.dumps(self._addresses)]
        command += ["--parent-fd", str(parent_fd), "--channel-fd", str(channel_fd)]
        if self._listening is not None:
            command += ["--socket-fd", str(self._listening.fileno())]
        return command

    async def _listen(self, channel_fd: int) -> None:
        """Take the child's notes until it closes its end, which it does at the latest by dying."""
        reader = asyncio.StreamReader()
        pipe = os.fdopen(channel_fd, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while line := await reader.readline():
                if (note := ChildNote.parse(line)) is not None:
                    self._take(note)
        finally:
            transport.close()

    def _take(self, note: ChildNote) -> None:
        self._heard = time.monotonic()
        if note.kind is Note.READY:
            self.ready.set()
            self.was_ready = True
            self.move(ProcessState.RUNNING, note.message)
        elif note.kind is Note.DOING:
            self.doing, self._since = note.message, time.monotonic()
        elif note.kind is Note.FAULT:
            self.fault = note.message
        elif note.kind is Note.END:
            self.ended_with = note.message
