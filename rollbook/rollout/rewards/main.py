"""The main function of a reward process: runs the reward functions that it receives calls for.

User code may loop for ever, block the interpreter or exit: the pool then kills this process and starts another. Plain functions run
one at a time on the event loop's thread, so a kill ends them in any state. Async functions run concurrently.
"""

import asyncio
import inspect
import math
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rollbook.concurrency.child_process.child import connect_to_parent, kill_with_parent
from rollbook.concurrency.child_process.frames import Frames
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import extend_search_path
from rollbook.contracts.user_errors import describe_error
from rollbook.rollout.rewards.messages import (
    Call,
    CallResult,
    CancelCall,
    FromChild,
    Load,
    Loaded,
    LoadFailed,
    RewardCase,
    encode,
    to_child,
)
from rollbook.rollout.rewards.trl_functions import load_reward


class RewardLoop:
    def __init__(self, parent: Frames) -> None:
        self._parent = parent
        self._functions: dict[str, Callable[..., Any]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Takes: calls. Gives: results. Ends: when the parent is gone."""
        async with asyncio.TaskGroup() as group:
            while (payload := await self._parent.receive()) is not None:
                match to_child.decode(payload):
                    case Load() as load:
                        await self._send(self._load(load))
                    case Call() as call if is_async(self._functions[call.function]):
                        self._running[call.number] = group.create_task(self._run(call), name=f"reward.{call.number}")
                        self._running[call.number].add_done_callback(partial(self._forget, call.number))
                    case Call() as call:
                        await self._run(call)
                    case CancelCall(number=number):
                        if (task := self._running.get(number)) is not None:
                            task.cancel()
            for task in self._running.values():
                task.cancel()

    def _load(self, load: Load) -> FromChild:
        extend_search_path(load.search_path)
        try:
            for name, path in load.functions.items():
                setting = f"rollout.rewards.functions.{name}.path"
                self._functions[name] = load_reward(path, setting=setting)
        except RunError as error:
            return LoadFailed(cause=str(error))
        return Loaded(is_async={name: is_async(function) for name, function in self._functions.items()})

    async def _run(self, call: Call) -> None:
        started = time.monotonic()
        value, cause, turns, values = None, None, None, None
        try:
            result = self._functions[call.function](list(call.cases) if call.is_group else call.cases[0])
            result = await result if inspect.isawaitable(result) else result
            if call.is_group:
                values, cause = checked_values(result, len(call.cases))
            else:
                value, cause, turns = checked_turns(result, call.cases[0])
        except asyncio.CancelledError:
            cause = "was cancelled"
        except Exception as error:
            cause = f"raised {describe_error(error)}"
        seconds = time.monotonic() - started
        await self._send(
            CallResult(number=call.number, value=value, cause=cause, seconds=seconds, turns=turns, values=values)
        )

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        self._running.pop(number, None)

    async def _send(self, message: FromChild) -> None:
        self._parent.send(encode(message))
        await self._parent.drain()


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def checked(value: object) -> tuple[float | None, str | None]:
    """The reward (None: could not be scored), and what is wrong with the value."""
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
        return None, f"returned {number}; a reward must be finite"
    return number, None


def checked_turns(value: object, case: RewardCase) -> tuple[float | None, str | None, tuple[float, ...] | None]:
    """Like `checked`, and the reward of each turn if the value is a list with one number for each turn."""
    if not isinstance(value, list | tuple):
        return *checked(value), None
    if len(value) != case.num_turns:
        return (
            None,
            f"returned {len(value)} numbers for an episode of {case.num_turns} turns; return one for each",
            None,
        )
    found = [checked(item) for item in value]
    cause = next((cause for _, cause in found if cause is not None), None)
    turns = [number for number, _ in found if number is not None]
    if cause is not None or len(turns) < len(found):
        return None, cause, None
    return math.fsum(turns), None, tuple(turns)


def checked_values(value: object, num_samples: int) -> tuple[tuple[float | None, ...] | None, str | None]:
    """The values of a function of groups, and what is wrong with them."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, list | tuple) or len(items) != num_samples:
        what = f"{len(items)} values" if isinstance(items, list | tuple) else f"a {type(value).__name__}"
        return (
            None,
            f"returned {what} for a group of {num_samples} samples; return a list with one number or None for each",
        )
    found = [checked(item) for item in items]
    cause = next((cause for _, cause in found if cause is not None), None)
    return (None, cause) if cause is not None else (tuple(number for number, _ in found), None)


async def work(sock: socket.socket) -> None:
    parent = await Frames.open(sock)
    try:
        await RewardLoop(parent).run()
    finally:
        parent.close()


def main(channel_fd: int) -> int:
    sock = connect_to_parent(channel_fd)
    kill_with_parent()
    asyncio.run(work(sock))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
