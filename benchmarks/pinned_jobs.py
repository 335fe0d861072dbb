"""Runs jobs at the same time, each pinned to separate cores, so that their timings do not disturb each other."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from queue import SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")


def run_pinned(jobs: Sequence[Callable[[], Result]], *, cores_each: int = 2) -> Iterator[Future[Result]]:
    """Yields the jobs as they end. As many run at once as there are sets of `cores_each` cores for this process, at least one.

    A job starts subprocesses. They inherit the affinity of the thread that starts them.
    """
    cores = sorted(os.sched_getaffinity(0))
    num_sets = max(1, len(cores) // cores_each)
    free: SimpleQueue[list[int]] = SimpleQueue()
    for number in range(num_sets):
        free.put(cores[number * cores_each : (number + 1) * cores_each])
    with ThreadPoolExecutor(num_sets, initializer=lambda: os.sched_setaffinity(0, free.get())) as pool:
        yield from as_completed([pool.submit(job) for job in jobs])
