"""Runs that share a PostgreSQL database: commits per second with a lock for each run, and with one lock for the whole ledger.

`python -m benchmarks.ledger.shared_store postgresql://USER@HOST/DATABASE --runs 4` starts a process for each run. Each submits
small groups one after the other, so every group is one commit.
"""

import argparse
import asyncio
import multiprocessing
import time
import uuid
from multiprocessing.synchronize import Barrier

import numpy as np

from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.admission import RunId, RunSettings
from rollbook.contracts.freshness import FreshnessRule
from rollbook.contracts.group import PromptGroup, group_id
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.ledger.rules import groups, runs
from rollbook.ledger.rules.groups import Submission
from rollbook.ledger.rules.run_transaction import run_transaction
from rollbook.ledger.store import Transaction
from rollbook.ledger.stores.registry import open_store

TOKENS = 64
MAX_QUEUED = 10**9
CHILD_S = 120.0
"""How long the processes may take to start and to connect."""


def submission_of(number: int) -> Submission:
    row = TokenRow(
        token_ids=np.arange(TOKENS, dtype=np.int32),
        logprobs=np.full(TOKENS, -1.0, dtype=np.float32),
        loss_mask=np.arange(TOKENS) > 0,
        versions=np.full(TOKENS, -1, dtype=np.int32),
    )
    task = TaskId(f"task-{number}")
    sample = RolloutSample(sequences=(row,), sampling=SamplingParams(), reward=1.0)
    group = PromptGroup(id=group_id(task, 0), task_id=task, draw=0, samples=(sample, sample))
    return Submission.of(encode_group(group))


async def submit(url: str, run_id: RunId, *, seconds: float, has_own_lock: bool, start: Barrier) -> int:
    settings = RunSettings(rule=FreshnessRule(groups_per_step=8, max_in_flight=8, max_head_offpolicy_versions=1))
    async with open_store(url) as store:
        await store.write(lambda tx: runs.create_run(tx, run_id, settings, now=time.time()), run_id=run_id)
        await asyncio.to_thread(start.wait)
        until, number = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            number += 1
            submission = submission_of(number)

            def work(tx: Transaction, submission: Submission = submission) -> None:
                with run_transaction(tx, run_id, time.time()) as run_tx:
                    groups.submit(run_tx, submission, max_queued=MAX_QUEUED)

            await store.write(work, run_id=run_id if has_own_lock else None)
        return number


def measure(url: str, num_runs: int, *, seconds: float, has_own_lock: bool) -> float:
    """Commits per second of all runs together."""
    context = multiprocessing.get_context("spawn")
    start, counts = context.Barrier(num_runs), context.Queue()
    processes = [
        context.Process(
            target=_child, args=(url, f"bench-{uuid.uuid4().hex}", seconds, has_own_lock, start, counts), daemon=True
        )
        for _ in range(num_runs)
    ]
    for process in processes:
        process.start()
    total = sum(int(counts.get(timeout=seconds + CHILD_S)) for _ in processes)
    for process in processes:
        process.join()
    return total / seconds


def _child(  # noqa: PLR0917 - the arguments of a process
    url: str, run: str, seconds: float, has_own_lock: bool, start: Barrier, counts: "multiprocessing.Queue[int]"
) -> None:
    counts.put(asyncio.run(submit(url, RunId(run), seconds=seconds, has_own_lock=has_own_lock, start=start)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="postgresql://USER@HOST/DATABASE")
    parser.add_argument("--runs", type=int, default=4, help="processes, each with a run of its own")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(args.repetitions):
        for has_own_lock in (True, False):
            rate = measure(args.url, args.runs, seconds=args.seconds, has_own_lock=has_own_lock)
            rates[has_own_lock].append(rate)
            print_status(f"{'a lock for each run' if has_own_lock else 'one lock for all'}: {rate:.0f} commits/s")
    own, one = (float(np.median(rates[has_own_lock])) for has_own_lock in (True, False))
    figure = Figure(
        name=f"commits of {args.runs} runs in one database",
        ours=own,
        peer=one,
        unit="commits/s",
        ratio=own / one,
        more={"spread": rates[True], "peer_spread": rates[False]},
    )
    return print_figures([figure], seconds=args.seconds)


if __name__ == "__main__":
    raise SystemExit(main())
