"""Errors of tasks, and stacks of waiting ones: where something hangs."""

import asyncio
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def first_error(error: BaseException, *, prefer: type[BaseException] | None = None) -> BaseException:
    """The first error inside the nested groups of a task group; the first one of class `prefer`, if there is one."""
    leaves = _leaves(error)
    preferred = [] if prefer is None else [leaf for leaf in leaves if isinstance(leaf, prefer)]
    return (preferred or leaves)[0]


def results_of(outcomes: Iterable[T | BaseException]) -> list[T]:
    """The results of `asyncio.gather` with `return_exceptions`; raises the first exception, if any."""
    results: list[T] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]


SHOWN_FRAMES = 4
"""Innermost frames in a cause. Causes are counted by their text, so they stay short."""
MAX_TASKS = 64
"""Tasks in one description."""


def where_cancelled(error: TimeoutError) -> str:
    """` in play (game.py:12) > sleep (tasks.py:665)`: where a block was when it was cancelled. Empty when that is unknown."""
    cancelled = error.__cause__ or error.__context__
    if cancelled is None or cancelled.__traceback__ is None:
        return ""
    # The first frame is that of the code with the timeout, the same in every cause.
    frames = traceback.extract_tb(cancelled.__traceback__)[1:][-SHOWN_FRAMES:]
    shown = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in frames]
    return f" in {' > '.join(shown)}" if shown else ""


def task_stack(task: asyncio.Task[Any]) -> list[str]:
    """The chain of awaits of a waiting task, outermost first: `file:line function`. The standard library shows only the first."""
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


def describe_tasks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Every task with the chain of awaits it waits in."""
    lines: list[str] = []
    for number, task in enumerate(tasks):
        if number == MAX_TASKS:
            lines.append("and more tasks")
            break
        lines.append(task.get_name())
        lines += [f"    {frame}" for frame in task_stack(task)]
    return "\n".join(lines)
