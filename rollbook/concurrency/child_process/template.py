"""`ProcessTemplate`: starts children by forking a process that has imported their modules already.

Importing torch and transformers takes seconds in every process. The template imports them once, and a forked child shares its
memory. A child is the same as after a plain start: its parent is this process, and descriptors, environment, directory, process
group and command line are those of its `ChildSpec`. When the template cannot fork (it still imports, was killed, does not respond,
or this is not Linux), the child is started plainly.

Code of users is not imported in the template, so a restarted child reads a changed file again.
"""

import asyncio
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rollbook.concurrency.child_process.frames import BlockingFrames, Frames
from rollbook.concurrency.child_process.process import (
    ChildEndedError,
    ChildProcess,
    ChildSpec,
    Output,
    child_command,
    child_environment,
    python_environment,
)
from rollbook.concurrency.child_process.template_main import COMMAND_BYTES, TEMPLATE_MODULE, ForkRequest

FORK_S = 10.0
"""Limit for the reply to a request. A fork takes some 50 milliseconds."""
FIRST_WAIT_S = 1.0
MOST_WAIT_S = 60.0
"""Between the death of a template and the start of the next one."""
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
READ_AT_START = ("PYTHON", "LD_")
"""Variables that the interpreter and the loader read when a program starts: a fork cannot change them."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Otherwise numpy starts threads when it is imported. Torch sets the number of threads of a child again."""
IS_SUPPORTED: Final = sys.platform == "linux"


OnEvent = Callable[[str, dict[str, object]], None]
"""Receives events for the log: name and fields."""


class ForkedProcess:
    """A child that was forked by a template. Like `asyncio.subprocess.Process`, for a pid whose parent is this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = None
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


class TemplateConnection:
    """Requests to one template process."""

    def __init__(
        self, requests: socket.socket, environment: Mapping[str, str], on_silent: Callable[[str], None]
    ) -> None:
        """`environment`: that of the template. `on_silent`: called with the cause when the template does not respond."""
        self._requests = requests
        self._requests.settimeout(FORK_S)
        self._environment = environment
        self._on_silent = on_silent
        self._one_at_a_time = asyncio.Lock()
        self._is_usable = True

    async def fork(self, spec: ChildSpec, channel: socket.socket, output: Output) -> ForkedProcess | None:
        """Fork a child, if that is possible now. None: start it plainly."""
        environment = child_environment(spec)
        if _read_at_start(environment) != _read_at_start(self._environment):
            return None
        inherited = [*spec.inherited_fds, *([] if spec.template_fd is None else [spec.template_fd])]
        request = ForkRequest(
            command=child_command(spec, channel),
            environment=environment,
            directory=None if spec.directory is None else str(spec.directory),
            has_own_group=spec.has_own_group,
            numbers=[1, 2, channel.fileno(), *inherited],
            template_fd=spec.template_fd,
        )
        async with self._one_at_a_time:
            if not self._is_usable:
                return None
            with _output_descriptors(output) as (written, read):
                child = await self._forked(request, [*written, *request.numbers[2:]])
                if child is not None and read is not None:
                    child.stdout = await _stream(read)
                return child

    async def close(self) -> None:
        self._is_usable = False
        async with self._one_at_a_time:  # a thread may still use the connection
            self._requests.close()

    async def _forked(self, request: ForkRequest, fds: Sequence[int]) -> ForkedProcess | None:
        permission, given = os.pipe()
        requesting = asyncio.create_task(
            asyncio.to_thread(_request, self._requests, request, [*fds, permission]), name="template.request"
        )
        try:
            try:
                await asyncio.shield(requesting)
            finally:
                # Even after a cancellation: the descriptors must stay open until they are sent.
                await asyncio.wait({requesting})
                pid = None if requesting.exception() else requesting.result()
                # Without permission it exits, and this object collects its exit status.
                child = ForkedProcess(pid) if pid is not None else None
            if child is not None:
                os.write(given, b"1")
            return child
        except OSError as error:
            self._is_usable = False
            # The template ends with its connection.
            self._requests.shutdown(socket.SHUT_RDWR)
            self._on_silent(str(error))
            return None
        finally:
            os.close(permission)
            os.close(given)


class EarlyTemplate:
    """A template process that is started before there is an event loop, and before all its modules are known.

    A `ProcessTemplate` takes it over.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        """Raises `OSError` if it cannot be started."""
        self._is_ours = True
        self._requests, theirs = socket.socketpair()
        self._channel, channel = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        number = self._output.fileno()
        self._spec = template_spec(modules, theirs, output=Path(f"/proc/self/fd/{number}"))
        files: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        files += [(os.POSIX_SPAWN_DUP2, number, 1), (os.POSIX_SPAWN_DUP2, number, 2)]
        with theirs, channel:
            theirs.set_inheritable(True)
            channel.set_inheritable(True)
            command, environment = child_command(self._spec, channel), child_environment(self._spec)
            self._pid = os.posix_spawn(sys.executable, command, environment, file_actions=files)

    async def take(self) -> tuple[socket.socket, ChildProcess]:
        """Its socket for requests, and the child. The caller ends it from now on."""
        # This process may have raised its limit since.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ProcessLookupError):
            resource.prlimit(self._pid, resource.RLIMIT_NOFILE, limit)
        frames = await Frames.open(self._channel)
        self._is_ours = False
        return self._requests, ChildProcess(ForkedProcess(self._pid), frames, self._spec)

    def close(self) -> None:
        """Kill it unless it was taken over. May be called twice."""
        if self._is_ours:
            self._is_ours = False
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._requests.close()
            self._channel.close()
        self._output.close()


