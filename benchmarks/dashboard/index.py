"""The view index on a synthetic run: indexing rate, memory, and filtered queries against a scan of the ledger.

`python -m benchmarks.dashboard.index --groups 1000000` writes a ledger with that many groups, indexes it in a child process as a
dashboard does, and then requests filtered lists with counts, histogram and facets. The peer of a query is the same filter in SQL on
the ledger's own table, which has no index for it.
"""

import argparse
import asyncio
import json
import random
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.admission import RunId, RunSettings
from rollbook.contracts.freshness import FreshnessRule
from rollbook.contracts.group import GroupId, GroupOutcome, GroupState, SampleOutcome
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import EndReason
from rollbook.dashboard.index.filters import GroupFilter
from rollbook.dashboard.index.follower import FollowedIndex, follow
from rollbook.dashboard.index.index import ViewIndex
from rollbook.ledger.records import GroupRecord, MoveRecord, Origin, RunRecord
from rollbook.ledger.stores.registry import sqlite_url
from rollbook.ledger.stores.sql.tables import GROUPS, MOVES, RUNS
from rollbook.ledger.stores.sqlite.file import FILE_NAME, create_tables
from rollbook.run.reader import StoreSource

RUN = RunId("synthetic")
PER_STEP = 16
TASKS = 5_000
OUTCOMES = 20_000
"""Different outcomes. Each group has one of them: computing a million would take minutes."""
PAGE = 50
BATCH = 20_000
REPEATS = 5
MAX_QUERY_MS = 150.0
MIN_SPEEDUP = 20.0
MIN_RATE = 30_000.0
MAX_MEMORY_MB = 300.0
FILTERS = (
    {"reward": "0.9:"},
    {"reward": "0.45:0.55", "state": "durable"},
    {"state": "dropped", "drop": "filtered"},
    {"step": "1000-1200", "solved": "none"},
    {"task": "t77"},
    {"lag": "2:", "tokens": "300:"},
    {"end": "max_tokens", "order": "-reward"},
    {"task_like": "99", "solved": "some"},
)
SCANS = (
    "json_extract(outcome, '$.reward_mean') >= 0.9",
    "json_extract(outcome, '$.reward_mean') BETWEEN 0.45 AND 0.55 AND state = 'durable'",
    "state = 'dropped' AND drop_reason LIKE 'filtered%'",
    "step BETWEEN 1000 AND 1200 AND json_extract(outcome, '$.solved_rate') = 0",
    "task_id = 't77'",
    "step - 1 - oldest_version >= 2 AND json_extract(outcome, '$.mean_response_tokens') >= 300",
    "json_extract(outcome, '$.truncated_rate') > 0",
    "task_id LIKE '%99%' AND json_extract(outcome, '$.solved_rate') BETWEEN 0.01 AND 0.99",
)


def outcomes(count: int) -> list[bytes]:
    rng = random.Random(0)
    found = []
    for number in range(count):
        rewards = [round(rng.random(), 3) for _ in range(8)]
        tokens = rng.randrange(20, 400)
        ends = [EndReason.MAX_TOKENS if rng.random() < 0.02 else EndReason.DONE for _ in rewards]
        outcome = GroupOutcome(
            num_samples=8,
            num_scorable=8,
            reward_mean=sum(rewards) / 8,
            reward_std=statistics.stdev(rewards),
            solved_rate=sum(reward > 0.5 for reward in rewards) / 8,
            truncated_rate=sum(end.is_truncated for end in ends) / 8,
            mean_turns=3.0,
            mean_response_tokens=float(tokens),
            seconds=rng.random() * 20,
            samples=tuple(
                SampleOutcome(reward, reward > 0.5, tokens, 3, end, 1.7e9 + number, 4.25)
                for reward, end in zip(rewards, ends, strict=True)
            ),
        )
        found.append(msgspec.json.encode(outcome))
    return found


def groups(count: int) -> Iterator[GroupRecord]:
    rng = random.Random(1)
    pool = outcomes(min(count, OUTCOMES))
    for number in range(count):
        is_filtered, step = number % 16 == 15, number // PER_STEP + 1
        task = f"t{number % TASKS}"
        yield GroupRecord(
            run_id=RUN,
            group_id=GroupId(f"{task}@{number // TASKS}"),
            task_id=TaskId(task),
            draw=number // TASKS,
            position=number,
            origin=Origin.DRAWN,
            state=GroupState.DROPPED if is_filtered else GroupState.DURABLE,
            sequence=number,
            opened_at=1.7e9 + number,
            attempt=1,
            admission_version=max(0, step - 2),
            publications=(max(0, step - 2),),
            oldest_version=max(0, step - 1 - number % 3),
            step=None if is_filtered else step,
            drop_reason="filtered: all rewards are equal" if is_filtered else None,
            outcome=rng.choice(pool),
            payload_digest="0" * 32,
            payload_bytes=4096,
        )


