"""The main function of a worker process: builds its setup, plays the groups it receives, and sends a heartbeat every second.

Started by `handle.py`. It ends on a stop message, on SIGTERM, and when its parent is gone.
"""

import asyncio
import dataclasses
import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

import uvloop

from rollbook.concurrency.child_process.child import connect_to_parent, die_with_parent, exit_quickly, heartbeat
from rollbook.concurrency.child_process.frames import Frames
from rollbook.concurrency.tasks import describe_tasks, first_error
from rollbook.contracts.errors import RollbookError, RunError, TransientError, WorkerError
from rollbook.contracts.plugin import extend_search_path, load_plugin
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.contract import RolloutSetup, build_rollout, load_rollout
from rollbook.rollout.episodes.env_calls import with_timeouts
from rollbook.rollout.groups.filters import load_filters
from rollbook.rollout.groups.player import GroupOrder, GroupPlayer, GroupScorer, Score, episode_task_name
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.rewards.scorer import open_scorer
from rollbook.rollout.rewards.teacher import Teachers, open_teachers
from rollbook.rollout.workers.episode_records import FailedEpisodes, TranscriptLog
from rollbook.rollout.workers.messages import (
    Beat,
    Cancel,
    Failed,
    FromWorker,
    Play,
    Ready,
    Stalled,
    Stop,
    Waiting,
    encode,
    to_worker,
)
from rollbook.rollout.workers.spec import WorkerSpec
from rollbook.telemetry.waits import WAITS

EXIT_FAILED = 3
"""Exit status after a failure that was reported to the parent."""
YOUNG_OBJECTS = 100_000
"""More objects than at the last collection of garbage that start the next one. 10,000 episodes hold 600,000."""
YOUNG_COLLECTIONS = 2
"""Collections of young objects until those that survived are collected too: few, because that pause grows with their number."""

Builder = Callable[[dict[str, Any]], AbstractAsyncContextManager[RolloutSetup]]


class WorkerLoop:
    """Plays groups concurrently until the parent sends a stop or is gone."""

    def __init__(
        self,
        player: GroupPlayer,
        parent: Frames,
        *,
        continued: Callable[[], int],
        on_played: Callable[[PlayedPart], None],
    ) -> None:
        self._on_played = on_played
        self._player = player
        self._parent = parent
        self._continued = continued
        self._playing: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._started: dict[tuple[str, int], float] = {}

    async def run(self) -> None:
        """Takes: orders, from the parent. Gives: results and heartbeats. Ends: on a stop, or when the parent is gone."""
        try:
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(heartbeat(self._beat), name="worker.heartbeat")
                await self._take_orders(group)
                beating.cancel()
                for task in self._playing.values():
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _take_orders(self, group: asyncio.TaskGroup) -> None:
        while (payload := await self._parent.receive()) is not None:
            match to_worker.decode(payload):
                case Play(order):
                    key = (order.group_id, order.attempt)
                    self._started[key] = asyncio.get_running_loop().time()
                    self._playing[key] = group.create_task(self._play(order), name=f"worker.group.{order.group_id}")
                    self._playing[key].add_done_callback(partial(self._forget, key))
                    # Orders that were read together would otherwise all start in the same iteration of the event loop.
                    await asyncio.sleep(0)
                case Cancel(group_id=group_id, attempt=attempt, is_late=is_late):
                    if (task := self._playing.get((group_id, attempt))) is not None:
                        if is_late:
                            await self._send(self._stalled(group_id, attempt))
                        task.cancel()
                case Stop():
                    return

    async def _play(self, order: GroupOrder) -> None:
        async def send(played: PlayedPart) -> None:
            await self._send(played)
            self._on_played(played)

        await send(await self._player.play(order, send))

    def _stalled(self, group_id: str, attempt: int) -> Stalled:
        episodes = [
            task for task in asyncio.all_tasks() if task.get_name().startswith(f"{episode_task_name(group_id)}.")
        ]
        age_s = asyncio.get_running_loop().time() - self._started.get((group_id, attempt), 0.0)
        stack = describe_tasks(sorted(episodes, key=asyncio.Task.get_name))
        return Stalled(group_id=group_id, attempt=attempt, age_s=round(age_s, 2), stack=stack)

    def _forget(self, key: tuple[str, int], _: asyncio.Task[None]) -> None:
        self._playing.pop(key, None)
        self._started.pop(key, None)

    def _beat(self, loop_lag_s: float) -> None:
        beat = Beat(in_flight=len(self._playing), loop_lag_s=loop_lag_s, continued=self._continued())
        self._parent.send(encode(beat))

    async def _send(self, message: FromWorker) -> None:
        self._parent.send(encode(message))
        await self._parent.drain()