@contextmanager
def early_template(modules: Sequence[str]) -> Iterator[EarlyTemplate | None]:
    """A template that has begun to import modules; None without modules, and on systems without templates."""
    early: EarlyTemplate | None = None
    if modules and IS_SUPPORTED:
        with suppress(OSError):  # the start of the run will say what is missing
            early = EarlyTemplate(modules)
    try:
        yield early
    finally:
        if early is not None:
            early.close()


class ProcessTemplate:
    """Keeps a template process alive while `run` runs. Without it, `fork` returns None and children are started plainly."""

    def __init__(
        self, modules: Sequence[str], *, output: Path, on_event: OnEvent, early: EarlyTemplate | None = None
    ) -> None:
        """`early`: the first template process. None: `run` starts it."""
        self._modules = modules
        self._output = output
        self._on_event = on_event
        self._early = early
        self._connection: TemplateConnection | None = None
        """To a template that can fork; None while there is none."""
        self._imported = asyncio.Event()
        """Set while no import is awaited: the template is ready, or there is none."""
        self._imported.set()
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def is_ready(self) -> bool:
        """Whether children are forked."""
        return self._connection is not None

    async def run(self) -> None:
        """Start a template, and a new one when it dies.

        Waits:  for the end of the template, then longer after each death.
        Ends:   on cancellation, and when a template reports that it cannot fork. Its children live on.
        """
        wait_s = FIRST_WAIT_S
        while IS_SUPPORTED:
            began = asyncio.get_running_loop().time()
            if not await self._run_once():
                return
            lived_s = asyncio.get_running_loop().time() - began
            wait_s = FIRST_WAIT_S if lived_s > MOST_WAIT_S else wait_s
            await asyncio.sleep(wait_s)
            wait_s = min(MOST_WAIT_S, 2 * wait_s)

    async def until_ready(self, within_s: float) -> None:
        """Wait while the template imports its modules. Returns even if it fails or takes longer."""
        try:
            async with asyncio.timeout(within_s):
                await self._imported.wait()
        except TimeoutError:
            self._on_event("template.slow", {"after_s": within_s})

    async def fork(self, spec: ChildSpec, channel: socket.socket, output: Output) -> ForkedProcess | None:
        """Fork a child, if that is possible now. None: start it plainly."""
        return None if self._connection is None else await self._connection.fork(spec, channel, output)

    async def _run_once(self) -> bool:
        """Run one template to its end. False: there should be no other."""
        early, self._early = self._early, None
        self._imported.clear()
        child: ChildProcess | None = None
        connection: TemplateConnection | None = None
        try:
            requests, child = await (self._started() if early is None else early.take())
            self._child = child
            child.send(",".join(self._modules).encode())
            connection = TemplateConnection(requests, template_environment(), self._on_silence)
            if reason := (await child.receive()).decode():
                self._on_event("template.unusable", {"reason": reason})
                return False
            self._connection = connection
            self._imported.set()
            self._on_event("template.ready", {"pid": child.pid})
            await child.ended()
            raise ChildEndedError(child.exit_reason)
        except OSError as error:
            self._on_event("template.unusable", {"reason": f"it could not be started: {error}"})
            return False
        except ChildEndedError as error:
            # An import that fails would fail again. The process that needs the module reports it.
            was_killed = child is not None and child.exit_code is not None and child.exit_code <= 0
            last_output = "" if child is None else child.last_output()
            self._on_event("template.died", {"cause": str(error), "last_output": last_output})
            return was_killed
        finally:
            self._child, self._connection = None, None
            self._imported.set()
            if child is not None:
                await child.kill()
            if connection is not None:
                await connection.close()

    def _on_silence(self, cause: str) -> None:
        """Kill a template that does not respond, so that `run` starts a new one. A stopped one would never end by itself."""
        self._on_event("template.silent", {"cause": cause})
        if self._child is not None:
            self._child.send_kill()

    async def _started(self) -> tuple[socket.socket, ChildProcess]:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                return ours, await ChildProcess.start(template_spec(self._modules, theirs, output=self._output))
        except BaseException:
            ours.close()
            raise


