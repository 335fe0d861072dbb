"""Running a program that nobody changed: an async function, a plain function in a thread, or a command.

It is given the row and a `base_url`; a command finds them in its environment and on its standard input.
"""

import asyncio
import inspect
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from rollbook.contracts.errors import EpisodeError
from rollbook.rollout.contract import ChatSession

STDERR_CHARS = 400
MAX_OUTPUT_BYTES = 16 * 2**20
ASK_S = 2.0
"""From asking a command to end to ending it."""

Program: TypeAlias = Callable[[dict[str, Any], ChatSession], Awaitable[Any]]


class AgentError(EpisodeError):
    """The agent's program failed. Its own doing, or that of what the policy said to it."""


def function_program(function: Callable[..., Any]) -> Program:
    """`function(row, base_url)`. A plain one runs in a thread of its own: it cannot be cancelled, but its session can be closed."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is welcome
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    async def run(row: dict[str, Any], session: ChatSession) -> Any:
        try:
            if is_async:
                return await function(row, session.base_url)
            return await in_a_thread(function, row, session.base_url)
        except Exception as error:
            raise AgentError(f"the agent raised {type(error).__name__}: {error}") from error

    return run


async def in_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call it in a thread of its own: hundreds of episodes wait side by side, and one that hangs keeps no process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
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
            failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=call, name="rollout.agent", daemon=True).start()
    return await done


def command_program(command: Sequence[str], extra: Mapping[str, str]) -> Program:
    """The row as JSON on standard input; what it prints last, read as JSON where it is some, is its result."""

    async def run(row: dict[str, Any], session: ChatSession) -> Any:
        environment = {
            **os.environ,
            **extra,
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.id,
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_OUTPUT_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(f"the agent's command {command[0]!r} cannot be started: {error}") from error
        try:
            out, err = await process.communicate(json.dumps(row).encode())
        finally:
            await _end(process)
        if process.returncode:
            told = err.decode(errors="replace").strip()[-STDERR_CHARS:]
            raise AgentError(f"the agent's command ended with code {process.returncode}: {told}")
        return _result(out.decode(errors="replace"))

    return run


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask, then kill, the whole group that it may have started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        if process.returncode is not None:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), ASK_S)


def _result(printed: str) -> Any:
    last = printed.strip().rsplit("\n", maxsplit=1)[-1]
    try:
        return json.loads(last)
    except ValueError:
        return last
