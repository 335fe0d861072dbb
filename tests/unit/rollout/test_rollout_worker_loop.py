"""The loop of a worker process, over a real connection to its parent."""

import asyncio
import socket
from collections import Counter
from typing import Any

from rollbook.concurrency.child_process.frames import Frames
from rollbook.contracts.group import GroupId
from rollbook.contracts.task import TaskId
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.groups.player import GroupOrder, GroupPlayer
from rollbook.rollout.workers.main import WorkerLoop
from rollbook.rollout.workers.messages import Play, Stop, encode

GROUPS, SAMPLES = 50, 4


def order(number: int) -> GroupOrder:
    return GroupOrder(
        group_id=GroupId(f"task-{number}@0"),
        attempt=1,
        task_id=TaskId(f"task-{number}"),
        draw=0,
        row={"id": f"task-{number}"},
        min_publication=0,
        deadline_s=60,
    )


async def test_orders_that_arrive_together_start_in_different_turns_of_the_event_loop() -> None:
    turns_of_loop, started_in, all_started = 0, Counter[int](), asyncio.Event()

    async def rollout(_: dict[str, Any]) -> None:
        started_in[turns_of_loop] += 1
        if started_in.total() == GROUPS * SAMPLES:
            all_started.set()
        await asyncio.Event().wait()

    async def count_turns() -> None:
        nonlocal turns_of_loop
        while True:
            turns_of_loop += 1
            await asyncio.sleep(0)

    ours, theirs = socket.socketpair()
    parent, child = await Frames.open(ours), await Frames.open(theirs)
    for number in range(GROUPS):
        parent.send(encode(Play(order(number))))
    await parent.drain()
    assembler = GroupPlayer(rollout, RolloutConfig(completions_per_prompt=SAMPLES))
    loop = WorkerLoop(assembler, child, continued=lambda: 0, on_played=lambda *_: None)
    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count_turns())
        group.create_task(loop.run())
        async with asyncio.timeout(30):
            await all_started.wait()
        parent.send(encode(Stop()))
        counting.cancel()
    parent.close()
    child.close()
    assert max(started_in.values()) <= 2 * SAMPLES
