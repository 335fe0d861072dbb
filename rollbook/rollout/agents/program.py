"""Runs unmodified agents: an async function, a plain function in a thread, a command, or a coding agent by name.

A function gets the row and a `base_url`; a command gets them by its standard input and environment. A coding agent gets a private
home with its configuration, and a working directory.
"""

import asyncio
import inspect
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rollbook.concurrency.child_process.process import end_process
from rollbook.concurrency.deadline import finish
from rollbook.contracts.decoding import is_too_deep
from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.user_errors import describe_error
from rollbook.rollout.agents.coding_agents import CODING_AGENTS, CodingOptions, find_program, place_of
from rollbook.rollout.contract import ChatSession

STDERR_CHARS = 400
MAX_OUTPUT_BYTES = 4 * 2**20
READ_BYTES = 2**16
WORKSPACE = "workspace"
"""Field of the row with the working directory of a coding agent, for the reward function."""
MAX_SWEEPS = 5
TERMINATE_S = 2.0
"""From SIGTERM to SIGKILL."""
END_S = 30.0

LOG_CHARS = 16_384
"""The end of a program's output that is kept with the sample."""
LOG_BYTES = 4 * LOG_CHARS
"""The most that so many characters take."""
MARK = "ROLLBOOK_EPISODE"
"""Environment variable by which the processes of an episode are found, even those that left their process group."""
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "TERM", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
"""Environment variables of this process that a coding agent gets. It gets no others: they may have secrets."""


class AgentLog:
    """The end of what a program prints, in the order in which it arrives. It outlives the program, however that ends."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def add(self, printed: bytes) -> None:
        self._kept += printed
        if len(self._kept) > 2 * LOG_BYTES:
            del self._kept[:-LOG_BYTES]

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()[-LOG_CHARS:]


Program: TypeAlias = Callable[[dict[str, Any], ChatSession, AgentLog], Coroutine[Any, Any, Any]]
"""Runs an agent and returns its result."""


class AgentError(EpisodeError):
    """The agent failed, by its own fault or because of what the policy wrote."""


class AgentOutcomeError(AgentError):
    """What the policy wrote ended the agent, such as an excess of its sandbox. It is scored."""


def function_program(function: Callable[..., Any]) -> Program:
    """Runs `function(row, base_url)`. A plain function runs in a thread: it cannot be cancelled, but its session can be closed."""
    method = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is accepted
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)

    async def run(row: dict[str, Any], session: ChatSession, _log: AgentLog) -> Any:
        try:
            return await (function if is_async else partial(run_in_thread, function))(row, session.base_url)
        except Exception as error:
            raise AgentError(f"the agent raised {describe_error(error)}") from error

    return run


async def run_in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a new daemon thread: hundreds of episodes run concurrently, and a hanging one does not block exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def resolve(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def call() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except BaseException as error:
            # A future refuses StopIteration (`next` of an empty iterator): the episode would wait until its deadline.
            is_allowed = isinstance(error, Exception) and not isinstance(error, StopIteration)
            failure = error if is_allowed else RuntimeError(f"{type(error).__name__}: {error}")
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(resolve, result, failure)

    threading.Thread(target=call, name="rollout.agent", daemon=True).start()
    return await done


def command_program(command: Sequence[str], extra: Mapping[str, str]) -> Program:
    """Runs a command with the row as JSON on standard input. Its last line of output, parsed as JSON if possible, is the result."""

    async def run(row: dict[str, Any], session: ChatSession, log: AgentLog) -> Any:
        environment = {**os.environ, **extra, **addresses(session.base_url, session.id)}
        out = await _run_to_end(command, environment, json.dumps(row).encode(), session, log)
        return printed_result(out)

    return run


def addresses(base_url: str, key: str) -> dict[str, str]:
    """Where clients of OpenAI and of Anthropic find the policy: environment variables of a command."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
    }


def coding_program(name: str, options: CodingOptions) -> Program:
    """Runs a coding agent in a private home. Its result is the last text of the main conversation."""
    agent = CODING_AGENTS[name]
    path = options.environment.get("PATH")
    program = find_program(name, path=path)

    async def run(row: dict[str, Any], session: ChatSession, log: AgentLog) -> str:
        work = Path(row[WORKSPACE])
        with tempfile.TemporaryDirectory(prefix="rollbook-agent-", ignore_cleanup_errors=True) as home:
            launch = agent.launch(place_of(row, session, options, home=home, work=str(work), base_url=session.base_url))
            for at, text in launch.files.items():
                file = Path(home, at)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            ours = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
            environment = {**ours, "HOME": home, "TMPDIR": home, **launch.env, **options.environment}
            command = [str(program), *launch.arguments(options)]
            await _run_to_end(command, environment, launch.stdin.encode(), session, log, directory=work)
        return session.last_text

    return run


