"""Runs unmodified agents: an async function, a plain function in a thread, or a command.

A function gets the row and a `base_url`; a command gets them by its standard input and environment.
"""

import asyncio
import inspect
import json
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from rollbook.concurrency.child_process.process import end_process
from rollbook.contracts.decoding import is_too_deep
from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.user_errors import describe_error
from rollbook.rollout.contract import ChatSession

STDERR_CHARS = 400
MAX_OUTPUT_BYTES = 4 * 2**20
READ_BYTES = 2**16
TERMINATE_S = 2.0
"""From SIGTERM to SIGKILL."""

Program: TypeAlias = Callable[[dict[str, Any], ChatSession], Awaitable[Any]]


class AgentError(EpisodeError):
    """The agent failed, by its own fault or because of what the policy wrote."""


def function_program(function: Callable[..., Any]) -> Program:
    """Runs `function(row, base_url)`. A plain function runs in a thread: it cannot be cancelled, but its session can be closed."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is accepted
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    async def run(row: dict[str, Any], session: ChatSession) -> Any:
        try:
            if is_async:
                return await function(row, session.base_url)
            return await run_in_thread(function, row, session.base_url)
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

    async def run(row: dict[str, Any], session: ChatSession) -> Any:
        environment = {**os.environ, **extra, "OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.id}
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(f"the agent's command {command[0]!r} cannot be started: {error}") from error
        try:
            out, err = await _exchange(process, json.dumps(row).encode())
        finally:
            await end_process(process, grace_s=TERMINATE_S, has_own_group=True)
        if process.returncode:
            output = err.decode(errors="replace").strip()[-STDERR_CHARS:]
            raise AgentError(f"the agent's command ended with code {process.returncode}: {output}")
        return _result(out.decode(errors="replace"))

    return run


async def _exchange(process: asyncio.subprocess.Process, sent: bytes) -> tuple[bytes, bytes]:
    """Send the input, and return the ends of the output and of the errors when both are closed."""
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None

    async def send() -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it does not read its input
            stdin.write(sent)
            await stdin.drain()
        stdin.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(send(), name="rollout.agent_input")
        out = group.create_task(_end_of(stdout), name="rollout.agent_output")
        err = group.create_task(_end_of(stderr), name="rollout.agent_errors")
    await process.wait()
    return out.result(), err.result()


async def _end_of(stream: asyncio.StreamReader) -> bytes:
    """The last `MAX_OUTPUT_BYTES` of a stream. The rest is not kept: a program may print without end."""
    kept = bytearray()
    while chunk := await stream.read(READ_BYTES):
        kept += chunk
        if len(kept) > 2 * MAX_OUTPUT_BYTES:
            del kept[:-MAX_OUTPUT_BYTES]
    return bytes(kept[-MAX_OUTPUT_BYTES:])


def _result(printed: str) -> Any:
    last = printed.strip().rsplit("\n", maxsplit=1)[-1]
    try:
        return last if is_too_deep(last) else json.loads(last)
    except ValueError:
        return last
