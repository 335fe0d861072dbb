"""One worker process and its handle: readiness, death, stopping, and death of the parent."""

import io
import os
import signal
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.task import TaskId
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.workers.handle import WorkerDiedError, WorkerHandle, open_worker
from rollbook.telemetry.events import EventLog
from tests.parts.concurrency.processes import require_end_of_child
from tests.parts.concurrency.until import until
from tests.parts.rollout.dispatching import config_of, spec_of


@asynccontextmanager
async def worker_of(*, stop_s: float = 0.5, **settings: Any) -> AsyncIterator[WorkerHandle]:
    spec = spec_of(config_of(), **settings)
    log = EventLog("test", echo=io.StringIO())
    async with open_worker(spec, log=log, start_s=60, silence_s=60, stop_s=stop_s) as worker:
        yield worker


def order(number: int, **row: Any) -> GroupOrder:
    return GroupOrder(
        group_id=GroupId(f"t{number}@0"),
        attempt=1,
        task_id=TaskId(f"t{number}"),
        draw=0,
        row={"secret": 3, **row},
        min_publication=0,
        deadline_s=60,
    )


async def results_of(worker: WorkerHandle, count: int) -> dict[str, PlayedPart]:
    found: dict[str, PlayedPart] = {}
    async for played in worker.results():
        found[played.order_id] = played
        if len(found) == count:
            return found
    raise AssertionError("results() ends only by an error")


async def test_a_worker_plays_many_groups_concurrently_and_is_stopped_at_the_end_of_its_block() -> None:
    async with worker_of() as worker:
        assert worker.pid != os.getpid()
        for number in range(20):
            worker.play(order(number))
        results = await results_of(worker, 20)
        assert worker.in_flight == {}
    assert {len(played.group.samples) for played in results.values() if played.group} == {4}
    assert not psutil.pid_exists(worker.pid)


async def test_an_idle_worker_exits_on_a_stop_request() -> None:
    async with worker_of(stop_s=30.0) as worker:
        process = psutil.Process(worker.pid)
    assert not process.is_running()
    assert worker.exit_code == 0, "neither terminated nor killed"


async def test_a_worker_ignores_sigint() -> None:
    async with worker_of() as worker:
        os.kill(worker.pid, signal.SIGINT)
        worker.play(order(1))
        assert await results_of(worker, 1)


async def test_a_cancelled_group_is_not_reported_and_other_groups_continue() -> None:
    async with worker_of() as worker:
        worker.play(order(1, action="hang"))
        worker.play(order(2))
        worker.cancel("t1@0", 1)
        assert list(await results_of(worker, 1)) == ["t2@0"]
        assert worker.in_flight == {}


async def test_a_killed_worker_is_reported_with_its_signal_and_its_lost_groups() -> None:
    async with worker_of() as worker:
        worker.play(order(1, action="hang"))
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="killed by signal 9"):
            await results_of(worker, 1)
        assert list(worker.in_flight) == [("t1@0", 1)]


async def test_a_worker_that_blocks_its_event_loop_is_killed(tmp_path: Path) -> None:
    marker = tmp_path / "blocks"
    async with worker_of() as worker:
        worker.play(order(1, action="block", marker=str(marker)))
        await until(marker.exists)
    assert worker.exit_code == -signal.SIGKILL
    assert not psutil.pid_exists(worker.pid)


async def test_a_builder_that_fails_is_reported_with_its_cause() -> None:
    with pytest.raises(WorkerDiedError, match="RuntimeError: no route to the environments"):
        async with worker_of(fail_setup="no route to the environments"):
            pass


async def test_a_spec_that_cannot_be_pickled_is_rejected_before_a_process_is_started() -> None:
    with pytest.raises(RunError, match=r"settings\['lock'\]"):
        async with worker_of(lock=lambda: 0):
            pass


def test_a_worker_ends_when_its_parent_is_killed() -> None:
    parent = textwrap.dedent(
        """
        import asyncio
        from tests.services.test_rollout_worker import order, worker_of

        async def main():
            async with worker_of() as worker:
                worker.play(order(1, action="hang"))
                print(worker.pid, flush=True)
                await asyncio.sleep(3600)

        asyncio.run(main())
        """
    )
    require_end_of_child(parent)