def template_environment() -> dict[str, str]:
    return {**python_environment(), **ONE_THREAD}


def template_spec(modules: Sequence[str], requests: socket.socket, *, output: Path) -> ChildSpec:
    return ChildSpec(
        module=TEMPLATE_MODULE,
        # Blanks make room for the command lines of the children.
        arguments=[str(requests.fileno()), ",".join(modules), " " * COMMAND_BYTES],
        environment=template_environment(),
        inherited_fds=[requests.fileno()],
        output=output,
    )


def use_own_template(fd: int) -> None:
    """Fork the children of this process that may be forked. `fd`: the connection to its template (`ChildSpec.template_fd`)."""
    connection = TemplateConnection(socket.socket(fileno=fd), dict(os.environ), lambda cause: None)
    ChildProcess.own_fork = staticmethod(connection.fork)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


@contextmanager
def _output_descriptors(output: Output) -> Iterator[tuple[list[int], int | None]]:
    """Descriptors for stdout and stderr of a child, and the one from which this process reads them, if it does."""
    if not isinstance(output, int):
        yield ([1, 2] if output is None else [output.fileno()] * 2), None
        return
    read, written = os.pipe()
    try:
        yield [written, written], os.dup(read)
    finally:
        os.close(read)
        os.close(written)


async def _stream(fd: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    return reader


def _request(requests: socket.socket, request: ForkRequest, fds: Sequence[int]) -> int | None:
    """The pid of the new child; None if it could not be made. Raises `OSError` if the template is gone or does not respond."""
    frames = BlockingFrames(requests)
    with _adopting_orphans():
        socket.send_fds(requests, [b"1"], fds)
        frames.send(json.dumps(asdict(request)).encode())
        reply = frames.receive()
    if reply is None:
        raise ConnectionError("it ended during a request")
    return int(reply) if reply and _is_our_child(int(reply)) else None


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Meanwhile, processes whose parent exits become children of this process, and not of init: so does the forked child."""
    prctl = ctypes.CDLL(None).prctl
    before = ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _is_our_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
