"""Does the cost of a ledger verb grow with the length of the run? CPU time of each verb at several numbers of past groups.

`python -m benchmarks.ledger.history --sizes 1000 200000` builds a run of each size with the ledger's rules and the default settings
(8 groups a step, one in 16 filtered, a publication a step, a checkpoint every 10 steps, payloads kept), then calls each verb as the
service does. `audit` is complete; `audit_after_a_step` continues from it one step later. The ratio of a figure is the cost at the
smallest size over the cost at the largest: 1 if the cost does not grow.

`--store postgresql` starts a server and measures seconds by the wall instead, because its work is done by other processes.
"""

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.report import Figure, print_figures, print_status
from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.admission import OwnerId, RunId, RunSettings
from rollbook.contracts.freshness import FreshnessRule
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupState, PromptGroup, group_id
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import Draw, TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.ledger.config import LedgerConfig
from rollbook.ledger.rules import batches, gate, groups, publications, trainer
from rollbook.ledger.rules.groups import Submission
from rollbook.ledger.rules.run_transaction import RunTransaction, run_transaction
from rollbook.ledger.service import Ledger, open_ledger
from rollbook.ledger.store import Store, Transaction
from rollbook.ledger.stores.registry import open_store, sqlite_url
from rollbook.ledger.tools.audit import audit_since
from rollbook.ledger.tools.audit_findings import AuditMark
from rollbook.ledger.tools.compaction import compact
from rollbook.ledger.tools.explain import explain_group
from rollbook.telemetry.events import EventLog

T = TypeVar("T")

RUN = RunId("history")
SETTINGS = RunSettings(rule=FreshnessRule(groups_per_step=8, max_in_flight=64, max_head_offpolicy_versions=1))
TASKS = 1_000
STEPS_PER_TRANSACTION = 50
CHECKPOINT_EVERY = 10
FILTERED_EVERY = 16
QUEUED = 7
REPEATS = 5
MAX_AUDIT_US = 40.0
MAX_START_MS = 100.0
MAX_IDLE_MS = 3.0
IDLE_RUNS = 1_000
IDLE_S = 4.0
FLOOR = 0.5


