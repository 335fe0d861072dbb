"""A process in which reward functions run: `python -m rollbook.rollout.rewards.main SOCKET_FD`.

Foreign code may loop for ever, eat the interpreter or end it: whoever asked kills this process and starts another. Plain functions
run one at a time, on the loop's own thread, so that killing is all it takes; async ones run side by side.
"""

import asyncio
import inspect
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rollbook.concurrency.parent_watch import killed_with_parent
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import extend_search_path, load_plugin
from rollbook.rollout.rewards.messages import Answer, Ask, FromChild, Give, Load, Loaded, LoadFailed, encode, to_child
from rollbook.rollout.workers.messages import frame, read_frame


class RewardLoop:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._functions: dict[str, Callable[..., Any]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Takes: calls. Gives: answers. Ends: when the other side is gone."""
        async with asyncio.TaskGroup() as group:
            while (payload := await read_frame(self._reader)) is not None:
                match to_child.decode(payload):
                    case Load() as load:
                        await self._tell(self._load(load))
                    case Ask() as ask if is_async(self._functions[ask.function]):
                        self._running[ask.call] = group.create_task(self._answer(ask), name=f"reward.{ask.call}")
                        self._running[ask.call].add_done_callback(partial(self._forget, ask.call))
                    case Ask() as ask:
                        await self._answer(ask)
                    case Give(call=call):
                        if (task := self._running.get(call)) is not None:
                            task.cancel()
            for task in self._running.values():
                task.cancel()

    def _load(self, load: Load) -> FromChild:
        extend_search_path(load.search_path)
        try:
            for name, path in load.functions.items():
                self._functions[name] = load_plugin(path, setting=f"rollout.rewards.functions.{name}.path")
        except RunError as error:
            return LoadFailed(cause=str(error))
        return Loaded(is_async={name: is_async(function) for name, function in self._functions.items()})

    async def _answer(self, ask: Ask) -> None:
        began = time.monotonic()
        value, cause = None, None
        try:
            value, cause = checked(await _called(self._functions[ask.function], ask))
        except asyncio.CancelledError:
            cause = "was given up"
        except Exception as error:
            cause = f"raised {type(error).__name__}: {error}"
        await self._tell(Answer(call=ask.call, value=value, cause=cause, seconds=time.monotonic() - began))

    def _forget(self, call: int, _: asyncio.Task[None]) -> None:
        self._running.pop(call, None)

    async def _tell(self, message: FromChild) -> None:
        self._writer.write(frame(encode(message)))
        await self._writer.drain()


async def _called(function: Callable[..., Any], ask: Ask) -> object:
    value = function(ask.case)
    return await value if inspect.isawaitable(value) else value


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def checked(value: object) -> tuple[float | None, str | None]:
    """A number, or None where there is none; and what is wrong with it."""
    if value is None:
        return None, None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None, f"returned a {type(value).__name__}; it must return a number, or None for what it cannot score"
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        return None, f"returned a {type(value).__name__} that is no single number: {error}"
    if math.isnan(number):
        return None, None
    if math.isinf(number):
        return None, f"returned {number}, from which nothing can be learned"
    return number, None


async def work(socket_fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=socket_fd))
    try:
        await RewardLoop(reader, writer).run()
    finally:
        writer.close()


def main(socket_fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    killed_with_parent()
    os.set_inheritable(socket_fd, False)
    asyncio.run(work(socket_fd))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