async def work(sock: socket.socket) -> int:
    parent = await Frames.open(sock)
    this_task = asyncio.current_task()
    assert this_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)
    WAITS.listen(lambda awaited, cause: parent.send(encode(Waiting(awaited=awaited, cause=cause))))
    try:
        payload = await parent.receive()
        if payload is not None:
            await _serve(_unpickled(payload), parent)
    except Exception as error:
        if not isinstance(error, RunError | TransientError):  # the parent reports their messages
            traceback.print_exc()
        with suppress(OSError):  # the parent may be gone
            parent.send(encode(_failure(error)))
            await parent.drain()
        return EXIT_FAILED
    except asyncio.CancelledError:
        return 0  # SIGTERM
    finally:
        parent.close()
    return 0


async def _serve(spec: WorkerSpec, parent: Frames) -> None:
    config, rewards = spec.config, spec.config.rewards.rules
    extend_search_path(spec.search_path)
    make = load_rollout(config.function)
    filters = load_filters(config)
    builder: Builder = load_plugin(spec.builder, setting="worker builder")
    async with AsyncExitStack() as stack:
        setup = await stack.enter_async_context(builder(dict(spec.settings)))
        setup = dataclasses.replace(
            setup,
            open_environment=with_timeouts(setup.open_environment, step_s=config.step_s, open_s=config.open_s),
        )
        rollout = build_rollout(make, setup, path=config.function)
        score: Score | None = None
        group_scorer: GroupScorer | None = None
        if rewards is not None:
            opened = open_scorer(
                rewards,
                decode=setup.tokenizer.decode,
                search_path=spec.search_path,
                log=setup.log,
                judgements=None if spec.judgements is None else Path(spec.judgements),
            )
            group_scorer = scorer = await stack.enter_async_context(opened)
            score = scorer.score
        if config.teacher:
            opening = open_teachers(
                [teacher.settings for teacher in config.teacher],
                setup.tokenizer,
                store=None if spec.teacher_scores is None else Path(spec.teacher_scores),
                policy_url=setup.policy_url,
                policy_token=setup.policy_token,
            )
            teachers = await stack.enter_async_context(opening)
            if group_scorer is not None and config.rewards.see_groups:
                group_scorer = TaughtGroups(group_scorer, teachers)
            else:
                score = _with_teachers(score, teachers)
        parent.send(encode(Ready(pid=os.getpid())))
        on_failure = None if spec.failures is None else FailedEpisodes(Path(spec.failures)).add
        player = GroupPlayer(
            rollout, config, filters=filters, score=score, group_scorer=group_scorer, on_failure=on_failure
        )
        transcripts = TranscriptLog(setup.log, decode=setup.tokenizer.decode)
        # Objects of waiting episodes live long. By default the collector would search them after every 700 new objects.
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, 10)
        await WorkerLoop(player, parent, continued=lambda: setup.policy.continued, on_played=transcripts.add).run()


def _with_teachers(score: Score | None, teachers: Teachers) -> Score:
    """Score a sample, then ask the teacher of its task about its tokens."""

    async def both(row: Mapping[str, Any], sample: RolloutSample) -> RolloutSample:
        return await teachers.score(row, sample if score is None else await score(row, sample))

    return both


class TaughtGroups:
    """Scores the samples of a group, then asks the teacher of their task about their tokens."""

    def __init__(self, scorer: GroupScorer, teachers: Teachers) -> None:
        self._scorer = scorer
        self._teachers = teachers

    async def score_group(self, row: Mapping[str, Any], samples: Sequence[RolloutSample]) -> list[RolloutSample]:
        scored = await self._scorer.score_group(row, samples)
        return list(await asyncio.gather(*(self._teachers.score(row, sample) for sample in scored)))

    async def score_late(
        self, row: Mapping[str, Any], sample: RolloutSample, quorum: Sequence[RolloutSample]
    ) -> RolloutSample:
        return await self._teachers.score(row, await self._scorer.score_late(row, sample, quorum))


def _unpickled(payload: bytes) -> WorkerSpec:
    try:
        spec = pickle.loads(payload)
    except Exception as error:
        raise RunError(f"the worker spec cannot be unpickled: {type(error).__name__}: {error}") from error
    assert isinstance(spec, WorkerSpec)
    return spec


def _failure(error: Exception) -> Failed:
    if isinstance(error, RollbookError):
        is_explained = isinstance(error, RunError | TransientError)
        stops_run = isinstance(error, RunError) and not isinstance(error, WorkerError)
        return Failed(cause=str(error), stops_run=stops_run, is_explained=is_explained)
    return Failed(cause=f"{type(error).__name__}: {error}", stops_run=False)


def main(channel_fd: int) -> int:
    sock = connect_to_parent(channel_fd)
    die_with_parent(channel_fd)
    # Lines that user code prints appear in the log at once.
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work(sock))


if __name__ == "__main__":
    exit_quickly(main(int(sys.argv[1])))
