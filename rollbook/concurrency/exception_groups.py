"""Where something hangs: stacks of tasks that wait, told in a few lines."""

import asyncio
import signal
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

STACK_SIGNAL = signal.SIGUSR1
"""On this a worker writes the stack of every thread to its output."""
SHOWN_FRAMES = 4
"""Innermost frames in a cause: it is counted by its text, so it stays short."""
MOST_TASKS = 64
"""Tasks in one report; a person has seen enough by then."""


def where_cancelled(error: TimeoutError) -> str:
    """` in play (game.py:12) > sleep (tasks.py:665)`: where the block was when its time was over. Empty when nobody knows."""
    cancelled = error.__cause__ or error.__context__
    if cancelled is None or cancelled.__traceback__ is None:
        return ""
    frames = traceback.extract_tb(cancelled.__traceback__)
    # Our own frame is the first: everybody's is the same, so it says nothing.
    told = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in frames[1:][-SHOWN_FRAMES:]]
    return f" in {' > '.join(told)}" if told else ""


def task_stack(task: asyncio.Task[Any]) -> list[str]:
    """The chain of awaits of a waiting task, outermost first: `file:line function`. The standard library shows only its first."""
    frames: list[str] = []
    waiting: object = task.get_coro()
    while waiting is not None:
        frame = (
            getattr(waiting, "cr_frame", None)
            or getattr(waiting, "gi_frame", None)
            or getattr(waiting, "ag_frame", None)
        )
        if isinstance(frame, FrameType):
            frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}")
        elif not isinstance(waiting, CoroutineType):
            frames.append(f"waits for {type(waiting).__name__}")
        waiting = (
            getattr(waiting, "cr_await", None)
            or getattr(waiting, "gi_yieldfrom", None)
            or getattr(waiting, "ag_await", None)
        )
    return frames


def tell_tasks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Every task with the chain it waits in."""
    lines: list[str] = []
    for number, task in enumerate(tasks):
        if number == MOST_TASKS:
            lines.append("and further tasks")
            break
        lines.append(task.get_name())
        lines += [f"    {frame}" for frame in task_stack(task)]
    return "\n".join(lines)
