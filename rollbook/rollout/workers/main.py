"""The loop inside a worker process: builds its setup, plays the groups it is told to, and gives a sign of life every second.

Started as `python -m rollbook.rollout.workers.main SOCKET_FD WATCH_FD`. It ends when it is told to stop, on SIGTERM, and when its
parent is gone. SIGINT is the parent's business.
"""

import asyncio
import dataclasses
import faulthandler
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from typing import Any

import uvloop

from rollbook.concurrency.exception_groups import STACK_SIGNAL, tell_tasks
from rollbook.concurrency.parent_watch import die_with_parent
from rollbook.contracts.errors import RollbookError, RunError, WorkerError
from rollbook.contracts.plugin import extend_search_path, load_plugin
from rollbook.rollout.contract import RolloutSetup, build_rollout, load_rollout
from rollbook.rollout.episodes.env_calls import watched
from rollbook.rollout.groups.filters import load_filters
from rollbook.rollout.groups.player import GroupAssembler, GroupOrder, sample_name
from rollbook.rollout.rewards.scorer import open_scorer
from rollbook.rollout.workers.messages import (
    Beat,
    Cancel,
    Failed,
    Finished,
    FromWorker,
    Play,
    Ready,
    Stalled,
    Stop,
    frame,
    read_frame,
    to_worker,
)
from rollbook.rollout.workers.spec import WorkerRecipe

BEAT_S = 1.0
EXIT_FAILED = 3
"""Exit status after a failure that was told to the parent."""

Builder = Callable[[dict[str, Any]], AbstractAsyncContextManager[RolloutSetup]]


class WorkerLoop:
    """Plays groups in one process until it is told to stop."""

    def __init__(
        self,
        assembler: GroupAssembler,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        continued: Callable[[], int],
    ) -> None:
        self._continued = continued
        self._assembler = assembler
        self._reader = reader
        self._writer = writer
        self._playing: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._began: dict[tuple[str, int], float] = {}

    async def run(self) -> None:
        """Takes: orders, from the parent. Gives: results and beats. Ends: at a stop, or when the parent is gone."""
        try:
            async with asyncio.TaskGroup() as group:
                beats = group.create_task(self._beat(), name="worker.beat")
                await self._take_orders(group)
                beats.cancel()
                for task in self._playing.values():
                    task.cancel()
        except BaseExceptionGroup as escaped:
            raise escaped.exceptions[0] from escaped

    async def _take_orders(self, group: asyncio.TaskGroup) -> None:
        while (payload := await read_frame(self._reader)) is not None:
            match to_worker.decode(payload):
                case Play() as play:
                    key = (play.group_id, play.attempt)
                    self._began[key] = asyncio.get_running_loop().time()
                    self._playing[key] = group.create_task(
                        self._play(play.to_contract()), name=f"worker.group.{play.group_id}"
                    )
                    self._playing[key].add_done_callback(partial(self._forget, key))
                case Cancel(group_id=group_id, attempt=attempt, is_late=is_late):
                    if (task := self._playing.get((group_id, attempt))) is not None:
                        if is_late:
                            await self._tell(self._stalled(group_id, attempt))
                        task.cancel()
                case Stop():
                    return

    async def _play(self, order: GroupOrder) -> None:
        result = await self._assembler.play(order)
        await self._tell(Finished.of(order, result))

    def _stalled(self, group_id: str, attempt: int) -> Stalled:
        episodes = [task for task in asyncio.all_tasks() if task.get_name().startswith(f"{sample_name(group_id)}.")]
        age_s = asyncio.get_running_loop().time() - self._began.get((group_id, attempt), 0.0)
        stack = tell_tasks(sorted(episodes, key=asyncio.Task.get_name))
        return Stalled(group_id=group_id, attempt=attempt, age_s=round(age_s, 2), stack=stack)

    def _forget(self, key: tuple[str, int], _: asyncio.Task[None]) -> None:
        self._playing.pop(key, None)
        self._began.pop(key, None)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + BEAT_S
            await asyncio.sleep(BEAT_S)
            lag_s = max(0.0, loop.time() - due)
            await self._tell(Beat(in_flight=len(self._playing), loop_lag_s=lag_s, continued=self._continued()))

    async def _tell(self, message: FromWorker) -> None:
        self._writer.write(frame(message))
        await self._writer.drain()


async def work(socket_fd: int) -> int:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=socket_fd))
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    try:
        payload = await read_frame(reader)
        if payload is None:
            return 0
        await _serve(_unpickled(payload), reader, writer)
    except Exception as error:
        traceback.print_exc()
        with suppress(OSError):  # nobody may be left to hear it
            writer.write(frame(_told(error)))
            await writer.drain()
        return EXIT_FAILED
    except asyncio.CancelledError:
        # SIGTERM: everything was closed on the way out.
        return 0
    finally:
        writer.close()
    return 0


async def _serve(recipe: WorkerRecipe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    extend_search_path(recipe.search_path)
    make = load_rollout(recipe.rollout)
    filters = load_filters(recipe.rules.filter, drop_constant_reward=recipe.rules.drop_constant_reward)
    builder: Builder = load_plugin(recipe.builder, setting="worker builder")
    async with AsyncExitStack() as stack:
        setup = await stack.enter_async_context(builder(dict(recipe.settings)))
        setup = dataclasses.replace(
            setup,
            open_environment=watched(setup.open_environment, step_s=recipe.rules.step_s, open_s=recipe.rules.open_s),
        )
        rollout = build_rollout(make, setup, path=recipe.rollout)
        score = None
        if recipe.rewards is not None:
            scorer = open_scorer(
                recipe.rewards, decode=setup.tokenizer.decode, search_path=recipe.search_path, log=setup.log
            )
            score = (await stack.enter_async_context(scorer)).score
        writer.write(frame(Ready(pid=os.getpid())))
        assembler = GroupAssembler(rollout, recipe.rules, filters=filters, score=score)
        await WorkerLoop(assembler, reader, writer, continued=lambda: setup.policy.continued).run()


def _unpickled(payload: bytes) -> WorkerRecipe:
    try:
        recipe = pickle.loads(payload)
    except Exception as error:
        raise RunError(f"the worker's recipe cannot be read in its process: {type(error).__name__}: {error}") from error
    assert isinstance(recipe, WorkerRecipe)
    return recipe


def _told(error: Exception) -> Failed:
    if isinstance(error, RollbookError):
        return Failed(cause=str(error), stops_run=isinstance(error, RunError) and not isinstance(error, WorkerError))
    return Failed(cause=f"{type(error).__name__}: {error}", stops_run=False)


def main(socket_fd: int, watch_fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Written by the handler itself, also while a regular expression or a parser holds the interpreter.
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    for fd in (socket_fd, watch_fd):
        # What user code spawns must not keep our connection open when we are gone.
        os.set_inheritable(fd, False)
    die_with_parent(watch_fd)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work(socket_fd))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