@asynccontextmanager
async def open_workspace(row: Mapping[str, Any], template: Path | None) -> AsyncIterator[dict[str, Any]]:
    """The row with a new working directory (`workspace`), which has the files of `template` and the row's `files`."""
    with tempfile.TemporaryDirectory(prefix="rollbook-work-", ignore_cleanup_errors=True) as directory:
        await asyncio.to_thread(_fill, Path(directory), row.get("files") or {}, template)
        yield {**row, WORKSPACE: directory}


def _fill(directory: Path, files: Mapping[str, Any], template: Path | None) -> None:
    if template is not None:
        shutil.copytree(template, directory, dirs_exist_ok=True, symlinks=True)
    for name, text in files.items():
        file = (directory / name).resolve()
        if not file.is_relative_to(directory.resolve()) or not isinstance(text, str):
            raise RunError(f"files: {name!r} must be a path inside the working directory, with its text")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


async def _run_to_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    sent: bytes,
    session: ChatSession,
    log: AgentLog,
    *,
    directory: Path | None = None,
) -> bytes:
    """The end of the output of a command. Its errors are logged, and its output too if it has a working directory. However this
    ends, no process of the command is left."""
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *command,
            env={**environment, MARK: session.id},
            cwd=directory,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        ),
        name="rollout.agent_start",
    )
    try:
        # A start that is cancelled kills one process and then waits for its output to close, which its children hold open.
        process = await asyncio.shield(starting)
        out, err = await _exchange(process, sent, log, is_output_logged=directory is not None)
    except OSError as error:
        raise AgentError(f"the agent's command {command[0]!r} cannot be started: {error}") from error
    finally:
        await finish(_end(starting), within_s=END_S, name="agent.end")
        _end_marked(session.id)
    if process.returncode:
        output = err.decode(errors="replace").strip()[-STDERR_CHARS:]
        raise AgentError(f"the agent's command ended with code {process.returncode}: {output}")
    return out


async def _end(starting: asyncio.Task[asyncio.subprocess.Process]) -> None:
    await asyncio.wait({starting})
    if starting.exception() is None:
        await end_process(starting.result(), grace_s=TERMINATE_S, has_own_group=True)


def _end_marked(mark: str) -> None:
    """Kill the processes of an episode that left their group: agents start commands in sessions of their own."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(MAX_SWEEPS):
        found = [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _has_variable(entry, wanted)]
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _has_variable(process: Path, wanted: bytes) -> bool:
    try:
        return wanted in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended, or is another user's


async def _exchange(
    process: asyncio.subprocess.Process, sent: bytes, log: AgentLog, *, is_output_logged: bool
) -> tuple[bytes, bytes]:
    """Send the input, and return the ends of the output and of the errors when both are closed."""
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None

    async def send() -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it does not read its input
            # It may have ended already. uvloop then refuses to write.
            if not stdin.is_closing():
                stdin.write(sent)
                await stdin.drain()
        stdin.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(send(), name="rollout.agent_input")
        out = group.create_task(_end_of(stdout, log if is_output_logged else None), name="rollout.agent_output")
        err = group.create_task(_end_of(stderr, log), name="rollout.agent_errors")
    await process.wait()
    return out.result(), err.result()


async def _end_of(stream: asyncio.StreamReader, log: AgentLog | None) -> bytes:
    """The last `MAX_OUTPUT_BYTES` of a stream. The rest is not kept: a program may print without end."""
    kept = bytearray()
    while chunk := await stream.read(READ_BYTES):
        kept += chunk
        if log is not None:
            log.add(chunk)
        if len(kept) > 2 * MAX_OUTPUT_BYTES:
            del kept[:-MAX_OUTPUT_BYTES]
    return bytes(kept[-MAX_OUTPUT_BYTES:])


def printed_result(printed: bytes) -> Any:
    """The last line of a command's output, parsed as JSON if possible."""
    last = printed.decode(errors="replace").strip().rsplit("\n", maxsplit=1)[-1]
    try:
        return last if is_too_deep(last) else json.loads(last)
    except ValueError:
        return last
