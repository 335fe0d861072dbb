"""Where the processes of a run are started: the port `ProcessHost`, and `LocalHost`, which starts them on this machine.

A host starts a process and relays what it reports. Whether a dead process is started again is decided by the supervisor.
"""

import json
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from rollbook.concurrency.child_process.process import ChildProcess, ChildSpec, python_environment
from rollbook.concurrency.child_process.template import ProcessTemplate
from rollbook.run.directory import RunDirectory

IMPORT_TORCH = frozenset({"prepare", "base", "policy", "trainer", "evaluation"})
"""Roles whose modules take seconds to import: their start waits for a template that still imports the same modules."""
IMPORTING = "importing torch and transformers"
HAVE_CHILDREN = frozenset({"rollout", "evaluation"})
"""Roles that start workers or policy servers."""
TEMPLATE_WAIT_S = 100.0
"""Less than the default of `run.ready_s`. Without the template, the process would import the modules itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStart:
    """One process of a run to start."""

    name: str
    role: str
    directory: RunDirectory
    addresses: Mapping[str, str] = field(default_factory=dict)
    """URLs of the run's servers by role."""
    listening: socket.socket | None = None
    """The listening socket of a server on this machine. It stays open over restarts."""
    bind: str | None = None
    """Set for a process that joins a run: it is a member, and a server opens its own socket on this address."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are added to those of the host."""
    shared_base: Path | None = None
    """Set for a process that maps weights of the process `base`: the file that describes them."""
    needs: tuple[str, ...] = ()
    """Names of processes without which it cannot work. It is started when they are ready, and ended when one of them dies."""
    module: str = "rollbook.run.supervision.child_main"

    def on_another_machine(self) -> "ProcessStart":
        """Called on the machine where the process will run: it writes its telemetry there and sends it to the ledger."""
        return replace(self, directory=self.directory.on_this_machine(self.name))

    def arguments(self) -> list[str]:
        found = ["--role", self.role, "--name", self.name, "--run-dir", str(self.directory.path)]
        found += ["--addresses", json.dumps(dict(self.addresses))]
        if self.directory.local is not None:
            found += ["--local-dir", str(self.directory.local)]
        if self.shared_base is not None:
            found += ["--shared-base", str(self.shared_base)]
        if self.listening is not None:
            found += ["--socket-fd", str(self.listening.fileno())]
        if self.bind is not None:
            found += ["--bind", self.bind]
        return found


class HostedProcess(Protocol):
    """One incarnation of a process, from its start to its exit. `ChildProcess` satisfies it."""

    @property
    def pid(self) -> int: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def silent_s(self) -> float:
        """Seconds since its last message, or since its start."""

    async def receive(self) -> bytes:
        """The next message. Raises `ChildEndedError` when the process is gone."""

    async def ended(self) -> int:
        """Wait for the exit; the exit code, or the negative number of the signal that ended it."""

    def send_signal(self, number: signal.Signals) -> None: ...
    def send_kill(self) -> None:
        """SIGKILL to the process and everything it started, without waiting."""

    async def stop(self, *, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL. False when it had to be killed."""

    async def kill(self) -> None:
        """SIGKILL, and wait for the end. May be called twice."""

    async def stack(self) -> str:
        """The stacks of its threads."""

    def last_output(self, max_lines: int = ...) -> str: ...


class ProcessHost(Protocol):
    async def start(self, process: ProcessStart) -> HostedProcess:
        """Raises `OSError` when the process cannot be started."""

    def awaits(self, process: ProcessStart) -> str:
        """What a start of this process would wait for now, for people; empty: nothing."""


class LocalHost:
    """Starts child processes of this one. They end when this process ends. Satisfies `ProcessHost`."""

    def __init__(self, template: ProcessTemplate | None = None) -> None:
        self._template = template

    def awaits(self, process: ProcessStart) -> str:
        if self._template is None or process.role not in IMPORT_TORCH or self._template.is_ready:
            return ""
        return IMPORTING

    async def start(self, process: ProcessStart) -> HostedProcess:
        if self._template is not None and process.role in IMPORT_TORCH:
            await self._template.until_ready(TEMPLATE_WAIT_S)
        listening = process.listening
        # A process that starts others gets a separate template.
        ours, theirs = socket.socketpair() if process.role in HAVE_CHILDREN else (None, None)
        inherited = [sock.fileno() for sock in (listening, ours) if sock is not None]
        spec = ChildSpec(
            module=process.module,
            arguments=[*process.arguments(), *([] if ours is None else ["--template-fd", str(ours.fileno())])],
            environment={**python_environment(), **process.environment},
            inherited_fds=inherited,
            template_fd=None if theirs is None else theirs.fileno(),
            may_fork=True,
            # Ctrl-C in the terminal reaches only the supervisor, which decides what it means.
            has_own_group=True,
            output=process.directory.stderr_file(process.name),
        )
        try:
            return await ChildProcess.start(spec, fork=None if self._template is None else self._template.fork)
        finally:
            for sock in (ours, theirs):
                if sock is not None:
                    sock.close()
