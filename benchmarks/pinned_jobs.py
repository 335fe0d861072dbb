"""Runs jobs at the same time, pinned to sets of cores, so that their timings do not disturb each other."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from queue import SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")


def run_pinned(
    jobs: Sequence[Callable[[], Result]], *, cores_each: int = 2, jobs_each: int = 1
) -> Iterator[Future[Result]]:
    """Yields the jobs as they end. Each set of `cores_each` cores runs `jobs_each` of them at once. There is at least one set.

    A job starts subprocesses. They inherit the affinity of the thread that starts them.
    """
    cores = sorted(os.sched_getaffinity(0))
    num_sets = max(1, len(cores) // cores_each)
    free: SimpleQueue[list[int]] = SimpleQueue()
    for number in range(num_sets * jobs_each):
        first = number % num_sets * cores_each
        free.put(cores[first : first + cores_each])
    with ThreadPoolExecutor(num_sets * jobs_each, initializer=lambda: os.sched_setaffinity(0, free.get())) as pool:
        yield from as_completed([pool.submit(job) for job in jobs])