def write_ledger(folder: Path, count: int) -> None:
    path = folder / FILE_NAME
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = OFF")
    create_tables(db, path)
    rule = FreshnessRule(groups_per_step=PER_STEP, max_in_flight=64, max_head_offpolicy_versions=2)
    run = RunRecord(
        run_id=RUN,
        settings=RunSettings(rule=rule),
        created_at=1.7e9,
        num_opened=count,
        num_durable=count - count // 16,
        next_sequence=count,
    )
    db.execute("BEGIN")
    db.execute(RUNS.insert.sql(), RUNS.row(run))
    rows: list[GroupRecord] = []
    for group in groups(count):
        rows.append(group)
        if len(rows) == BATCH:
            _insert(db, rows)
    _insert(db, rows)
    db.execute("COMMIT")
    db.close()


def _insert(db: sqlite3.Connection, rows: list[GroupRecord]) -> None:
    db.executemany(GROUPS.insert.sql(), [GROUPS.row(row) for row in rows])
    moves = [
        MoveRecord(
            run_id=RUN,
            group_id=row.group_id,
            at=row.opened_at,
            from_state=None,
            to_state=GroupState.DISPATCHED,
            note="",
            by="benchmark",
        )
        for row in rows
    ]
    db.executemany(MOVES.insert.sql(), [MOVES.row(move) for move in moves])
    rows.clear()


def query(index: ViewIndex, wanted: GroupFilter) -> int:
    """The filter of the list on the page."""
    places = index.list_of(wanted)
    index.rows(places[:PAGE])
    index.reward_histogram(wanted)
    index.facets(wanted)
    return len(places)


async def measure(folder: Path) -> dict[str, object]:
    """In a separate process, so that its memory is that of a dashboard with this run."""
    async with follow(folder / "index.sqlite", RUN, StoreSource(sqlite_url(folder), RUN)) as index:
        began = time.process_time()
        await _complete(index)
        index_s = time.process_time() - began
        queries: list[list[float]] = []
        for parameters in FILTERS:
            times = []
            for repeat in range(REPEATS):
                # Another limit each time: no list is answered from the cache.
                wanted = GroupFilter.parse({**parameters, "seconds": f":{1000 + repeat}"})
                started = time.perf_counter()
                await index.read(lambda found, wanted=wanted: query(found, wanted))  # type: ignore[misc]
                times.append(1e3 * (time.perf_counter() - started))
            queries.append(times)
        num_groups = (await index.state()).indexed
    return {
        "index_s": index_s,
        "groups": num_groups,
        "queries_ms": queries,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


async def _complete(index: FollowedIndex) -> None:
    while not (await index.update()).is_complete:
        pass


def scan_ms(folder: Path) -> list[float]:
    """The same filters on the ledger: the newest page and the number of all matches."""
    db = sqlite3.connect(f"file:{folder / FILE_NAME}?mode=ro", uri=True)
    found = []
    for condition in SCANS:
        began = time.perf_counter()
        where = f"FROM groups WHERE run_id = ? AND {condition}"
        db.execute(f"SELECT count(*) {where}", (RUN,)).fetchone()
        db.execute(f"SELECT * {where} ORDER BY sequence DESC LIMIT {PAGE}", (RUN,)).fetchall()
        found.append(1e3 * (time.perf_counter() - began))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(asyncio.run(measure(args.measure))))
        return 0
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as name:
        folder = Path(name)
        print_status(f"writing a ledger with {args.groups} groups")
        write_ledger(folder, args.groups)
        print_status("indexing and querying")
        command = [sys.executable, "-m", "benchmarks.dashboard.index", "--measure", str(folder)]
        child = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        print_status("scanning the ledger")
        scans = scan_ms(folder)
    ours = [statistics.median(times) for times in child["queries_ms"]]
    every = sorted(time for times in child["queries_ms"] for time in times)
    p95 = every[int(0.95 * (len(every) - 1))]
    rate = child["groups"] / child["index_s"]
    figures = [
        Figure(
            name="filtered_query",
            ours=statistics.mean(ours),
            peer=statistics.mean(scans),
            unit="ms",
            ratio=statistics.mean(scans) / statistics.mean(ours),
            floor=MIN_SPEEDUP,
            more={"ours_ms": ours, "scan_ms": scans},
        ),
        Figure(name="query_p95", ours=p95, peer=MAX_QUERY_MS, unit="ms", ratio=MAX_QUERY_MS / p95, floor=1.0),
        Figure(name="indexing", ours=rate, peer=MIN_RATE, unit="groups/CPU s", ratio=rate / MIN_RATE, floor=1.0),
        Figure(
            name="memory",
            ours=child["memory_mb"],
            peer=MAX_MEMORY_MB,
            unit="MB",
            ratio=MAX_MEMORY_MB / child["memory_mb"],
            floor=1.0,
        ),
    ]
    return print_figures(figures, groups=child["groups"])


if __name__ == "__main__":
    sys.exit(main())