class History:
    """Plays a run through the rules, without HTTP and without a model."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self.store = store
        self._clock = clock
        self._position = 0
        self.step = 0
        self._owner = OwnerId("")
        is_response = np.arange(16) >= 8
        row = TokenRow(
            token_ids=np.arange(16, dtype=np.int32),
            logprobs=np.where(is_response, -0.5, 0.0).astype(np.float32),
            loss_mask=is_response,
            versions=np.where(is_response, 0, -1).astype(np.int32),
        )
        self._row = row

    async def begin(self) -> None:
        def work(run_tx: RunTransaction) -> OwnerId:
            trainer.take_role(run_tx, restored_step=0)
            publications.confirm(run_tx, publications.register(run_tx, 0, "d0", epoch=1), epoch=1)
            return gate.join(run_tx, "dispatcher", "nonce")

        self._owner = await self.write(work)

    async def play(self, num_groups: int) -> None:
        while self._position < num_groups:
            await self.write(lambda run_tx: self.steps(run_tx, num_groups))
        await self.write(self.fill_queue)

    async def write(self, rule: Callable[[RunTransaction], T]) -> T:
        def work(tx: Transaction) -> T:
            with run_transaction(tx, RUN, time.time()) as run_tx:
                return rule(run_tx)

        return await self.store.write(work)

    def open(self, run_tx: RunTransaction, limit: int) -> list[GroupId]:
        numbers = range(self._position, self._position + limit)
        draws = [Draw(task_id=TaskId(f"t{n % TASKS}"), number=n // TASKS, position=n) for n in numbers]
        reply = gate.open_groups(run_tx, self._owner, draws, limit=limit, request_id=f"r{self._position}")
        self._position += len(reply.grants)
        return [grant.group_id for grant in reply.grants]

    def submit(self, run_tx: RunTransaction, opened: list[GroupId], *, filters: bool = True) -> None:
        for group in opened:
            task, number = group.rsplit("@", 1)
            is_filtered = filters and (int(task[1:]) + int(number)) % FILTERED_EVERY == 0
            groups.submit(
                run_tx, self.submission(TaskId(task), int(number), is_filtered=is_filtered), max_queued=10_000
            )

    def fill_queue(self, run_tx: RunTransaction) -> None:
        """The same number of queued groups at every size: `queued` returns them all."""
        if run_tx.run.num_queued < QUEUED:
            self.submit(run_tx, self.open(run_tx, QUEUED - run_tx.run.num_queued), filters=False)

    def submission(self, task: TaskId, draw: int, *, is_filtered: bool) -> Submission:
        drop = DropReason(DropKind.FILTERED, "constant reward") if is_filtered else None
        return Submission.of(encode_group(self._group(task, draw), drop=drop))

    def _group(self, task: TaskId, draw: int) -> PromptGroup:
        # Sampled by the newest publication, whose id is the step while no trainer was replaced.
        versions = np.where(self._row.loss_mask, self.step, -1).astype(np.int32)
        row = TokenRow(
            token_ids=self._row.token_ids,
            logprobs=self._row.logprobs,
            loss_mask=self._row.loss_mask,
            versions=versions,
        )
        sample = RolloutSample(sequences=(row,), sampling=SamplingParams(), reward=1.0)
        return PromptGroup(id=group_id(task, draw), task_id=task, draw=draw, samples=(sample, sample))

    def decide(self, run_tx: RunTransaction) -> bool:
        return batches.decide(run_tx, self.step + 1, epoch=1).manifest is not None

    def finish_step(self, run_tx: RunTransaction) -> None:
        self.step += 1
        digest = f"d{self.step}"
        trainer.acknowledge(run_tx, self.step, digest, epoch=1)
        publications.confirm(run_tx, publications.register(run_tx, self.step, digest, epoch=1), epoch=1)

    def checkpoint(self, run_tx: RunTransaction) -> None:
        trainer.checkpointed(run_tx, self.step, oldest_kept=max(0, self.step - CHECKPOINT_EVERY), epoch=1)

    def steps(self, run_tx: RunTransaction, num_groups: int) -> None:
        for _ in range(STEPS_PER_TRANSACTION):
            if self._position >= num_groups:
                return
            self.submit(run_tx, self.open(run_tx, 8))
            while self.decide(run_tx):
                self.finish_step(run_tx)
                if self.step % CHECKPOINT_EVERY == 0:
                    self.checkpoint(run_tx)

    async def one_step(self) -> dict[str, float]:
        """Seconds of each verb of the loop, each in its own transaction."""
        opened: list[GroupId] = []
        clock = self._clock
        spent = {"open": await timed(clock, self.write(lambda run_tx: opened.extend(self.open(run_tx, 8))))}
        spent["submit"] = await timed(clock, self.write(lambda run_tx: self.submit(run_tx, opened, filters=False)))
        spent["decide"] = await timed(clock, self.write(self.decide))
        spent["acknowledge"] = await timed(clock, self.write(self.finish_step))
        spent["checkpointed"] = await timed(clock, self.write(self.checkpoint))
        return spent


async def timed(clock: Callable[[], float], call: Awaitable[object]) -> float:
    before = clock()
    await call
    return clock() - before


async def measure(url: str, num_groups: int, clock: Callable[[], float]) -> dict[str, float]:
    """Milliseconds by verb."""
    log = EventLog("ledger")
    async with open_store(url) as store, open_ledger(store, LedgerConfig(), clock=SystemClock(), log=log) as ledger:
        await ledger.create_run(RUN, SETTINGS)
        history = History(store, clock)
        await history.begin()
        built = time.perf_counter()
        await history.play(num_groups)
        print_status(f"{num_groups:>9,} groups built in {time.perf_counter() - built:.1f} s")
    started = clock()
    async with open_store(url) as store, open_ledger(store, LedgerConfig(), clock=SystemClock(), log=log) as ledger:
        found = {"start": 1e3 * (clock() - started)}
        history.store = store
        # The check of the file's tables runs in the background after the start and would be counted.
        await asyncio.sleep(1 + num_groups / 50_000)
        spent = [await history.one_step() for _ in range(REPEATS)]
        for verb in spent[0]:
            found[verb] = 1e3 * statistics.median(times[verb] for times in spent)
        for verb, call in queries(ledger, num_groups).items():
            found[verb] = 1e3 * statistics.median([await timed(clock, call()) for _ in range(REPEATS)])
        marks: list[AuditMark | None] = []
        found["audit"] = 1e3 * await timed(clock, ledger.read(lambda tx: marks.append(audit_since(tx, RUN, None)[1])))
        await history.one_step()
        found["audit_after_a_step"] = 1e3 * statistics.median(
            [await timed(clock, ledger.read(lambda tx: audit_since(tx, RUN, marks[0]))) for _ in range(REPEATS)]
        )
        compacting = compact(store, now=time.time(), run_id=RUN, up_to_step=history.step)
        found["compaction"] = 1e3 * await timed(clock, compacting)
    return found


def queries(ledger: Ledger, num_groups: int) -> dict[str, Callable[[], Awaitable[object]]]:
    last = num_groups - 200
    middle = GroupId(f"t{(num_groups // 2) % TASKS}@{num_groups // 2 // TASKS}")
    return {
        "status": lambda: ledger.status(RUN),
        "queued": lambda: ledger.read(lambda tx: tx.groups.queued(RUN)),
        "progress": lambda: ledger.progress(RUN),
        "outcomes_page": lambda: ledger.outcomes(RUN, after=last, limit=100),
        "explain": lambda: ledger.read(lambda tx: explain_group(tx, RUN, middle)),
        **{
            f"groups_{state.value}_last_page": lambda state=state: ledger.groups(RUN, state, limit=100, start=last)  # type: ignore[misc]
            for state in GroupState
        },
        "groups_queued_first_page": lambda: ledger.groups(RUN, GroupState.QUEUED, limit=100),
        "groups_batched_first_page": lambda: ledger.groups(RUN, GroupState.BATCHED, limit=100),
        "groups_last_page": lambda: ledger.groups(RUN, limit=100, start=last),
        "publications_page": lambda: ledger.publications(RUN, start=num_groups // 16, limit=100),
        "steps_page": lambda: ledger.steps(RUN, start=num_groups // 16, limit=100),
    }


async def idle_ms_per_s(url: str) -> float:
    """CPU milliseconds a second of a ledger with many runs that nothing happens in."""
    async with (
        open_store(url) as store,
        open_ledger(store, LedgerConfig(), clock=SystemClock(), log=EventLog("ledger")) as ledger,
    ):
        for number in range(IDLE_RUNS):
            await ledger.create_run(RunId(f"run-{number}"), SETTINGS)
        return 1e3 * await timed(time.process_time, asyncio.sleep(IDLE_S)) / IDLE_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 20_000, 200_000], help="numbers of past groups")
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    args = parser.parse_args()
    is_sqlite = args.store == "sqlite"
    clock, unit = (time.process_time, "CPU") if is_sqlite else (time.perf_counter, "wall")
    found: dict[int, dict[str, float]] = {}
    server = None if is_sqlite else load_on_demand("tests.parts.ledger.postgres").make_server()
    with tempfile.TemporaryDirectory() as folder:

        def new_url(name: str) -> str:
            return sqlite_url(Path(folder) / name) if server is None else server.fresh_url()

        for size in args.sizes:
            found[size] = asyncio.run(measure(new_url(str(size)), size, clock))
            shutil.rmtree(Path(folder) / str(size), ignore_errors=True)
        idle = asyncio.run(idle_ms_per_s(new_url("idle")))
    small, large = args.sizes[0], args.sizes[-1]
    for verb in found[large]:
        print_status(f"{verb:<28}" + "".join(f"{found[size][verb]:>12.3f} ms" for size in args.sizes))
    verbs = [verb for verb in found[large] if verb not in PER_GROUP]
    figures = [flat(verb, found[small][verb], found[large][verb], f"ms {unit}") for verb in verbs]
    compaction = [found[size]["compaction"] / size for size in (small, large)]
    figures += [
        limit("start", found[large]["start"], MAX_START_MS, f"ms {unit}"),
        limit("audit_per_group", 1e3 * found[large]["audit"] / large, MAX_AUDIT_US, f"us {unit}"),
        flat("compaction_per_group", compaction[0], compaction[1], f"ms {unit}"),
        limit("idle_with_1000_runs", idle, MAX_IDLE_MS, "ms CPU/s"),
    ]
    return print_figures(figures, store=args.store, milliseconds={str(size): found[size] for size in args.sizes})


PER_GROUP = frozenset({"start", "audit", "compaction"})
NOISE_MS = 0.2
"""Added to both sides of a ratio: a verb that takes microseconds is flat whatever the clock's resolution says."""


def flat(verb: str, small: float, large: float, unit: str) -> Figure:
    ratio = (small + NOISE_MS) / (large + NOISE_MS) if verb != "compaction_per_group" else small / large
    return Figure(name=verb, ours=large, peer=small, unit=unit, ratio=ratio, floor=FLOOR)


def limit(name: str, value: float, most: float, unit: str) -> Figure:
    return Figure(name=name, ours=value, peer=most, unit=unit, ratio=most / value, floor=1.0)


if __name__ == "__main__":
    sys.exit(main())
